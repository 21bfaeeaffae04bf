"""`agent pr`: from a finished run to a branch, a text and patches, and if wanted to a draft on a forge."""

import contextlib
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from agent import __version__, config, overlay, pull_request
from agent.checkout import Checkout
from agent.errors import AgentError, UserError
from agent.files import write_atomic
from agent.pr import body, claims, forge, series, upstream
from agent.pr.claims import Change, Claims, Engine, Repro, Searched, verdict_id, word
from agent.pr.forge import Forge, ForgeError, Pull
from agent.pull_request import Evidence
from agent.state import RunState, jsonable
from agent.toolset import Progress, Tools, make_repros
from agent.verdict import VerifyReport
from agent.workspace import Workspace, branch, call_git, encode_evidence
from consistency.contract import Contract

TITLE = "TITLE"


@dataclass(frozen=True)
class Options:
    """What the command line says."""

    out: Path | None = None
    repo: str | None = None
    """OWNER/NAME; None: stop at files and branch"""
    base_url: str = forge.PUBLIC
    remote_url: str | None = None
    base: str | None = None
    """branch of the forge that the change is for; None: its default"""
    fork: str | None = None
    """owner of the repository that the branch is pushed to, if that is another one"""
    human: str = ""
    confirmed: bool = False
    profile: str | None = None
    coordination: str = ""
    not_duplicate: str = ""
    update: bool = False
    dry_run: bool = False
    prepared: bool = False
    """publish what the last call prepared, without measuring again"""
    target: float | None = None


class Published(BaseModel):
    """What came of it."""

    branch: str
    head: str
    verified: str
    """commit that was verified: `head`, or its parent where the last commit only adds evidence"""
    title: str
    out: str
    body: str
    patches: list[str]
    verdict: str
    pull_request: str | None = None
    """address of the draft"""
    updated: bool = False
    dry_run: bool = False


