"""The patches that both devices need, where vLLM has no extension point. `vllm_cpu` and `vllm_cuda` hold those of one device.

Tested with vLLM 0.32.0.

| patched | why no extension point serves |
|---|---|
| `UnquantizedLinearMethod.apply`, `UnquantizedEmbeddingMethod.apply`, `.embedding` | the unquantised method cannot be registered anew |
| `Sampler.compute_logprobs` | a static method that both the sampler and the prompt-logprob path call |

Each patch runs vLLM's own function when its operator is not bound.
"""

from __future__ import annotations

from consistency.bindings import rollout as bindings
from consistency.engines import events


def apply() -> None:
    """Applies every patch. Call once per process, before a model is built."""
    _patch_linear()
    _patch_sampler()


def _patch_linear() -> None:
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    for cls in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
        def apply_linear(self, layer, x, bias=None, *, stock=cls.apply):
            operator = bindings.get("linear")
            return stock(self, layer, x, bias) if operator is None else operator(x, layer.weight, bias)

        cls.apply = apply_linear

    stock_embedding = UnquantizedEmbeddingMethod.embedding

    def embedding(self, layer, ids):
        operator = bindings.get("embedding")
        return stock_embedding(self, layer, ids) if operator is None else operator(ids, layer.weight)

    UnquantizedEmbeddingMethod.embedding = embedding


def _patch_sampler() -> None:
    from vllm.v1.sample.sampler import Sampler

    stock = Sampler.compute_logprobs

    def compute_logprobs(logits):
        operator = bindings.get("log_softmax")
        out = stock(logits) if operator is None else operator(logits)
        for observer in events.LOGITS:
            observer(out, "log_softmax")
        return out

    Sampler.compute_logprobs = staticmethod(compute_logprobs)
