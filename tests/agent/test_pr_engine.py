"""Changing the engine itself: diffs of a real checkout, the loop around them, and the package that runs then."""

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pr_world import HUMAN, agent, one_line

from agent import checkpoint, overlay
from agent import state as states
from agent.checkout import PATCH, Checkout
from agent.config import FILE, Config, EngineCheckout
from agent.errors import UserError
from agent.fakes import FakeTools, SilentObserver
from agent.loop import Run
from agent.overlay import EngineSandbox, Patched, build, drift
from agent.policies import Localize, Patch, Repro, Stop, Verify
from agent.session import Job, Session
from agent.state import RunState, load_current
from agent.tools.patch_kernel import PatchRequest, patch_kernel
from agent.workspace import Workspace, call_git
from consistency.contract import Contract
from sandboxes import Capabilities, choose

ACTIVATION = "vllm/model_executor/layers/activation.py"
WORLD = {"engine": ["silu_and_mul"], "batch": []}
KEY = "engine:000.silu_and_mul"


def package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    assert spec and spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations)))


@pytest.fixture(scope="module")
def vllm_repository(tmp_path_factory) -> Path:
    """The Python files of the installed vLLM's layers and top, as a repository: what a checkout of that version holds there."""
    top = tmp_path_factory.mktemp("engine") / "vllm"
    for pattern in ("*.py", "model_executor/*.py", "model_executor/layers/*.py"):
        for source in package("vllm").glob(pattern):
            target = top / "vllm" / source.relative_to(package("vllm"))
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    (top / "vllm" / "_version.py").unlink()  # made by the build, as in the real repository
    (top / "vllm" / "data.bin").write_bytes(b"\0\1")
    (top / "vllm" / "link.py").symlink_to("envs.py")
    (top / "setup.py").write_text("x = 1\n")
    call_git(("init", "--quiet", "--initial-branch=main"), top)
    call_git(("add", "--all"), top)
    call_git(("-c", "user.name=t", "-c", "user.email=t@t", "commit", "--quiet", "--message=vllm"), top)
    return top


@pytest.fixture
def repository(vllm_repository, tmp_path) -> Path:
    call_git(("clone", "--quiet", str(vllm_repository), str(tmp_path / "vllm")), tmp_path)
    return tmp_path / "vllm"


@pytest.fixture
def checkout(repository) -> Checkout:
    return Checkout.begin(repository, ["vllm/**"])


def diff(repository: Path, old: str, new: str, name: str = ACTIVATION) -> str:
    """Git's own diff of one edit."""
    path = repository / name
    text = path.read_text()
    assert text.count(old) >= 1
    path.write_text(text.replace(old, new, 1))
    made = call_git(("diff",), repository) + "\n"
    call_git(("checkout", "--quiet", "--", name), repository)
    return made


SILU = ("        return F.silu(x[..., :d]) * x[..., d:]\n",
        '        print("patched", __file__, flush=True)\n        return F.silu(x[..., :d].float()).to(x.dtype) * x[..., d:]\n')


@pytest.fixture
def silu(repository) -> str:
    return diff(repository, *SILU)


def untouched(repository: Path) -> bool:
    return call_git(("status", "--porcelain"), repository) == "" and call_git(("rev-parse", "--abbrev-ref", "HEAD"), repository) == "main"


def test_diffs_pile_up_in_the_object_store_and_nothing_else_changes(repository, checkout, silu):
    once = checkout.apply("", silu)
    assert once.changed == [ACTIVATION] and checkout.tree(once.patch) == once.tree
    twice = checkout.apply(once.patch, created("vllm/new.py"))
    assert twice.changed == ["vllm/new.py"] and set(call_git(("diff", "--name-only", checkout.base, twice.tree), repository).split()) == {
        ACTIVATION, "vllm/new.py"}
    with pytest.raises(UserError, match=r"hunk 1 of vllm/model_executor/layers/activation\.py \(@@ .* @@\) does not match"):
        checkout.apply(once.patch, silu)
    assert untouched(repository)


def created(name: str, mode: str = "100644") -> str:
    return f"diff --git a/{name} b/{name}\nnew file mode {mode}\nindex 0000000..587be6b\n--- /dev/null\n+++ b/{name}\n@@ -0,0 +1 @@\n+x\n"


HEAD = f"diff --git a/{ACTIVATION} b/{ACTIVATION}\n--- a/{ACTIVATION}\n+++ b/{ACTIVATION}\n"