@dataclass
class PullRequest:
    """One call of `agent pr`. Raises UserError for what cannot be used, AgentError for what is not to be published, ForgeError for the way there."""

    workspace: Workspace
    state: RunState
    tools: Tools
    options: Options
    progress: Progress
    say: Callable[[str], None] = lambda text: None
    ask: Callable[[str], str] = input
    checkout: Checkout | None = None
    forge: Forge | None = field(default=None, repr=False)

    def publish(self) -> Published:
        options, state = self.options, self.state
        self._look_over()
        package = self.checkout.package()[0] if self.checkout else None
        self.profile = upstream.choose(options.profile, options.repo, package)
        self.human = upstream.person(options.human) if options.human else None
        if options.repo:
            self.forge = self._reach(options.repo)
            upstream.check_rules(self.profile, options.human, options.coordination, 0)
        if options.prepared:
            prepared, head = self._prepared()
        else:
            try:
                with tempfile.TemporaryDirectory(prefix="pr-", dir=self.workspace.private) as scratch:
                    prepared, head = self._prepare(Path(scratch))
            except BaseException:
                with contextlib.suppress(UserError):  # a branch that nothing vouches for does not stay
                    self.workspace.forget(state.run, series.NAME)
                raise
        out = self._out
        result = Published(
            branch=prepared.branch, head=head, verified=prepared.commit, title=prepared.title, out=str(out), body=str(out / pull_request.FILE),
            patches=sorted(str(p) for p in (out / "patches").glob("*.patch")), verdict=verdict_id(prepared.final), dry_run=options.dry_run)
        if self.forge is None:
            return result
        try:
            return self._open(prepared, head, result)
        except ForgeError as error:
            raise ForgeError(f"{error}. Branch {prepared.branch}, text and patches are ready in {out}; `agent pr {self.workspace.path} --prepared` "
                             "with the same options goes on from there") from None
        finally:
            state.save(self.workspace)

    # ---- before anything is made --------------------------------------------------------------------------------

    def _look_over(self) -> None:
        state = self.state
        if state.outcome is None:
            raise UserError(f"the run is not finished; `agent resume {self.workspace.path}` goes on with it")
        if not any(attempt.outcome == "kept" for attempt in state.attempts):
            raise UserError("the run kept no attempt, so there is nothing to open a pull request about")
        self.workspace.check_ready()
        self.evidence = Evidence.load(self.workspace, state)
        if any(attempt.outcome == "kept" and attempt.patch.engine for attempt in state.attempts):
            self.checkout = Checkout.of(self.workspace.path)

    def _reach(self, repository: str) -> Forge:
        """The forge, asked once for the repository: whatever is wrong with the way there is said before anything is measured."""
        options = self.options
        made = Forge(forge.check_repository(repository), forge.check_base_url(options.base_url), forge.token_from())
        owner = options.fork or repository.partition("/")[0]
        self.remote = forge.check_remote(options.remote_url or f"https://{forge.web_host(options.base_url)}/{owner}/{repository.partition('/')[2]}.git")
        found = made.describe()
        self.base = options.base or str(found.get("default_branch") or "main")
        if (found.get("permissions") or {}).get("push") is False and not options.fork:
            raise ForgeError(f"the token may read {repository} but not push to it; push to a fork of yours with --fork OWNER")
        return made

    # ---- branch, verdict, text ----------------------------------------------------------------------------------

    def _prepare(self, scratch: Path) -> tuple[Claims, str]:
        state, options, workspace = self.state, self.options, self.workspace
        base = self.checkout.base if self.checkout else workspace.fork_point(state.base, state.head)
        trailers = series.Trailers(state.run, self.profile.attribution, f"agent {__version__} ({state.policy})",
                                   options.human if self.human and (self.profile.sign_off or not self.profile.name) else "")
        story = self._story(scratch)
        commit, changes = self._series(base, story, trailers)
        repository = self.checkout.path if self.checkout else workspace.path
        lines = sum(c.added + c.removed for c in changes)
        if self.forge:
            upstream.check_rules(self.profile, options.human, options.coordination, lines)
        searched = self._search(state)
        summary = f"{lines} lines in {len(changes)} commits; `git -C {repository} log -p {base[:12]}..{commit[:12]}` shows them"
        reviewed = upstream.confirm(self.profile, options.human, options.confirmed, summary, self.ask) if self.forge else options.confirmed
        report = self._verify()
        made = self._claims(base, commit, changes, story, report, reviewed, searched, self._stock(scratch))
        text = body.render(made, self.profile.template)
        evidence = {**self.evidence.files, "final": self._final, claims.FILE: made.encode()}
        head = commit if self.checkout else series.seal(workspace, state, made, evidence, text, trailers, self.human)
        self._write_out(made, text, evidence, repository, base, head)
        workspace.drop_tree(state.run, series.NAME)
        return made, head

    def _story(self, scratch: Path) -> series.Story:
        """Causes and repros of the run; one that ended with a recipe has looked for none, so stock is looked at now."""
        causes, repros = pull_request.causes(self.evidence), pull_request.repros(self.state, self.evidence)
        if causes:
            return series.Story(causes, repros, {})
        self.say("localizing on stock: the run itself never had to")
        stock = self._stock(scratch) / "kernels"
        report = self.tools.localize(Contract(), stock, self.progress)
        name = "localize-stock"
        data = encode_evidence(self._portable(report))
        documents = {**self.evidence.documents, name: json.loads(data)}
        self.evidence = Evidence(documents, {**self.evidence.files, name: data}, {**self.evidence.hashes, name: pull_request.sha256(data)})
        kept = self.evidence.attempts("kept")
        wanted = [(d, scratch / f"{number:02d}-{d.dimension}-{d.operator}") for number, d in enumerate(report.divergences)]
        reports = make_repros(self.tools, wanted, stock, self.progress) if wanted else []
        made = {f"repros/{place.name}": place for (_, place), found in zip(wanted, reports, strict=True) if found.reproduced}
        repros = [Repro(folder=f"repros/{place.name}", operator=d.operator, line=found.expected_line, before=found.exit_code, after=None)
                  for (d, place), found in zip(wanted, reports, strict=True) if found.reproduced]
        causes = [pull_request.cause(d.model_dump(mode="json"), series.last_attempt(self.evidence, d.operator) or kept[-1])
                  for d in report.divergences]
        return series.Story(causes, repros, made)

    def _stock(self, scratch: Path) -> Path:
        """A worktree that asks for nothing: the empty contract and, of a checkout, the base commit."""
        stock = scratch / "stock"
        (stock / "kernels").mkdir(parents=True, exist_ok=True)
        if self.checkout:
            shutil.copyfile(self.workspace.path / config.FILE, stock / config.FILE)
        return stock

    def _series(self, base: str, story: series.Story, trailers: series.Trailers) -> tuple[str, list[Change]]:
        workspace, state = self.workspace, self.state
        if self.checkout is None:
            changes = series.of_workspace(workspace, state, self.evidence, story, base, trailers, self.human)
            tree = workspace.tree(state.run, series.NAME)
            if Contract.load(tree / "contract.toml") != Contract.from_dict(state.contract):
                raise AgentError("the series does not end with the run's contract; please report this")
            return workspace.head(tree), changes
        commit, changes = series.of_checkout(self.checkout, workspace, state, self.evidence, story, trailers, self.human)
        tree = workspace.add_tree(state.run, series.NAME, state.head)
        if call_git(("rev-parse", f"{commit}^{{tree}}"), self.checkout.path) != self.checkout.tree(Checkout.patch_of(tree)):
            raise AgentError("the series does not end with the run's change of the checkout; please report this")
        for folder, place in story.made.items():
            shutil.copytree(place, tree / folder, dirs_exist_ok=True)
        return commit, changes

    def _verify(self) -> VerifyReport:
        """The full matrix on what stands in the branch's worktree, which git has just written from the commit."""
        tree, required = self.workspace.tree(self.state.run, series.NAME), self._required
        self.say("final verify, on the branch's head")
        report = self.tools.verify(Contract.load(tree / "contract.toml"), tree / "kernels", "full", self.progress)
        self._final = encode_evidence(self._portable(report))
        found = report.verdict
        if found.void:
            raise AgentError(f"not published: the final verify is void ({'; '.join(found.reasons)})")
        if not found.exact:
            why = "; ".join(found.reasons) or f"{found.mismatches} mismatches"
            raise AgentError(f"not published: the final verify of the branch's head is {word(report)} ({why}); `agent resume` or a new run goes on")
        if report.throughput is None or report.throughput.ratio < required:
            ratio = "was not measured" if report.throughput is None else f"is {report.throughput.ratio:.3f} of stock"
            raise AgentError(f"not published: throughput {ratio}, required is {required:.3f}; --target-throughput asks for less, and the text "
                             "says so")
        return report

    def _claims(self, base: str, commit: str, changes: list[Change], story: series.Story, report: VerifyReport, reviewed: bool,
                searched: list[Searched], stock: Path) -> Claims:
        state, options, tree = self.state, self.options, self.workspace.tree(self.state.run, series.NAME)
        evidence = self.evidence.hashes | {"final": pull_request.sha256(self._final)}
        drafted = pull_request.draft(self.workspace, state, self.evidence)
        title = self.profile.title(drafted.title if self.checkout is None else _engine_title(state, changes), state.device)
        files = (series.blobs(self.workspace.path, self.workspace.head(tree), series.RUNS) if self.checkout is None
                 else series.blobs(self.checkout.path, commit, tuple(series.changed_files(self.checkout.path, base, commit))))
        engine = Engine(package=self.checkout.package()[0], base=base, drift=overlay.drift(self.checkout), contract=bool(
            state.contract["rollout"] or state.contract["training"])) if self.checkout else None
        return drafted.model_copy(update={
            "title": title, "renderer": body.RENDERER, "required": self._required, "branch": branch(state.run, series.NAME),
            "base_commit": base, "commit": commit, "base": state.base if self.checkout is None else self.checkout.base[:12], "files": files,
            "final": VerifyReport.model_validate_json(self._final), "causes": story.causes, "changes": changes,
            "repros": self._check_repros(story, tree, stock), "engine": engine, "upstream": self.profile.name,
            "human": options.human, "reviewed": reviewed, "coordination": options.coordination, "not_duplicate": options.not_duplicate,
            "searched": searched, "evidence": evidence})

    def _check_repros(self, story: series.Story, tree: Path, stock: Path) -> list[Repro]:
        """Exit codes now, as recorded and with the change. `stock` asks for the checkout's base commit."""
        repros = [repro for repro in story.repros if (tree / repro.folder / "repro.py").is_file()]
        if not repros:
            return []
        self.say("repros, before and after")
        folders = [tree / repro.folder for repro in repros]
        before = self.tools.check_repros(folders, None, (stock if self.checkout else tree) / "kernels")
        after = self.tools.check_repros(folders, Contract.load(tree / "contract.toml"), tree / "kernels")
        return [repro.model_copy(update={"before": b, "after": a}) for repro, b, a in zip(repros, before, after, strict=True)]

    @property
    def _required(self) -> float:
        return self.state.target if self.options.target is None else self.options.target

    @property
    def _out(self) -> Path:
        return (self.options.out or self.workspace.private / "pr" / self.state.run).resolve()

    def _portable(self, report: BaseModel) -> dict[str, Any]:
        """Plain data in which folders are named from the workspace, not from the root of this machine."""
        return json.loads(json.dumps(jsonable(report)).replace(json.dumps(f"{self.workspace.path}/")[1:-1], ""))

    def _write_out(self, made: Claims, text: str, evidence: dict[str, bytes], repository: Path, base: str, head: str) -> None:
        """Text, evidence and patches, all or nothing."""
        out = self._out
        if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / TITLE).is_file())):
            raise UserError(f"{out} exists and was not made by `agent pr`; name another folder with --out")
        out.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
        try:
            fresh.chmod(0o755)
            for name, data in evidence.items():
                write_atomic(fresh / "evidence" / f"{name}.json", data)
            write_atomic(fresh / pull_request.FILE, text.encode())
            write_atomic(fresh / TITLE, f"{made.title}\n".encode())
            if self.checkout:  # the engine's repository is no place for these
                for name in (*(r.folder for r in made.repros), "kernels"):
                    shutil.copytree(self.workspace.tree(made.run, series.NAME) / name, fresh / name)
            call_git(("format-patch", "--quiet", "--binary", "--no-signature", "--no-stat", "-o", str(fresh / "patches"), f"{base}..{head}"),
                     repository)
            shutil.rmtree(out, ignore_errors=True)
            fresh.replace(out)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)

    def _prepared(self) -> tuple[Claims, str]:
        """What the last call left, if it is still that."""
        path = self._out / "evidence" / f"{claims.FILE}.json"
        if not path.is_file():
            raise UserError(f"nothing is prepared in {self._out}; leave --prepared out")
        data = path.read_bytes()
        made = claims.read(data, str(path))
        repository = self.checkout.path if self.checkout else self.workspace.path
        if not Workspace(repository).has_branch(made.branch):
            raise UserError(f"{made.branch} is gone, which {self._out} is about; leave --prepared out")
        head = call_git(("rev-parse", f"refs/heads/{made.branch}"), repository)
        if self.checkout is None and pull_request.sha256(data) not in self.workspace.evidence_trailers(head):
            raise UserError(f"{made.branch} is not the branch that was prepared in {self._out}; leave --prepared out")
        if self.checkout and head != made.commit:
            raise UserError(f"{made.branch} stands at {head[:12]}, verified was {made.commit[:12]}; leave --prepared out")
        if made.run != self.state.run or made.human != self.options.human or made.upstream != self.profile.name:
            raise UserError("what is prepared is for another run, person or profile; leave --prepared out")
        if self.profile.human and not made.reviewed:
            raise UserError(f"{made.human or 'nobody'} had not confirmed having read every line when this was prepared; leave --prepared out")
        return made, head

    # ---- the forge ----------------------------------------------------------------------------------------------

    def _search(self, state: RunState) -> list[Searched]:
        """Open work that this could repeat. Raises AgentError if it does."""
        if self.forge is None:
            return []
        title = self.profile.title(pull_request.title(state.model, {"verdict": {"exact": True}}), state.device)
        self._check_head()
        looks = [(title, "title"), (state.run, "body"), *((words, "title") for words in (self.profile.area if self.profile.duplicates else []))]
        found = [(words, where, self.forge.open_like(words, where)) for words, where in looks]
        own = {p.number for p in self._own}
        same = [p for words, _, pulls in found if words in (title, state.run) for p in pulls if p.number not in own]
        if same and not self.options.not_duplicate:
            raise AgentError(f"not opened: #{same[0].number} \"{same[0].title}\" ({same[0].url}) is open and looks like the same work; if it is not, "
                             "say why with --not-duplicate TEXT")
        return [Searched(query=f"{words} in:{where}", found=[f"#{p.number} {p.title}" for p in pulls if p.number not in own][:10])
                for words, where, pulls in found]

    def _check_head(self) -> None:
        assert self.forge and self.options.repo
        owner = self.options.fork or self.options.repo.partition("/")[0]
        self._own: list[Pull] = self.forge.open_with_head(f"{owner}:{branch(self.state.run, series.NAME)}")
        if self._own and not self.options.update:
            raise AgentError(f"not opened: #{self._own[0].number} ({self._own[0].url}) is open for this run's branch; --update replaces its branch "
                             "and text")

    def _open(self, made: Claims, head: str, result: Published) -> Published:
        """Push, then open or update. Nothing is sent on a dry run."""
        assert self.forge and self.options.repo
        if self.options.prepared:
            self._check_head()
        if self.options.dry_run:
            return result
        repository = self.checkout.path if self.checkout else self.workspace.path
        self.say(f"pushing {made.branch} to {self.remote}")
        forge.push(repository, head, made.branch, self.remote, self.options.base_url, self.forge.token)
        text = body.without_title((self._out / pull_request.FILE).read_text(encoding="utf-8"))
        if self._own:
            opened = self.forge.update(self._own[0].number, made.title, text)
        else:
            named = f"{self.options.fork}:{made.branch}" if self.options.fork else made.branch
            opened = self.forge.create(made.title, named, self.base, text)
        self.state.pull_request = opened.url or None
        return result.model_copy(update={"pull_request": opened.url, "updated": bool(self._own)})


def _engine_title(state: RunState, changes: list[Change]) -> str:
    named = ", ".join(dict.fromkeys(c.operator for c in changes if c.operator)) or "engine"
    return f"{named}: give the rollout of {state.model} the bits that training computes"
