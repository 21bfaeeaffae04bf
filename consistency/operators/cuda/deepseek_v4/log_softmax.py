"""Log-probability of a token as vLLM's V2 model runner computes it, beside the project's own kernel."""

import torch

from consistency.operators.cuda.case import Case, Inputs, normal
from consistency.operators.cuda.deepseek_v4.shapes import FAMILY
from consistency.operators.cuda.log_softmax import log_softmax_reference, token_log_softmax

VOCABULARY = 129280


def stock(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """fp32 logits [M, vocabulary], tokens [M] -> fp32 [M]."""
    from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs

    return compute_token_logprobs(logits, tokens[:, None])[:, 0]


def _torch(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """What a training forward calls, and vLLM's V1 runner."""
    return log_softmax_reference(logits.float(), tokens)


def _inputs(rows: int, generator: torch.Generator) -> Inputs:
    logits = normal((rows, VOCABULARY), generator, 3.0).float()
    return Inputs((logits, torch.randint(0, VOCABULARY, (rows,), generator=generator, device=logits.device)), ())


CASES = [
    Case("log_softmax", str(VOCABULARY), FAMILY, _inputs, token_log_softmax, lambda logits, tokens: log_softmax_reference(logits.double(), tokens),
         stock, configurations={"torch": _torch, "V2 runner": stock}, prefill=(2048,)),
]
