"""One rollout and one training process, and every kind of comparison between them, within a time limit.

`python -m bench.gpu.exact --model qwen3 --out FILE` says in a minute what a verify takes longer for, and never loses what it found: each
stage's failure is kept with its traceback, and the file is written after every stage. `--bisect` then sets one operator at a time back to
stock; `--localize` looks for causes.
"""

import argparse
import dataclasses
import json
import os
import random
import shlex
import signal
import sys
import tempfile
import time
import traceback
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from agent import checkpoint as checkpoints
from agent import models, oracle
from agent.arrays import LogProbs
from agent.device import Setup, gpus
from agent.errors import JobFailed
from agent.files import write_atomic
from agent.model_facts import read_facts
from agent.session import Session
from agent.tools.engines import EnginePair
from agent.tools.localize import locate
from agent.tools.traces import Trace
from bench.gpu import first_site
from consistency.contract import Contract
from consistency.models.catalog import FAMILIES
from consistency.operators import catalog
from consistency.sizes import SIZES

TRACED_ROWS = 900
"""tokens that the traced requests have together, at most"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=tuple(FAMILIES), required=True)
    parser.add_argument("--scale", default="slice")
    parser.add_argument("--checkpoint", type=Path, help="folder; default: the seeded one, made on first use")
    parser.add_argument("--contract", default="exact", help="exact, stock, a contract.toml, operators (a,b), or all but those (without:a,b)")
    parser.add_argument("--also", action="append", default=[], help="further contracts, bound in the running engines (eager only); may be repeated")
    parser.add_argument("--graphs", action="store_true", help="CUDA graphs and compile, as stock; default: eager")
    parser.add_argument("--no-compile", action="store_true", help="with --graphs: graphs without compile")
    parser.add_argument("--trace-graphs", action="store_true", help="graphs without compile that also write fingerprints, so that they can be traced")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=JSON", help="further rollout engine setting; may be repeated")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--prompts", type=int, nargs=2, default=(1, 300), metavar=("SHORTEST", "LONGEST"))
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--only", choices=("rollout", "training"), help="start one engine; training alone scores random tokens")
    parser.add_argument("--no-grad", action="store_true", help="training forward without gradients")
    parser.add_argument("--bisect", action="store_true", help="all operators exact but one, in turn (eager only)")
    parser.add_argument("--localize", action="store_true", help="the whole localize tool at the end (eager only)")
    parser.add_argument("--no-trace", action="store_true")
    parser.add_argument("--seed", default="exact")
    parser.add_argument("--time-limit", type=float, default=540.0, help="seconds")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    return Experiment(options).run()


class Experiment:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.begun = options, time.monotonic()
        self.family = FAMILIES[options.model]
        self.result: dict[str, Any] = {
            "command": shlex.join(["python", *sys.orig_argv[1:]]), "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC", "model": options.model,
            "scale": options.scale, "stages": [], "contracts": {}, "failures": []}
        self.pairs: list[EnginePair] = []
        self.sessions: dict[str, Session] = {}
        """the engines that are up"""
        self.requests: list[dict[str, Any]] = []
        self.bases: dict[str, oracle.Table] = {}
        """contract -> what every condition is compared with: the log-probabilities as decoded (or, without a rollout, as trained)"""
        self.traces: dict[str, dict[str, Trace]] = {}

    def run(self) -> int:
        signal.signal(signal.SIGALRM, _time_is_up)
        signal.alarm(int(self.options.time_limit) + 5)
        try:
            self._all(Path(tempfile.mkdtemp(prefix="exact-")))
        except _TimeIsUp:
            self._fail("time limit", f"stopped after {self.options.time_limit:.0f} s")
        except KeyboardInterrupt:
            self._fail("interrupt", "stopped by hand")
        finally:
            signal.alarm(0)
            for pair in self.pairs:
                try:
                    self.result.setdefault("logs", {}).update({e: s.log_tail()[-6000:] for e, s in pair.sessions.items()})
                    pair.__exit__(KeyboardInterrupt if self.result["failures"] else None, None, None)
                finally:
                    self._write()
        first = next(iter(self.result["contracts"].values()), {})
        good = [c for c in first.values() if "mismatches" in c]
        say(f"{sum(c['mismatches'] for c in good)} mismatches in {sum(c['tokens'] for c in good)} comparisons of {len(good)} conditions, "
            f"{len(self.result['failures'])} failures, {time.monotonic() - self.begun:.0f} s; {self.options.out}")
        return 0 if good and not self.result["failures"] and not any(c["mismatches"] for c in good) else 1

    def _all(self, folder: Path) -> None:
        if self.stage("plan", self._plan) is None:
            return
        for turn, engines in enumerate(self.turns):
            up = self.stage(f"start {' and '.join(engines)}", lambda turn=turn, engines=engines: self._start(folder / str(turn), engines))
            if up and not self.requests and self.stage("sample", self._sample) is None:
                return
            if up:
                self._measure()
            if len(self.turns) > 1 and self.pairs:  # the next ones need the memory
                self.sessions.clear()
                self.pairs[-1].__exit__(None, None, None)

    def _measure(self) -> None:
        """Everything that the engines of this turn can say."""
        options, name = self.options, self.options.contract
        found = self.stage("conditions", lambda: self._conditions(name, full=True)) or {}
        self.stage("controls", self._controls)
        if not options.no_trace and (len(self.turns) > 1 or not found or any(c.get("mismatches") for c in found.values())):
            self.stage("trace", lambda: self._trace(name))
        for also in options.also:
            self.stage(f"contract {also}", lambda also=also: self._other(also))
        if options.bisect:
            for operator in self.operators:
                self.stage(f"without {operator}", lambda operator=operator: self._other(f"without:{operator}", trace=False))
        if options.localize:
            self.stage("localize", self._localize)

    # ---- stages -----------------------------------------------------------------------------------------------------

    def _plan(self) -> dict[str, Any]:
        options = self.options
        models.require_engines(models.resolve(options.model, options.scale, bool(gpus()))[1].device)
        self.checkpoint = options.checkpoint or checkpoints.seeded(options.model, options.scale)
        self.facts = read_facts(self.checkpoint)
        sizes = SIZES[options.scale]
        seqs = options.max_num_seqs or min(sizes.max_num_seqs, 64)
        length = options.max_model_len or min(sizes.max_model_len, 2048)
        sizes = dataclasses.replace(sizes, max_num_seqs=seqs, max_model_len=length, cached_tokens=seqs * 640)
        self.setup = Setup(options.model, options.scale, self.checkpoint, sizes=sizes)
        self.device = self.setup.device
        self.operators = [o for o in self.family.operators_at(options.scale)
                          if any(i.name == "exact" for i in catalog.implementations(o, side="rollout", device=self.device))]
        self.contract = self._contract(options.contract)
        self.turns = [[options.only]] if options.only else [["rollout", "training"]] if self.setup.fit(1, 1, gradients=False) else [
            ["rollout"], ["training"]]
        said = {"device": dataclasses.asdict(self.setup.gpu) if self.setup.gpu else "cpu", "checkpoint": self.checkpoint.name,
                "need_gib": dataclasses.asdict(self.setup.need) if self.setup.need else None, "operators": self.operators,
                "contract": self.contract.as_dict(), "turns": self.turns}
        self.result |= said
        say(f"  {said['device']}, needs {said['need_gib']}, operators {', '.join(self.operators)}")
        return said

    def _start(self, folder: Path, engines: list[str]) -> bool | None:
        """Both at once if they fit together; one that does not come up does not keep the other from being measured."""
        options = self.options
        rollout: dict[str, Any] = {}
        if self.device == "cuda" and not options.trace_graphs:
            rollout = {"eager": not options.graphs} | ({"compile": not options.no_compile} if options.graphs else {})
        for text in options.set:
            key, _, value = text.partition("=")
            rollout[key] = json.loads(value)
        pair = EnginePair(options.model, self.checkpoint, None, self.contract, folder, setup=self.setup, settings={"rollout": rollout}, only=engines,
                          graphs=options.trace_graphs)
        self.pairs.append(pair)
        began = time.monotonic()
        for engine, session in pair.sessions.items():
            entry = self.result.setdefault("engines", {})[engine] = {"settings": dict(session.job.settings)}
            try:
                hurried = dataclasses.replace(session.start, timeout=max(5.0, self.left() + began - session.start.submitted))
                while not session.ready(hurried):
                    time.sleep(0.05)
                session.collect(session.start)
                self.sessions[engine] = session
                say(f"  {engine} is up after {time.monotonic() - began:.0f} s")
            except JobFailed as error:
                self._fail(f"start {engine}", error.reason, session.log_tail() + "\n" + error.log_tail)
            entry |= {"seconds": round(time.monotonic() - began, 1), "environment": session.started.get("environment"),
                      "engine": session.started.get("engine")}
            self._write()
        return True if self.sessions else None

    def _contract(self, text: str) -> Contract:
        if text == "stock":
            return Contract()
        if text.endswith(".toml"):
            return Contract.load(Path(text))
        chosen = self.operators
        if text != "exact":
            named = text.removeprefix("without:").split(",")
            if unknown := [n for n in named if n not in self.operators]:
                raise ValueError(f"no exact implementation of '{unknown[0]}' on {self.device}; there is one of {', '.join(self.operators)}")
            chosen = [o for o in self.operators if (o in named) != text.startswith("without:")]
        return Contract(dict.fromkeys(chosen, "exact"), dict.fromkeys(chosen, "exact"))

    def _sample(self) -> dict[str, Any]:
        options, source = self.options, random.Random(f"{self.options.seed} prompts")
        ordinary = [t for t in range(self.facts.vocabulary) if t not in self.facts.special]
        low, high = options.prompts
        lengths = [n for n in (1, 2, 9, 10, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257) if low <= n <= high][: options.requests // 2]
        lengths += [source.randint(low, high) for _ in range(options.requests - len(lengths))]
        source.shuffle(lengths)
        prompts = [source.choices(ordinary, k=n) for n in lengths]
        if "rollout" not in self.sessions:
            self.requests = [{"prompt": p, "tokens": source.choices(ordinary, k=options.new_tokens)} for p in prompts]
            say("  no rollout: random tokens")
            return {"tokens": "random"}
        step = {"kind": "generate", "requests": [{"prompt": p} for p in prompts], "max_tokens": options.new_tokens, "seed": 1234, "temperature": 1.0}
        answer = self.ask("rollout", step)
        found = LogProbs.from_arrays(answer.arrays)
        for i, prompt in enumerate(prompts):
            mine = found.request == i
            self.requests.append({"prompt": prompt, "tokens": found.token[mine][np.argsort(found.position[mine])].tolist()})
        base = self.bases[options.contract] = self._table(answer.arrays, range(len(prompts)))
        values = base.logprob[np.isfinite(base.logprob)]
        said = {"requests": len(prompts), "tokens": len(base.key), "mean_logprob": float(values.mean()), "smallest": float(values.min()),
                "not_finite": int(len(base.logprob) - len(values)), "distinct_tokens": len(set(found.token.tolist())),
                "flat": oracle.flat(base, self.facts.vocabulary)}
        say(f"  {said}")
        return said

    def _conditions(self, name: str, full: bool) -> dict[str, Any]:
        """Every comparison under the contract that is bound, against the same tokens decoded under it."""
        results: dict[str, Any] = self.result["contracts"].setdefault(name, {})
        everyone = list(range(len(self.requests)))
        few, longest = everyone[:8], sorted(everyone, key=lambda i: -len(self.requests[i]["prompt"]))[:6]
        grad = {"grad": not self.options.no_grad and self.setup.gradients, "mode": "train"}
        packed = {"kind": "forward", "layout": "packed", "micro_batch": 8}
        if name not in self.bases:
            engine, step = ("rollout", {"kind": "replay"}) if "rollout" in self.sessions else ("training", {**packed, "grad": False, "mode": "eval"})
            self.bases[name] = self._table(self.ask(engine, {**step, "requests": self.requests}).arrays, everyone)
        base = self.bases[name]
        rollout: list[tuple[str, list[int], dict[str, Any]]] = [
            ("batch: alone", few, {"kind": "replay", "groups": [[i] for i in range(len(few))]}),
            ("phase: prefill", everyone, {"kind": "score"})]
        training: list[tuple[str, list[int], dict[str, Any]]] = [("engine: packed", everyone, {**packed, **grad})]
        if full:
            rollout = [
                ("determinism: twice", everyone, {"kind": "replay"}), *rollout,
                ("batch: 7 together", everyone, {"kind": "replay", "groups": [everyone[i:i + 7] for i in range(0, len(everyone), 7)]}),
                ("batch: joining one by one", everyone, {"kind": "replay", "stagger": 1}),
                ("phase: chunked prefill", longest, {"kind": "replay", "chunk": 57, "stagger": 1}),
                ("phase: preempted", few, {"kind": "replay", "preempt_every": 5})]
            training += [
                ("engine: packed, eval", everyone, {**packed, "grad": False, "mode": "eval"}),
                ("engine: packed by 3", everyone, {**packed, "micro_batch": 3, "grad": False, "mode": "train"}),
                ("engine: alone", few, {"kind": "forward", "layout": "alone", "micro_batch": 1, "grad": False, "mode": "train"})]
        queued = []
        for engine, wanted in (("rollout", rollout), ("training", training)):
            for label, chosen, fields in wanted if engine in self.sessions else ():
                try:
                    queued.append((engine, label, chosen, self.sessions[engine].submit(
                        {"requests": [self.requests[i] for i in chosen], **fields}, timeout=max(5.0, self.left()))))
                except (OSError, JobFailed) as error:
                    results[label] = {"failed": str(error)[:500]}
        for engine, label, chosen, ticket in queued:
            try:
                answer = self.sessions[engine].wait(ticket)
                table = self._table(answer.arrays, chosen)
                tokens, mismatches = oracle.compare(base, table)
                found = oracle.difference(base, table)
                results[label] = {"tokens": tokens, "mismatches": mismatches, "max_abs": found.max_abs, "k3": found.k3,
                                  "seconds": round(answer.seconds, 2), **first_site.tokens(base, table, self.requests),
                                  **{k: v for k, v in answer.data.items() if k in ("preemptions", "prefill_chunks", "steps", "grad_norm")}}
                say(f"  {name:24} {label:28} {mismatches:6} of {tokens:6} differ, max {found.max_abs:.3g} {results[label].get('first', '')}")
            except Exception as error:
                results[label] = {"failed": str(error)[:2000], "traceback": getattr(error, "log_tail", "")[-4000:] or traceback.format_exc()[-2000:]}
                self.result["failures"].append({"stage": f"{name}, {label}", "error": str(error).splitlines()[0][:500]})
                say(f"  {name:24} {label:28} FAILED {str(error)[:1500]}")
            self._write()
        return results

    def _controls(self) -> dict[str, Any]:
        """One weight moved by one ulp, and back, in each engine: must differ, then must not."""
        said = {}
        few = list(range(min(6, len(self.requests))))
        for engine, step in (("rollout", {"kind": "replay"}), ("training", {"kind": "forward", "layout": "packed", "micro_batch": 8, "grad": False,
                                                                            "mode": "train"})):
            if engine not in self.sessions:
                continue
            tables = []
            for ulps in (1, -1):
                moved = self.ask(engine, {"kind": "perturb", "parameter": None, "ulps": ulps}).data
                tables.append(self._table(self.ask(engine, {**step, "requests": [self.requests[i] for i in few]}).arrays, few))
            said[engine] = {"moved": oracle.compare(*tables)[1], "of": oracle.compare(*tables)[0], "parameter": moved.get("parameter")}
        say(f"  one ulp: {said}")
        return said

    def _trace(self, name: str) -> dict[str, Any]:
        """First site at which decode differs from itself alone, from prefill and from training; needs an engine that can trace.

        Traces are kept, so that engines which run one after the other are compared all the same.
        """
        requests = first_site.choose(self.requests, TRACED_ROWS)
        lengths = [len(r["prompt"]) + len(r["tokens"]) for r in requests]
        traces = self.traces.setdefault(name, {})
        said: dict[str, Any] = self.result.setdefault("traces", {}).setdefault(name, {})
        for label, run in first_site.runs(len(requests)).items():
            if run.engine not in self.sessions:
                continue
            try:
                traces[label] = Trace(run, self.ask(run.engine, run.step(requests, [])), lengths)
            except Exception as error:
                said[label] = {"failed": str(error)[:2500], "traceback": getattr(error, "log_tail", "")[-4000:]}
                say(f"  trace {label} FAILED: {str(error)[:1500]}")
        for dimension, left, right in first_site.PAIRS:
            if left in traces and right in traces:
                found = said[dimension] = first_site.part(traces[left], traces[right], requests)
                say(f"  {name} {dimension}: first {found['first']} ({found['operator']}) at {found['first_row']}; "
                    f"{len(found['unequal_sites'])} of {found['sites']} sites; {', '.join(found['unequal_sites'][:6])}")
                if found["only_one_side"]:
                    say(f"    only one side has {', '.join(found['only_one_side'][:8])}")
        return said

    def _other(self, name: str, trace: bool = True) -> dict[str, Any]:
        contract = self._contract(name)
        if (self.options.graphs or self.options.trace_graphs) and self.device == "cuda":
            raise ValueError("a captured graph keeps the implementations it was captured with; leave out --graphs")
        try:
            for engine in self.sessions:
                self.ask(engine, {"kind": "bind", "contract": contract.as_dict()})
            found = self._conditions(name, full=False)
            if trace and not self.options.no_trace and any(c.get("mismatches") for c in found.values()):
                self._trace(name)
            return found
        finally:
            for engine in self.sessions:
                self.ask(engine, {"kind": "bind", "contract": self.contract.as_dict()})

    def _localize(self) -> dict[str, Any]:
        report = locate(self.pairs[-1], self.contract, self.facts, progress=lambda text: say(f"  {text}"))
        for d in report.divergences:
            say(f"  {d.dimension}: {d.operator} at {d.site}: {d.cause} ({d.cause_detail}); confirmed {d.confirmed}, next {d.next_site}")
        say(f"  equal: {report.exact_dimensions}; notes: {report.notes}")
        self.result["localize"] = json.loads(report.model_dump_json())
        return {"divergences": len(report.divergences), "exact_dimensions": report.exact_dimensions}

    # ---- helpers ----------------------------------------------------------------------------------------------------

    def stage(self, name: str, work) -> Any:
        """Runs one stage; None, with its traceback kept, if it failed or there is no time for it."""
        if self.left() < 5:
            self._fail(name, "no time left")
            return None
        say(f"{name} ({time.monotonic() - self.begun:.0f} s)")
        began = time.monotonic()
        try:
            said = work()
        except (_TimeIsUp, KeyboardInterrupt):
            raise
        except Exception as error:
            self._fail(name, f"{type(error).__name__}: {error}", getattr(error, "log_tail", "") + "\n" + traceback.format_exc())
            return None
        entry = {"stage": name, "seconds": round(time.monotonic() - began, 1)}
        if name in ("sample", "controls"):
            entry["said"] = said
        self.result["stages"].append(entry)
        self._write()
        return said

    def ask(self, engine: str, step: dict[str, Any]):
        return self.sessions[engine].run(step, timeout=max(5.0, self.left()))

    def _table(self, arrays: dict[str, np.ndarray], chosen) -> oracle.Table:
        table, objections = oracle.arrange(LogProbs.from_arrays(arrays), {n: self.requests[i]["tokens"] for n, i in enumerate(chosen)})
        if table is None:
            raise ValueError("; ".join(objections))
        return table.renumber(list(chosen))

    def left(self) -> float:
        return self.options.time_limit - (time.monotonic() - self.begun)

    def _fail(self, stage: str, error: str, trace: str = "") -> None:
        say(f"FAILED {stage}: {error}")
        if trace:
            say("\n".join("    " + line for line in trace.splitlines()[-25:]))
        self.result["failures"].append({"stage": stage, "error": error[:3000], "traceback": trace[-6000:]})
        self._write()

    def _write(self) -> None:
        self.result["seconds"] = round(time.monotonic() - self.begun, 1)
        write_atomic(self.options.out.resolve(), json.dumps(self.result, indent=1, default=str).encode())


class _TimeIsUp(BaseException):
    """Not an Exception, so that no stage takes it for its own failure."""


def _time_is_up(*_: object) -> None:
    raise _TimeIsUp


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