@pytest.mark.parametrize(("text", "said"), [
    (HEAD + "@@ -1,3 +1,3 @@\n one\n-two\n+three\n four\n", f"hunk 1 of {ACTIVATION} (@@ -1,3 +1,3 @@) does not match"),
    (HEAD + "@@ -1,9 +1,9 @@\n one\n-two\n+three\n", f"hunk 1 of {ACTIVATION} (@@ -1,9 +1,9 @@) has other numbers of lines"),
    (created("setup2.py"), "setup2.py is outside the allowed paths (vllm/**)"),
    (created("vllm/envs.py"), "vllm/envs.py exists already"),
    (created("vllm/x.py", "120000"), "vllm/x.py: the diff makes, changes or removes a symbolic link or a submodule"),
    (created("vllm/x", "160000"), "vllm/x: the diff makes, changes or removes a symbolic link or a submodule"),
    (created("vllm/x.sh", "100755"), "vllm/x.sh: the diff sets a file mode"),
    (created("vllm/.git/hooks/pre-commit"), "patch refused"), (created("vllm/../../x.py"), "patch refused"), (created("/etc/x"), "patch refused"),
    (created("vllm/link.py/x.py"), "patch refused"),
    ("diff --git a/vllm/envs.py b/vllm/envs.py\nold mode 100644\nnew mode 100755\n", "vllm/envs.py: the diff sets a file mode"),
    ("diff --git a/vllm/envs.py b/envs.py\nsimilarity index 100%\nrename from vllm/envs.py\nrename to envs.py\n", "envs.py is outside"),
    ("diff --git a/setup.py b/vllm/s.py\nsimilarity index 100%\nrename from setup.py\nrename to vllm/s.py\n", "setup.py is outside"),
    ("diff --git a/vllm/data.bin b/vllm/data.bin\nindex 1..2 100644\nBinary files a/vllm/data.bin and b/vllm/data.bin differ\n", "binary data"),
    ("diff --git a/vllm/link.py b/vllm/link.py\nindex 1..2 120000\n--- a/vllm/link.py\n+++ b/vllm/link.py\n@@ -1 +1 @@\n-envs.py\n"
     "\\ No newline at end of file\n+/etc/passwd\n\\ No newline at end of file\n", "symbolic link"),
    ("--- a/vllm/gone.py\n+++ b/vllm/gone.py\n@@ -1 +1 @@\n-a\n+b\n", "vllm/gone.py does not exist"),
    ("please change the activation", "no change in unified form"), (f"{HEAD}", "patch refused")])
def test_a_diff_that_may_not_be_made_is_refused_in_one_line(repository, checkout, text, said):
    with pytest.raises(UserError) as error:
        checkout.apply("", text)
    assert said in str(error.value) and "\n" not in str(error.value)
    assert untouched(repository)


def test_a_link_edited_without_saying_so_is_seen_in_the_tree(repository, checkout):
    with pytest.raises(UserError, match="symbolic link"):
        checkout.apply("", "--- a/vllm/link.py\n+++ b/vllm/link.py\n@@ -1 +1 @@\n-envs.py\n\\ No newline at end of file\n+/etc/passwd\n"
                           "\\ No newline at end of file\n")


def test_what_is_no_checkout(tmp_path, repository):
    with pytest.raises(UserError, match="not the top of a git repository"):
        Checkout.begin(tmp_path, ["vllm/**"])
    with pytest.raises(UserError, match="--allow GLOB"):
        Checkout.begin(repository, [])
    (repository / "vllm" / "envs.py").write_text("x")
    with pytest.raises(UserError, match="uncommitted changes"):
        Checkout.begin(repository, ["vllm/**"])
    other = tmp_path / "other"
    other.mkdir()
    call_git(("init", "--quiet"), other)
    call_git(("commit", "--quiet", "--allow-empty", "--message=x"), other)
    with pytest.raises(UserError, match="not a checkout of an engine"):
        Checkout.begin(other, ["vllm/**"])


# ---- the loop --------------------------------------------------------------------------------------------------------


class Engine(FakeTools):
    """An engine that differs until its checkout is patched."""

    def _differing(self, dimension, contract):
        return [] if self.patched else self.world[dimension]

    def verify(self, contract, kernels, level, progress):
        self.patched = (kernels.parent / PATCH).exists()
        return super().verify(contract, kernels, level, progress)

    def localize(self, contract, kernels, progress):
        self.patched = (kernels.parent / PATCH).exists()
        return super().localize(contract, kernels, progress)

    def check_repros(self, directories, contract, kernels):
        return [0 if (kernels.parent / PATCH).exists() else 1 for _ in directories]


