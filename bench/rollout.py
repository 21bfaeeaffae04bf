"""Rollout throughput of a contract against stock: `python -m bench.rollout --model nemotron-3.5 --scale full`.

CUDA graphs and compile are on in both arms. Where two engines fit the device they take turns run by run, else process by process. The result is
written after every run; the same command goes on where an earlier call stopped. `--profile` adds kernel times of a decode step.
"""

import argparse
import dataclasses
import json
import shlex
import sys
import tempfile
import time
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from agent import checkpoint as checkpoints
from agent import models, recipes
from agent.device import Setup, gpus, held
from agent.draw import Draw
from agent.errors import AgentError, JobFailed
from agent.files import write_atomic
from agent.model_facts import read_facts
from agent.oracle import Timed, configuration_objections, throughput
from agent.session import Job, Session
from consistency.contract import Contract
from consistency.models.catalog import FAMILIES
from consistency.operators import catalog
from consistency.sizes import SIZES

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
NEW_TOKENS = {"tiny": 16, "slice": 256, "full": 512}
REQUESTS = {"tiny": [16, 4], "slice": [256, 32, 8], "full": [256, 32, 8]}
PROMPT_TOKENS = 64
WARM_TOKENS = 12
"""of the run that comes before the timed ones"""
PROFILED_STEPS = 16
MEANT_TO_DIFFER = ("plugin", "contract", "kernels")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=tuple(FAMILIES), required=True)
    parser.add_argument("--scale", default="full")
    parser.add_argument("--checkpoint", type=Path, help="folder; default: the seeded one")
    parser.add_argument("--contract", type=Path, help="of the arm `exact`; default: the recipe, else every operator exact")
    parser.add_argument("--arms", nargs="+", default=["stock", "exact"], help="stock, exact, or contract files")
    parser.add_argument("--requests", type=int, nargs="+", help="how many at the same time; several give several points")
    parser.add_argument("--context", type=int, default=PROMPT_TOKENS, help="prompt tokens")
    parser.add_argument("--new-tokens", type=int)
    parser.add_argument("--pairs", type=int, default=4, help="timed runs of each arm at each point")
    parser.add_argument("--rounds", type=int, default=1, help="process by process: how often the arms take turns")
    parser.add_argument("--by-process", action="store_true", help="one engine at a time, also where two fit")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=JSON", help="rollout engine setting of both arms; may be repeated")
    parser.add_argument("--profile", action="store_true", help="kernel times of a decode step, per arm and point")
    parser.add_argument("--time-limit", type=float, default=3600.0, help="seconds")
    parser.add_argument("--out", type=Path, help="default: docs/results/rollout-MODEL-SCALE.json")
    options = parser.parse_args()
    try:
        return Bench(options).run()
    except AgentError as error:
        print(f"bench.rollout: {error}", file=sys.stderr)
        return error.exit_code


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.begun = options, time.monotonic()
        family, scale = options.model, options.scale
        models.require_engines(models.resolve(family, scale, bool(gpus()))[1].device)
        self.checkpoint = options.checkpoint or checkpoints.seeded(family, scale)
        new_tokens = options.new_tokens or NEW_TOKENS[scale]
        counts = options.requests or REQUESTS[scale]
        self.points = [{"requests": n, "prompt_tokens": options.context, "new_tokens": new_tokens} for n in counts]
        length = options.context + new_tokens
        sizes = dataclasses.replace(SIZES[scale], max_num_seqs=max(counts), max_model_len=-(-(length + 8) // 64) * 64,
                                    cached_tokens=max(counts) * (length + 64))
        self.setup = Setup(family, scale, self.checkpoint, sizes=sizes)
        self.draw = Draw(read_facts(self.checkpoint), "throughput")
        self.contracts = {arm: self._contract(arm) for arm in options.arms}
        self.together = self.setup.fit(len(options.arms)) and not options.by_process
        self.rounds = 1 if self.together else options.rounds
        self.settings = dict(text.partition("=")[::2] for text in options.set)
        self.out = options.out or RESULTS / f"rollout-{family}-{scale}.json"
        self.result = self._resume()
        self.prefix = tempfile.mkdtemp(prefix="rollout-")

    def _contract(self, arm: str) -> Contract:
        if arm == "stock":
            return Contract()
        if arm != "exact":
            return Contract.load(Path(arm))
        if self.options.contract:
            return Contract.load(self.options.contract)
        family = FAMILIES[self.options.model]
        recipe, _ = recipes.matching(family.name, family.scales[self.options.scale])
        if recipe:
            return Contract.from_dict(recipe.contract)
        known = {row.operator for row in catalog.implementations(side="rollout", device=self.setup.device) if row.name == "exact"}
        every = {operator: "exact" for operator in family.operators_at(self.options.scale) if operator in known}
        return Contract(every, every)

    def _resume(self) -> dict[str, Any]:
        """What an earlier call with the same question found, or an empty result."""
        key = {"model": self.options.model, "scale": self.options.scale, "points": self.points, "sizes": dataclasses.asdict(self.setup.sizes),
               "contracts": {arm: contract.as_dict() for arm, contract in self.contracts.items()}, "settings": self.settings,
               "device": [gpu.name for gpu in gpus()][:1] or ["cpu"]}
        if self.out.is_file():
            old = json.loads(self.out.read_text(encoding="utf-8"))
            if old.get("question") == key:
                print(f"goes on with {len(old['runs'])} runs of {self.out}", flush=True)
                return {**old, "stopped": None}
        command = [part for n, part in enumerate(sys.argv[1:]) if part != "--out" and sys.argv[n] != "--out"]
        return {"command": shlex.join(["python", "-m", "bench.rollout", *command]), "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
                "question": key, "arms": {}, "runs": [], "summary": [], "profiles": [], "stopped": None}

    def run(self) -> int:
        arms = list(self.contracts)
        turns = [arms] if self.together else [[arm] for n in range(self.rounds) for arm in (reversed(arms) if n % 2 else arms)]
        self.result["order"] = "run by run" if self.together else "process by process"
        seen: dict[str, int] = {}
        try:
            for number, arms in enumerate(turns):
                for arm in arms:
                    seen[arm] = seen.get(arm, 0) + 1
                if any(self._missing(arm, point, seen[arm]) for arm in arms for point in self.points):
                    self._turn(number, arms, seen)
        except _OutOfTime as error:
            self.result["stopped"] = str(error)
        except JobFailed as error:
            self.result["stopped"] = f"{error.reason}\n{error.log_tail}"
        self._write()
        print(self.table(), flush=True)
        if self.result["stopped"]:
            print(f"stopped: {self.result['stopped']}", file=sys.stderr)
        return 1 if self.result["stopped"] else 0

    def _missing(self, arm: str, point: dict, turn: int) -> int:
        """Timed runs that an arm's process of this turn still owes."""
        done = sum(run["arm"] == arm and run["turn"] == turn and run["point"] == point for run in self.result["runs"])
        return max(0, self.options.pairs - done)

    def _turn(self, number: int, arms: list[str], seen: dict[str, int]) -> None:
        """Engines that live at the same time: starts them one after the other, since each looks at how much memory is free."""
        with held(self.setup.gpu), ExitStack() as stack:
            sessions: dict[str, Session] = {}
            for arm in arms:
                starts = self.result["arms"].setdefault(arm, {"contract": self.contracts[arm].as_dict(), "starts": []})["starts"]
                self._allow(max(starts, default=20.0), f"the start of {arm}")
                settings = self.setup.rollout(plugin=arm != "stock", **{name: json.loads(value) for name, value in self.settings.items()})
                job = Job("rollout", self.options.model, self.checkpoint, self.contracts[arm], None, settings)
                sessions[arm] = stack.enter_context(Session(job, Path(self.prefix) / f"{number}-{Path(arm).stem}", **self.setup.session()))
                if self.setup.device == "cuda":
                    self._up(arm, sessions[arm])
            for arm, session in sessions.items():
                if not session.started:
                    self._up(arm, session)
            for point in self.points:
                for arm in arms:
                    warm = self._ask(sessions[arm], "measure", point | {"new_tokens": min(WARM_TOKENS, point["new_tokens"])}, "warm-up")
                    print(f"{arm} {point}: warm-up {warm['seconds']:.1f} s", flush=True)
                for repeat in range(self.options.pairs):
                    for arm in arms:
                        if self._missing(arm, point, seen[arm]):
                            self._allow(self._last(arm, point), f"a run of {arm}")
                            said = self._ask(sessions[arm], "measure", point, f"run {number} {repeat}")
                            self.result["runs"].append({"arm": arm, "turn": seen[arm], "point": point, **said})
                            self._write()
                for arm in arms if self.options.profile else ():
                    self._profile(sessions[arm], arm, point)
            for arm, session in sessions.items():
                self.result["arms"][arm]["memory"] = session.run({"kind": "measure", "what": "memory"}).data["memory"]
                self._write()

    def _up(self, arm: str, session: Session) -> None:
        began = session.start.submitted
        session.wait(session.start)
        entry = self.result["arms"][arm]
        entry["starts"].append(round(time.monotonic() - began, 1))
        entry |= {"settings": dict(session.job.settings), **{name: session.started.get(name) for name in ("engine", "environment")}}
        print(f"{arm}: engine up in {entry['starts'][-1]} s", flush=True)
        self._write()

    def _profile(self, session: Session, arm: str, point: dict) -> None:
        short = point | {"new_tokens": min(point["new_tokens"], PROFILED_STEPS + 24)}
        steps = min(PROFILED_STEPS, max(1, short["new_tokens"] - 8))
        said = self._ask(session, "profile", short, "profile", steps=steps)
        others = [p for p in self.result["profiles"] if (p["arm"], p["point"]) != (arm, point)]
        self.result["profiles"] = [*others, {"arm": arm, "point": point, **said}]
        self._write()

    def _ask(self, session: Session, what: str, point: dict, name: str, **fields: Any) -> dict[str, Any]:
        prompts = self.draw.equal_length(name, point["requests"], point["prompt_tokens"])
        return session.run({"kind": "measure", "what": what, "prompts": prompts, "max_tokens": point["new_tokens"], **fields}).data[what]

    def _last(self, arm: str, point: dict) -> float:
        return max((run["seconds"] for run in self.result["runs"] if run["point"] == point and run["arm"] == arm), default=1.0)

    def _allow(self, seconds: float, what: str) -> None:
        left = self.options.time_limit - (time.monotonic() - self.begun)
        if seconds > left:
            raise _OutOfTime(f"the time limit leaves {left:.0f} s, {what} takes about {seconds:.0f} s; the same command goes on")

    # ---- what it comes to -------------------------------------------------------------------------------------------

    def _write(self) -> None:
        self.result["summary"] = [self._summary(point) for point in self.points]
        if "stock" in self.contracts:
            stock = self.result["arms"].get("stock", {}).get("engine")
            self.result["configurations_differ"] = {
                arm: [str(o) for o in configuration_objections(stock, self.result["arms"].get(arm, {}).get("engine"), MEANT_TO_DIFFER)]
                for arm in self.contracts if arm != "stock"}
        write_atomic(self.out.resolve(), json.dumps(self.result, indent=1).encode() + b"\n")

    def _summary(self, point: dict) -> dict[str, Any]:
        runs = {arm: [r for r in self.result["runs"] if r["arm"] == arm and r["point"] == point] for arm in self.contracts}
        said: dict[str, Any] = {**point, "arms": {arm: self._arm(arm, mine) for arm, mine in runs.items() if mine}}
        for arm in self.contracts:
            pairs = list(zip(runs.get("stock", []), runs[arm], strict=False))
            if arm == "stock" or not pairs:
                continue
            timed = [(Timed(a["tokens"], a["seconds"]), Timed(b["tokens"], b["seconds"])) for a, b in pairs]
            found, objections = throughput(timed, point["requests"] * point["new_tokens"])
            against: dict[str, Any] = {"pairs": len(pairs), "objections": [str(objection) for objection in objections]}
            if found:
                against |= {"ratio": found.ratio, "spread": found.spread}
            against["decode_ratio"] = _middle([a["decode_ms"] / b["decode_ms"] for a, b in pairs if a["decode_ms"] and b["decode_ms"]])
            memories = [said["arms"][name].get("needed_gib") for name in (arm, "stock")]
            if all(memories):
                against["memory_ratio"] = memories[0] / memories[1]
            said.setdefault("against_stock", {})[arm] = against
        return said

    def _arm(self, arm: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
        """Medians; `needed_gib`: most that torch had allocated, with only those cache blocks counted that were in use at this point."""
        said = {"runs": len(runs), "tokens_per_second": _middle([r["tokens"] / r["seconds"] for r in runs]),
                "decode_ms": _middle([r["decode_ms"] for r in runs if r["decode_ms"]]),
                "prefill_seconds": _middle([r["prefill_seconds"] for r in runs]),
                "preemptions": sum(r["preemptions"] for r in runs), "blocks": max(r["blocks"] for r in runs)}
        found = self.result["arms"].get(arm, {}).get("memory") or {}
        if "peak_allocated_gib" in found:
            said["needed_gib"] = found["peak_allocated_gib"] - found["pool_gib"] + said["blocks"] * found["block_mib"] / 1024
        return said

    def table(self) -> str:
        """Markdown."""
        lines = ["| requests x new tokens, prompt | arm | tokens/s | decode step | prefill | of stock (pairs) | memory of stock |",
                 "|---|---|---|---|---|---|---|"]
        for point in self.result["summary"]:
            for arm, mine in point["arms"].items():
                against = point.get("against_stock", {}).get(arm, {})
                ratio = f"{against['ratio']:.3f} ({against['spread'][0]:.3f} to {against['spread'][1]:.3f})" if "ratio" in against else "–"
                share = f"{against['memory_ratio']:.2f}" if "memory_ratio" in against else "–"
                step = f"{mine['decode_ms']:.2f} ms" if mine["decode_ms"] else "–"
                lines.append(f"| {point['requests']} x {point['new_tokens']}, {point['prompt_tokens']} | {arm} | {mine['tokens_per_second']:.0f} | "
                             f"{step} | {mine['prefill_seconds']:.2f} s | {ratio} | {share} |")
        for found in self.result["profiles"]:
            lines += ["", f"{found['arm']}, {found['point']['requests']} requests: step {found['wall_us']:.0f} us, "
                          f"kernels {found['device_us']:.0f} us"]
            lines += [f"  {us:9.1f} us  {group}" for group, us in found["groups"].items()]
            lines += [f"    {k['us']:9.1f} us  {k['calls']:5.1f} x  {k['group']:24} {k['name'][:90]}" for k in found["kernels"][:15]]
        return "\n".join(lines)


def _middle(values: list[float]) -> float | None:
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2 if ordered else None


class _OutOfTime(Exception):
    """The next part would not end within the time limit."""


if __name__ == "__main__":
    sys.exit(main())
