"""A small engine behind the real protocol, so that candidate kernels run in real jobs without vLLM's start.

    python toy_job.py rollout|training DIR

Real: the protocol, the guard, the binding of contracts and kernel files, the exact operators. Small: the model, a feed-forward network over a
window of tokens. Nothing in it depends on schedule or batch, so that the exact contract is exact.
"""

import json
import sys
from pathlib import Path

import torch

from consistency.bindings import Bindings
from consistency.contract import Contract
from consistency.jobs.protocol import serve
from consistency.operators import catalog

VOCABULARY, HIDDEN, INNER, WINDOW = 512, 64, 96, 4
CONFIG = {"graphs": True, "prefix_caching": True, "max_num_seqs": 64}
"""What a resolved configuration is in an engine: live, and within reach of code in the same process."""


class Toy:
    def __init__(self, side: str, job: dict) -> None:
        torch.set_num_threads(1)
        self.config = {**CONFIG, "max_num_seqs": job["engine"].get("max_num_seqs", 64)}
        sys.modules["toy_engine_state"] = self
        self.bindings = Bindings(side, Path(job["kernels"]) if job.get("kernels") else None)
        self.bindings.bind(Contract.from_dict(job["contract"]))
        dtype = torch.float32 if job["engine"].get("dtype") == "float32" else torch.bfloat16
        source = torch.Generator().manual_seed(7)
        shapes = {"embedding": (VOCABULARY, HIDDEN), "norm": (HIDDEN,), "up": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER), "last": (HIDDEN,),
                  "head": (VOCABULARY, HIDDEN)}
        self.weights = {name: self._weight(name, shape, source).to(torch.bfloat16).to(dtype) for name, shape in shapes.items()}
        self.head = self.weights["head"].clone()

    @staticmethod
    def _weight(name: str, shape: tuple[int, ...], source: torch.Generator) -> torch.Tensor:
        noise = torch.randn(shape, generator=source)
        if len(shape) == 1:
            return 1 + 0.2 * noise
        return noise if name == "embedding" else noise * shape[-1] ** -0.5 * (2.0 if name == "head" else 1.0)

    def operator(self, name: str):
        return self.bindings.get(name) or catalog.load(name, "exact", "training")

    def rows(self, windows: list[list[int]]) -> torch.Tensor:
        """Windows of token ids, one per row -> log-probabilities of the next token, fp32 [rows, V]."""
        w = self.weights
        ids = torch.tensor([window[-WINDOW:] for window in windows])
        embedded = self.operator("embedding")(ids.flatten(), w["embedding"]).view(*ids.shape, HIDDEN)
        x = embedded[:, 0]
        for place in range(1, WINDOW):
            x = x * 0.5 + embedded[:, place]
        norm, linear = self.operator("rms_norm"), self.operator("linear")
        y, _ = norm(x, w["norm"], 1e-6)
        y = linear(self.operator("silu_and_mul")(linear(y, w["up"])), w["down"])
        y, _ = norm(y, w["last"], 1e-6, x)
        return self.operator("log_softmax")(linear(y, w["head"]))

    def window(self, tokens: list[int]) -> list[int]:
        return ([0] * WINDOW + tokens)[-WINDOW:]

    # ---- steps ------------------------------------------------------------------------------------------------------

    def generate(self, step: dict):
        source = torch.Generator().manual_seed(step["seed"])
        texts = [list(r["prompt"]) for r in step["requests"]]
        found = []
        for position in range(step["max_tokens"]):
            logprobs = self.rows([self.window(text) for text in texts])
            temperature = step["temperature"]
            drawn = torch.multinomial((logprobs.nan_to_num(-5.0) / temperature).softmax(-1), 1, generator=source)[:, 0].tolist()
            if step.get("processed"):
                logprobs = torch.log_softmax(logprobs / temperature, -1)
            for i, token in enumerate(drawn):
                found.append((i, position, token, float(logprobs[i, token])))
                texts[i].append(token)
        return self._arrays(found), self._counters(step)

    def replay(self, step: dict):
        """Decodes group by group, one token of each request at a time."""
        requests, found = step["requests"], []
        for group in step.get("groups") or [list(range(len(requests)))]:
            for position in range(max(len(requests[i]["tokens"]) for i in group)):
                mine = [i for i in group if position < len(requests[i]["tokens"])]
                rows = self.rows([self.window(requests[i]["prompt"] + requests[i]["tokens"][:position]) for i in mine])
                found += [(i, position, t, float(rows[j, t])) for j, i in enumerate(mine) for t in [requests[i]["tokens"][position]]]
        return self._arrays(found), self._counters(step)

    def forward(self, step: dict):
        """All rows of a micro-batch at once."""
        requests, found = step["requests"], []
        size = step.get("micro_batch") or len(requests)
        for start in range(0, len(requests), size):
            keys = [(i, p) for i in range(start, min(start + size, len(requests))) for p in range(len(requests[i]["tokens"]))]
            rows = self.rows([self.window(requests[i]["prompt"] + requests[i]["tokens"][:p]) for i, p in keys])
            if step.get("temperature") is not None:
                rows = torch.log_softmax(rows / step["temperature"], -1)
            found += [(i, p, t, float(rows[j, t])) for j, (i, p) in enumerate(keys) for t in [requests[i]["tokens"][p]]]
        return self._arrays(found), self._counters(step)

    def perturb(self, step: dict):
        bits = self.weights["head"].view(torch.int16 if self.weights["head"].element_size() == 2 else torch.int32)
        bits.view(-1)[: HIDDEN * VOCABULARY : HIDDEN] += step["ulps"]
        return {}, {}

    def reload(self, step: dict):
        self.weights["head"].copy_(self.head)
        return {}, {}

    def step_config(self, step: dict):
        return {}, {"engine": dict(self.config)}

    @staticmethod
    def _counters(step: dict) -> dict:
        count = len(step["requests"])
        return {"preemptions": 3 if step.get("preempt_every") else 0, "prefill_chunks": count * (2 if step.get("chunk") else 1),
                "cached_tokens": 128 if step.get("prefix_cache") == "warm" else 0}

    @staticmethod
    def _arrays(found: list[tuple[int, int, int, float]]) -> dict[str, torch.Tensor]:
        request, position, token, logprob = zip(*found, strict=True)
        return {"request": torch.tensor(request, dtype=torch.int32), "position": torch.tensor(position, dtype=torch.int32),
                "token": torch.tensor(token), "logprob": torch.tensor(logprob, dtype=torch.float32)}


def start(side: str, job: dict):
    with torch.no_grad():
        toy = Toy(side, job)

    def handle(step: dict):
        with torch.no_grad():
            return getattr(toy, "forward" if step["kind"] == "score" else step["kind"])(step)

    return handle, dict(toy.config)


if __name__ == "__main__":
    engine, folder = sys.argv[1], Path(sys.argv[2])
    json.loads((folder / "job.json").read_text())
    sys.exit(serve(folder, lambda job: start(engine, job)))