class Scripted:
    name = "scripted"

    def __init__(self, *actions):
        self.actions = list(actions)

    def decide(self, state):
        return self.actions.pop(0) if self.actions else Stop(why="end of script")


def go(tmp_path: Path, checkout: Checkout, *patches: str, tools: FakeTools | None = None) -> tuple[Workspace, RunState]:
    settings = Config(model="qwen3", scale="tiny", checkout=EngineCheckout(path=str(checkout.path), base=checkout.base, allow=list(checkout.allow)))
    workspace = Workspace.create(tmp_path / "ws", settings)
    states.begin(workspace, run="r1", checkpoint="none", device="cpu", policy="scripted", target=0.913)
    moves = [Patch(diff=text, addresses=[KEY], why="round where training rounds") for text in patches]
    policy = Scripted(Verify(), Localize(), Repro(divergences=[KEY]), *moves, Verify(level="full"))
    return workspace, Run(workspace, load_current(workspace), policy, tools or Engine(WORLD), SilentObserver(), minutes=5, attempts=9).go()


def test_a_run_keeps_a_patch_of_the_checkout_on_branches_of_its_own(tmp_path, repository, checkout, silu):
    workspace, state = go(tmp_path, checkout, created("setup2.py"), silu)
    assert state.outcome == "exact" and [(a.outcome, a.title) for a in state.attempts] == [("kept", ACTIVATION)]
    assert any("refused patch" in step and "outside the allowed paths (vllm/**)" in step for step in state.steps)
    assert workspace.show("agent/r1/main", PATCH).decode().count("+++ b/vllm") == 1
    branches = set(call_git(("branch", "--format=%(refname:short)"), repository).splitlines())
    assert branches == {"main", "agent/r1/main", "agent/r1/attempt-1"} and untouched(repository)
    for name in ("agent/r1/main", "agent/r1/attempt-1"):
        assert "patched" in call_git(("show", f"{name}:{ACTIVATION}"), repository)


def test_its_pull_request_is_about_the_engine_and_can_be_checked_on_a_clone(tmp_path, repository, checkout, silu):
    workspace, _ = go(tmp_path, checkout, silu)
    tools = Engine(WORLD)
    result = agent("pr", workspace.path, "--human", HUMAN, "--i-have-read-every-line", "--json", tools=tools)
    assert result.exit_code == 0, result.output
    made = json.loads(result.stdout)
    assert made["head"] == made["verified"] == call_git(("rev-parse", "agent/r1/pr"), repository)
    assert call_git(("diff", "--name-only", "main", "agent/r1/pr"), repository) == ACTIVATION
    assert made["title"].startswith("[Bugfix][CPU] silu_and_mul: ") and untouched(repository)
    message = call_git(("log", "-1", "--format=%B", "agent/r1/pr"), repository)
    assert "round where training rounds" in message and message.rstrip().endswith(f"Signed-off-by: {HUMAN}")
    text = Path(made["body"]).read_text()
    assert "The change is to `vllm`" in text and "own test suite was not run" in text and "round where training rounds" in text
    clone = tmp_path / "clone"
    call_git(("clone", "--quiet", "--no-local", "--single-branch", "--branch", "main", str(repository), str(clone)), tmp_path)
    found = agent("verify-pr", made["out"], "--repo", clone, "--json", tools=tools)
    assert found.exit_code == 0, found.stdout
    rows = {row["claim"]: row for row in json.loads(found.stdout)["rows"]}
    assert rows["commit"]["found"].startswith("not here; the patches on its base are") and rows["verdict"]["result"] == "reproduces"
    assert rows["repros/00-engine-silu_and_mul"]["found"] == "1, then 0"
    patch = Path(made["patches"][0])
    patch.write_text(patch.read_text().replace(".to(x.dtype)", ".half()"))
    changed = agent("verify-pr", made["out"], "--repo", clone, tools=tools)
    one_line(changed, 2, "--repo names another repository")


def test_a_checkout_that_is_gone_or_behind_says_so(tmp_path, repository, checkout, silu):
    workspace, _ = go(tmp_path, checkout, silu)
    repository.rename(tmp_path / "moved")
    one_line(agent("pr", workspace.path, tools=Engine(WORLD)), 2, "does not hold commit", "[checkout]")


