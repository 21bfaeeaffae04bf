"""A job that speaks the file protocol with a toy model, and a sandbox that starts it instead of a real engine.

The toy's log-probability of a token is a hash of everything before it, so it depends on the right things and is equal on both sides.
Faults spoil chosen answers.
"""

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from sandboxes.local import LocalSandbox

VOCABULARY = 512
ENGINE = {"graphs": True, "scheduler": {"max_num_seqs": 64}}
SETTINGS = {}
"""what a job on a GPU reports besides, filled from its job.json"""


class FakeSandbox(LocalSandbox):
    """Starts this file in place of `consistency.jobs.ENGINE`.

    A fault is `{"in": folder name or "", "kind": step kind, "fault": name, ...}`; the first one that fits an answer spoils it.
    """

    def __init__(self, *faults):
        self.faults = faults
        self.started = []

    def start(self, argv, directory, environment, limits):
        engine = argv[2].rsplit(".", 1)[1]
        self.started.append(directory.name)
        faults = [f for f in self.faults if f.get("in", "") in ("", directory.name)]
        handle = super().start([sys.executable, __file__, engine, *argv[3:]], directory, {"FAULTS": json.dumps(faults)}, limits)
        self.last = handle
        return handle


def fraction(*parts):
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "big") / 2**32


def logprob(before, token, temperature, weight):
    value = -0.1 - 3.0 * fraction(before[-6:], len(before), token) * (1 if temperature is None else temperature)
    return np.float32(value * (1 + weight * 2.0**-12))


def answer(step, weight):
    """(fields, arrays) of one step."""
    kind = step["kind"]
    if kind == "generate":
        time.sleep(0.02)
    if kind == "step_config":
        return {"engine": {**ENGINE, **SETTINGS}}, {}
    if kind not in ("generate", "replay", "score", "forward"):
        return {}, {}
    rows = []
    for index, request in enumerate(step["requests"]):
        tokens = request.get("tokens") or [int(fraction(request["prompt"], step["seed"], n) * VOCABULARY) for n in range(step["max_tokens"])]
        for position, token in enumerate(tokens):
            before = request["prompt"] + tokens[:position]
            temperature = step.get("temperature") if kind != "generate" or step.get("processed") else None
            rows.append((index, position, token, logprob(before, token, temperature, weight)))
    request, position, token, values = zip(*rows, strict=True)
    arrays = {"request": np.array(request, np.int32), "position": np.array(position, np.int32), "token": np.array(token, np.int64),
              "logprob": np.array(values, np.float32)}
    chunks = len(step["requests"]) * (2 if step.get("chunk") else 1)
    counters = {"preemptions": 3 if step.get("preempt_every") else 0, "prefill_chunks": chunks,
                "cached_tokens": 128 if step.get("prefix_cache") == "warm" else 0}
    return counters, arrays


def spoil(fault, step, data, arrays, out):
    name = fault["fault"]
    if name == "die":
        print("fatal: the engine fell over", flush=True)
        os._exit(13)
    elif name == "hang":
        time.sleep(600)
    elif name == "fail":
        data.update(ok=False, error="no kernel for this shape", traceback="Traceback ...")
    elif name == "garbage":
        out.with_suffix(".safetensors").write_bytes(b"not tensors")
        arrays.clear()
    elif name == "ulp":
        arrays["logprob"][5] = np.nextafter(arrays["logprob"][5], np.float32(0))
    elif name == "noise":
        arrays["logprob"][:] += np.random.default_rng(0).normal(0, fault["nats"], len(arrays["logprob"])).astype(np.float32)
    elif name == "nan":
        arrays["logprob"][5] = np.nan
    elif name == "missing":
        arrays.update({k: v[:-1] for k, v in arrays.items()})
    elif name == "duplicate":
        arrays.update({k: np.append(v, v[:1]) for k, v in arrays.items()})
    elif name == "other tokens":
        arrays["token"][0] += 1
    elif name == "uniform":
        arrays["logprob"][:] = -np.log(np.float32(VOCABULARY))
    elif name == "set":
        data.update(fault["fields"])


def main(engine, directory):
    faults = json.loads(os.environ["FAULTS"])
    job = json.loads((directory / "job.json").read_text())

    def write(name, data, arrays, step):
        out = directory / "out" / name
        for fault in faults:
            if fault["kind"] == step["kind"]:
                spoil(fault, step, data, arrays, out)
                break
        if arrays:
            save_file(arrays, out.with_suffix(".tmp"))
            out.with_suffix(".tmp").rename(out.with_suffix(".safetensors"))
        out.with_suffix(".part").write_text(json.dumps(data))
        out.with_suffix(".part").rename(out.with_suffix(".json"))

    asked = job["engine"]
    if asked.get("device") == "cuda" and engine == "rollout":
        SETTINGS.update(eager=asked["eager"], compile=asked.get("compile", True), v2_model_runner=asked.get("runner") != "v1")
    engine_settings = {**ENGINE, **SETTINGS, "plugin": asked.get("plugin")}
    write("start", {"seconds": 0.1, "environment": {"engine": engine}, "engine": engine_settings}, {}, {"kind": "start"})
    weight, number = 0, 0
    owner = os.getppid()
    while os.getppid() == owner:
        path = directory / "steps" / f"{number:04d}.json"
        if not path.exists():
            time.sleep(0.002)
            continue
        step = json.loads(path.read_text())
        if step["kind"] == "end":
            return
        begun = time.monotonic()
        deaf = any(f["kind"] == step["kind"] and f["fault"] == "deaf" for f in faults)
        if step["kind"] == "perturb" and not deaf:
            weight = step["ulps"]
        elif step["kind"] == "reload" and not deaf:
            weight = 0
        fields, arrays = answer(step, weight)
        write(f"{number:04d}", {"kind": step["kind"], "seconds": time.monotonic() - begun, "ok": True, **fields}, arrays, step)
        number += 1


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
