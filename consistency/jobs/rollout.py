"""Job: the rollout engine, answering the steps of docs/architecture.md.

    python -m consistency.jobs.rollout DIR
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def start(job: dict):
    """Brings vLLM up; returns (handler, resolved configuration)."""
    from consistency.contract import Contract
    from consistency.engines.rollout import Rollout

    rollout = Rollout(job["family"], Path(job["checkpoint"]), Contract.from_dict(job["contract"]),
                      Path(job["kernels"]) if job.get("kernels") else None, job.get("engine"))
    return lambda step: _HANDLERS[step["kind"]](rollout, step), configuration(rollout)


def configuration(rollout) -> dict:
    """The resolved configuration, with what the scheduler and the cache really work by: an echo of what was asked for would show no change.

    Sizes that follow from free memory are left out.
    """
    config = rollout.llm.llm_engine.vllm_config
    live = {"max_num_seqs": rollout.scheduler.max_num_running_reqs, "max_num_scheduled_tokens": rollout.scheduler.max_num_scheduled_tokens,
            "max_model_len": config.model_config.max_model_len, "enforce_eager": config.model_config.enforce_eager,
            "logprobs_mode": str(rollout.runner.sampler.logprobs_mode)}
    for name in ("scheduler_config", "cache_config"):
        live[name] = {key: value for key, value in sorted(vars(getattr(config, name)).items())
                      if isinstance(value, bool | int | float | str | None) and not any(part in key for part in ("gpu_blocks", "memory", "bytes"))}
    return {**rollout.resolved(), "live": live}


def _schedule(step: dict):
    from consistency.engines.rollout import Schedule

    return Schedule(**{k: step[k] for k in ("groups", "chunk", "preempt_every", "prefix_cache", "stagger") if step.get(k) is not None})


def _generate(rollout, step):
    lengths = step["max_tokens"]
    lengths = lengths if isinstance(lengths, list) else [lengths] * len(step["requests"])
    temperature = step.get("temperature")
    return rollout.generate([r["prompt"] for r in step["requests"]], lengths, step["seed"], 1.0 if temperature is None else temperature,
                            bool(step.get("processed")))


def _replay(rollout, step):
    return rollout.replay(step["requests"], _schedule(step), step.get("temperature"))


def _score(rollout, step):
    return rollout.score(step["requests"], _schedule(step))


def _bind(rollout, step):
    from consistency.contract import Contract

    rollout.bindings.bind(Contract.from_dict(step["contract"]))
    rollout.llm.reset_prefix_cache()
    return {}, {"bound": rollout.bindings.names}


def _perturb(rollout, step):
    from consistency.engines.weights import perturb

    moved = perturb(rollout.parameters(), step.get("parameter"), step.get("ulps", 1))
    rollout.llm.reset_prefix_cache()
    return {}, moved


def _reload(rollout, step):
    rollout.reload(Path(step["checkpoint"]) if step.get("checkpoint") else None)
    return {}, {}


def _weights(rollout, step):
    from consistency.engines.weights import rollout_fingerprints

    return {}, {"weights": rollout_fingerprints(rollout.model)}


def _trace(rollout, step):
    from consistency.trace import Recorder

    recorder = Recorder([len(r["prompt"]) + len(r["tokens"]) for r in step["requests"]], step.get("dump"))
    with rollout.traced(recorder):
        run = rollout.replay if step.get("mode", "decode") == "decode" else rollout.score
        arrays, counters = run(step["requests"], _schedule(step))
    return {**arrays, **recorder.arrays()}, {"sites": recorder.site_list(), **counters}


def _step_config(rollout, step):
    return {}, {"engine": configuration(rollout)}


def _operator(rollout, step):
    from consistency.jobs.operator import handle

    return handle(rollout, step)


def _measure(rollout, step):
    """For benchmarks: `what` is measure, profile or memory; the other fields are the function's arguments."""
    from consistency.engines import measuring

    function = {"measure": measuring.measure, "profile": measuring.profile, "memory": measuring.memory}[step["what"]]
    return {}, {step["what"]: function(rollout, **{name: value for name, value in step.items() if name not in ("kind", "what")})}


_HANDLERS = {"generate": _generate, "replay": _replay, "score": _score, "bind": _bind, "perturb": _perturb,
             "reload": _reload, "weights": _weights, "trace": _trace, "operator": _operator, "step_config": _step_config, "measure": _measure}


def main() -> int:
    directory = Path(sys.argv[1])
    engine = json.loads((directory / "job.json").read_text()).get("engine") or {}
    from consistency.engines.environment import prepare

    prepare(engine.get("threads", 1), engine.get("device", "cpu"), engine.get("runner"))
    from consistency.jobs.protocol import serve

    return serve(directory, start)


if __name__ == "__main__":
    sys.exit(main())
