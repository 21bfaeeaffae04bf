"""Job: the training forward, answering the steps of docs/architecture.md.

    python -m consistency.jobs.training DIR
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def start(job: dict):
    """Loads the model; returns (handler, resolved configuration)."""
    from consistency.contract import Contract
    from consistency.engines.training import Training

    engine = {"threads": 1, "dtype": "bfloat16", **(job.get("engine") or {})}
    training = Training(job["family"], Path(job["checkpoint"]), Contract.from_dict(job["contract"]),
                        Path(job["kernels"]) if job.get("kernels") else None, **engine)
    return lambda step: _HANDLERS[step["kind"]](training, step), engine


def _how(step: dict):
    from consistency.engines.training import Forward

    return Forward(**{k: step[k] for k in ("layout", "micro_batch", "mode", "grad", "temperature") if step.get(k) is not None})


def _forward(training, step):
    return training.forward(step["requests"], _how(step))


def _bind(training, step):
    from consistency.contract import Contract

    training.bindings.bind(Contract.from_dict(step["contract"]))
    return {}, {"bound": training.bindings.names}


def _perturb(training, step):
    from consistency.engines.weights import perturb

    return {}, perturb(training.parameters(), step.get("parameter"), step.get("ulps", 1))


def _reload(training, step):
    training.reload(Path(step["checkpoint"]) if step.get("checkpoint") else None)
    return {}, {}


def _weights(training, step):
    from consistency.engines.weights import training_fingerprints

    return {}, {"weights": training_fingerprints(training.model)}


def _trace(training, step):
    from consistency.trace import Recorder

    recorder = Recorder([len(r["prompt"]) + len(r["tokens"]) for r in step["requests"]], step.get("dump"))
    training.trace(step["requests"], recorder, _how(step))
    arrays = training.forward(step["requests"], _how({**step, "grad": False}))[0] if step.get("logprobs", True) else {}
    return {**arrays, **recorder.arrays()}, {"sites": recorder.site_list()}


def _operator(training, step):
    from consistency.jobs.operator import handle

    return handle(training, step)


_HANDLERS = {"forward": _forward, "bind": _bind, "perturb": _perturb, "reload": _reload, "weights": _weights, "trace": _trace, "operator": _operator}


def main() -> int:
    directory = Path(sys.argv[1])
    engine = json.loads((directory / "job.json").read_text()).get("engine") or {}
    from consistency.engines.environment import prepare

    prepare(engine.get("threads", 1))
    from consistency.jobs.protocol import serve

    return serve(directory, start)


if __name__ == "__main__":
    sys.exit(main())