def test_the_command_line_makes_such_a_workspace(tmp_path, repository):
    common = ["run", "--model", "qwen3", "--workspace", tmp_path / "ws", "--attempts", 0, "--from-scratch"]
    one_line(agent(*common, "--repo", repository), 2, "--allow GLOB")
    one_line(agent(*common, "--allow", "vllm/**"), 2, "--repo")
    assert not (tmp_path / "ws").exists()
    assert agent(*common, "--repo", repository, "--allow", "vllm/**", tools=Engine(WORLD)).exit_code == 3
    settings = Config.load(tmp_path / "ws" / FILE)
    assert settings.checkout and settings.checkout.base == call_git(("rev-parse", "main"), repository) and settings.checkout.allow == ["vllm/**"]
    one_line(agent(*common, "--repo", repository, "--allow", "tests/**"), 2, "is a workspace with")
    one_line(agent(*common, "--repo", tmp_path, "--allow", "vllm/**"), 2, "is a workspace with")


def test_a_patch_by_hand_of_such_a_workspace(tmp_path, repository, checkout, silu):
    workspace, _ = go(tmp_path, checkout)
    (tmp_path / "p.diff").write_text(silu)
    result = agent("patch", "--workspace", workspace.path, "--diff", tmp_path / "p.diff", "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data["engine"] == [ACTIVATION] and data["changed"] == [PATCH]
    assert "patched" in call_git(("show", f"{data['branch']}:{ACTIVATION}"), repository)
    (tmp_path / "p.diff").write_text(silu.replace("F.silu(x[..., :d]) *", "F.gelu(x[..., :d]) *"))
    one_line(agent("patch", "--workspace", workspace.path, "--diff", tmp_path / "p.diff"), 2, f"hunk 1 of {ACTIVATION}")


def test_a_model_can_ask_for_a_diff(tmp_path, checkout, silu):
    from agent.llm.conversation import Call
    from agent.llm.moves import Moves
    from agent.llm.requests import Unusable, parse

    workspace, state = go(tmp_path, checkout)

    def ask(text: str):
        arguments = {"why": "round", "addresses": [KEY], "bindings": [], "files": [], "diff": text}
        call = Call(id="1", name="patch_kernel", arguments=arguments, raw=json.dumps(arguments))
        return Moves(workspace.path).action(parse(call), state)

    assert ask(silu).diff == silu
    with pytest.raises(Unusable, match=r"hunk 1 of vllm/model_executor/layers/activation\.py"):
        ask(silu.replace("F.silu(x[..., :d]) *", "F.gelu(x[..., :d]) *"))


# ---- the package that runs -------------------------------------------------------------------------------------------


def test_a_package_is_the_installed_one_but_for_the_changed_files(repository, checkout, silu, tmp_path):
    """data.bin and link.py are in the checkout and not installed: link is no plain file, data comes along."""
    assert drift(checkout) == 0
    patched = checkout.apply("", silu + created("vllm/extra.py"))
    made = build(checkout, patched.tree, tmp_path / "engines") / "vllm"
    installed = package("vllm").resolve()
    real = {str(p.relative_to(made)) for p in made.rglob("*") if p.is_file() and not p.is_symlink() and not any(q.is_symlink() for q in p.parents)}
    assert real == {"model_executor/layers/activation.py", "extra.py", "data.bin"}
    assert "patched" in (made / "model_executor/layers/activation.py").read_text()
    assert (made / "platforms").resolve() == installed / "platforms" and (made / "_version.py").resolve() == installed / "_version.py"
    assert [p.name for p in sorted(made.glob("*.so"))] == [p.name for p in sorted(installed.glob("*.so"))]
    assert build(checkout, patched.tree, tmp_path / "engines") == made.parent, "made once"


def test_a_deleted_file_is_gone_from_the_package(repository, checkout, tmp_path):
    (repository / "vllm" / "scalar_type.py").unlink()
    text = call_git(("diff",), repository) + "\n"
    call_git(("checkout", "--quiet", "--", "."), repository)
    made = build(checkout, checkout.apply("", text).tree, tmp_path / "engines") / "vllm"
    assert not (made / "scalar_type.py").exists() and (package("vllm") / "scalar_type.py").exists()


def test_a_base_that_is_not_the_installed_version_is_counted_and_is_what_stock_runs(repository, tmp_path):
    path = repository / "vllm" / "envs.py"
    path.write_text(path.read_text() + "\nNEWER = 1\n")
    call_git(("commit", "--quiet", "--all", "--message=newer"), repository)
    checkout = Checkout.begin(repository, ["vllm/**"])
    worktree = tmp_path / "worktree"
    (worktree / "kernels").mkdir(parents=True)
    settings = Config(model="qwen3", scale="tiny", checkout=EngineCheckout(path=str(repository), base=checkout.base, allow=["vllm/**"]))
    (worktree / FILE).write_text(settings.dumps())
    assert drift(checkout) == 1
    engine = Patched.of(worktree)
    assert engine is not None and engine.facts()["drift"] == 1
    box = engine.sandbox(tmp_path / "engines", Recorder())
    assert box.stock == box.patched
    assert "NEWER" in (box.patched / "vllm" / "envs.py").read_text()


def test_a_package_of_transformers_is_the_one_that_python_imports(tmp_path):
    top = tmp_path / "transformers"
    (top / "src" / "transformers").mkdir(parents=True)
    shutil.copyfile(package("transformers") / "__init__.py", top / "src" / "transformers" / "__init__.py")
    call_git(("init", "--quiet", "--initial-branch=main"), top)
    call_git(("add", "--all"), top)
    call_git(("commit", "--quiet", "--message=x"), top)
    checkout = Checkout.begin(top, ["src/transformers/**"])
    init = top / "src" / "transformers" / "__init__.py"
    init.write_text(init.read_text() + '\nprint("patched", __file__)\n')
    text = call_git(("diff",), top) + "\n"
    call_git(("checkout", "--quiet", "."), top)
    made = build(checkout, checkout.apply("", text).tree, tmp_path / "engines")
    done = subprocess.run([sys.executable, "-c", "import transformers.utils.versions as v; print(v.__name__)"], env={"PYTHONPATH": str(made)},
                          capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"patched {made / 'transformers' / '__init__.py'}", "transformers.utils.versions"]


class Recorder:
    """A sandbox that starts nothing."""

    def start(self, argv, directory, environment, limits):
        self.given = (environment, limits)

    def capabilities(self) -> Capabilities:
        return choose("local").capabilities()


def test_only_the_candidates_processes_get_the_patch(tmp_path):
    box = EngineSandbox(Recorder(), tmp_path / "patched", None)
    from sandboxes import Limits

    box.start([], tmp_path / "jobs" / "rollout", {}, Limits())
    environment, limits = box.inner.given
    assert environment["PYTHONPATH"].startswith(f"{tmp_path / 'patched'}:") and limits.readable == (tmp_path / "patched",)
    for name in overlay.WITHOUT_CANDIDATE:
        box.start([], tmp_path / "jobs" / name, {}, Limits())
        assert box.inner.given == ({}, Limits())


@pytest.mark.engine
def test_the_real_rollout_runs_the_patched_file(repository, tmp_path, silu):
    """vLLM itself, from a workspace's worktree with engine.patch to the log-probabilities: the changed layer computes them."""
    worktree = tmp_path / "worktree"
    (worktree / "kernels").mkdir(parents=True)
    checkout = Checkout.begin(repository, ["vllm/model_executor/**"])
    settings = Config(model="qwen3", scale="tiny", checkout=EngineCheckout(path=str(repository), base=checkout.base, allow=list(checkout.allow)))
    (worktree / FILE).write_text(settings.dumps())
    (worktree / "contract.toml").touch()
    assert Patched.of(worktree) is None, "nothing is patched yet, so the installed engine runs"
    assert patch_kernel(PatchRequest(worktree=worktree, diff=silu)).engine == [ACTIVATION]
    engine = Patched.of(worktree)
    assert engine is not None
    box = engine.sandbox(tmp_path / "engines")
    limits = {"threads": 1, "plugin": False, "max_num_seqs": 4, "max_model_len": 64}
    job = Job("rollout", "qwen3", checkpoint.seeded("qwen3", "tiny"), Contract(), None, limits)
    (tmp_path / "jobs" / "rollout").mkdir(parents=True)
    with Session(job, tmp_path / "jobs" / "rollout", sandbox=box) as session:
        answer = session.run({"kind": "generate", "requests": [{"prompt": [5, 6, 7]}], "max_tokens": 2, "seed": 1, "temperature": 1.0})
    assert len(answer.arrays["logprob"]) == 2
    log = (tmp_path / "jobs" / "rollout" / "log").read_text()
    assert f"patched {box.patched / ACTIVATION}" in log
