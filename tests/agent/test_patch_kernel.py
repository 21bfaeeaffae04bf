from pathlib import Path

import pytest

from agent.errors import UserError
from agent.tools.diffs import MAX_BYTES
from agent.tools.patch_kernel import Binding, PatchRequest, patch_kernel
from agent.workspace import call_git
from consistency.contract import Contract

KERNEL = "def exact(x):\n    return x\n"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    tree = tmp_path / "tree"
    (tree / "kernels").mkdir(parents=True)
    (tree / "contract.toml").write_text('[operators]\nlinear = "exact"\n')
    (tree / "kernels" / "old.py").write_text("a = 1\nb = 2\n")
    call_git(("init", "--quiet", "--initial-branch=main"), tree)
    call_git(("add", "--all"), tree)
    call_git(("-c", "user.name=t", "-c", "user.email=t@t", "commit", "--quiet", "--message=start"), tree)
    return tree


def snapshot(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file() and ".git" not in p.parts}


def test_bindings_are_added_to_the_contract(tree):
    report = patch_kernel(PatchRequest(worktree=tree, bindings=[
        Binding(operator="rms_norm", implementation="exact"), Binding(operator="attention", implementation="exact", side="rollout")]))
    assert Contract.load(tree / "contract.toml") == Contract(
        {"linear": "exact", "rms_norm": "exact", "attention": "exact"}, {"linear": "exact", "rms_norm": "exact"})
    assert report.changed == ["contract.toml"]
    assert report.contract == Contract.load(tree / "contract.toml").as_dict()


def test_a_new_kernel_and_its_binding_come_together(tree):
    report = patch_kernel(PatchRequest(worktree=tree, files={"kernels/mine.py": KERNEL},
                                       bindings=[Binding(operator="linear", implementation="kernels:mine.exact")]))
    assert (tree / "kernels/mine.py").read_text() == KERNEL
    assert report.changed == ["contract.toml", "kernels/mine.py"]
    assert Contract.load(tree / "contract.toml").rollout["linear"] == "kernels:mine.exact"


@pytest.mark.parametrize("name", [
    "/etc/passwd", "../out.py", "kernels/../../out.py", "kernels/../contract.toml", "./kernels/x.py", "kernels//x.py", "contract.toml", "x.py",
    "kernels/x.sh", "kernels/deep/x.py", ".git/hooks/pre-commit", "kernels/.git/x.py", "kernels/.GIT", "", "kernels/", "kernels/a\nb.py",
    "kernels\\x.py", ".gitmodules", "evidence/final.json", "repros/00/repro.py", "consistency.toml"])
def test_a_file_outside_the_allowed_paths_is_refused(tree, tmp_path, name):
    before = snapshot(tmp_path)
    with pytest.raises(UserError, match="patch refused"):
        patch_kernel(PatchRequest(worktree=tree, files={"kernels/fine.py": KERNEL, name: KERNEL}))
    assert snapshot(tmp_path) == before


def test_a_symbolic_link_is_not_followed(tree, tmp_path):
    outside = tmp_path / "outside.py"
    outside.write_text("untouched")
    (tree / "kernels" / "link.py").symlink_to(outside)
    with pytest.raises(UserError, match="symbolic link"):
        patch_kernel(PatchRequest(worktree=tree, files={"kernels/link.py": KERNEL}))
    (tree / "kernels" / "link.py").unlink()
    (tree / "kernels" / "old.py").unlink()
    (tree / "kernels").rmdir()
    (tree / "kernels").symlink_to(tmp_path)
    with pytest.raises(UserError, match="symbolic link"):
        patch_kernel(PatchRequest(worktree=tree, files={"kernels/new.py": KERNEL}))
    assert outside.read_text() == "untouched" and not (tmp_path / "new.py").exists()


@pytest.mark.parametrize("text", ["a\0b", "x" * (MAX_BYTES + 1)])
def test_binary_and_oversized_files_are_refused(tree, text):
    with pytest.raises(UserError, match="patch refused"):
        patch_kernel(PatchRequest(worktree=tree, files={"kernels/x.py": text}))


@pytest.mark.parametrize(("operator", "implementation", "said"), [
    ("rms_nrom", "exact", "unknown operator 'rms_nrom'"),
    ("rms_norm", "fast", "no implementation 'fast'"),
    ("rms_norm", "kernels:absent.exact", "kernels/absent.py does not exist"),
    ("rms_norm", "kernels:../x.exact", "kernels:FILE.NAME"),
    ("rms_norm", "kernels:old", "kernels:FILE.NAME")])
def test_an_unknown_operator_or_implementation_is_refused(tree, operator, implementation, said):
    before = snapshot(tree)
    with pytest.raises(UserError, match=said.replace(".", r"\.")):
        patch_kernel(PatchRequest(worktree=tree, files={"kernels/x.py": KERNEL},
                                  bindings=[Binding(operator=operator, implementation=implementation)]))
    assert snapshot(tree) == before


def test_an_empty_patch_is_refused(tree):
    with pytest.raises(UserError, match="empty"):
        patch_kernel(PatchRequest(worktree=tree))


EDIT = """--- a/kernels/old.py
+++ b/kernels/old.py
@@ -1,2 +1,2 @@
 a = 1
-b = 2
+b = 3
"""


def created(name: str, mode: str = "100644", content: str = "x") -> str:
    return f"diff --git a/{name} b/{name}\nnew file mode {mode}\nindex 0000000..587be6b\n--- /dev/null\n+++ b/{name}\n@@ -0,0 +1 @@\n+{content}\n"


def test_a_diff_inside_the_allowed_paths_applies(tree):
    report = patch_kernel(PatchRequest(worktree=tree, diff=EDIT + created("kernels/new.py")))
    assert (tree / "kernels/old.py").read_text() == "a = 1\nb = 3\n"
    assert (tree / "kernels/new.py").read_text() == "x\n"
    assert report.changed == ["kernels/new.py", "kernels/old.py"]


@pytest.mark.parametrize(("diff", "said"), [
    (created("contract.toml"), "outside the allowed"),
    (created("kernels/deep/x.py"), "outside the allowed"),
    (created("../x.py"), "patch refused"),
    (created(".git/hooks/post-commit"), "patch refused"),
    (created("kernels/link.py", "120000", "/etc/passwd"), "symbolic link"),
    ("diff --git a/kernels/old.py b/stolen.py\nsimilarity index 100%\nrename from kernels/old.py\nrename to stolen.py\n", "outside the allowed"),
    ("diff --git a/contract.toml b/kernels/c.py\nsimilarity index 100%\ncopy from contract.toml\ncopy to kernels/c.py\n", "outside the allowed"),
    (EDIT.replace("b = 2", "b = 9"), "does not apply"),
    ("this is no diff", "patch refused"),
    ("", "patch is empty"),
    (EDIT + created("x.py"), "outside the allowed")])
def test_a_diff_that_reaches_further_is_refused(tree, tmp_path, diff, said):
    before = snapshot(tmp_path)
    with pytest.raises(UserError, match=said):
        patch_kernel(PatchRequest(worktree=tree, diff=diff))
    assert snapshot(tmp_path) == before
    assert call_git(("status", "--porcelain"), tree) == ""


@pytest.mark.parametrize(("pattern", "name", "allowed"), [
    ("csrc/**/*.cu", "csrc/a.cu", True), ("csrc/**/*.cu", "csrc/x/y/a.cu", True), ("csrc/*.cu", "csrc/x/a.cu", False),
    ("csrc/?.cu", "csrc/a.cu", True), ("csrc/?.cu", "csrc/ab.cu", False), ("csrc/**", "csrc/a/b.txt", True), ("csrc/**", "src/a", False),
    ("a.b", "axb", False)])
def test_globs_for_a_foreign_repository(tree, pattern, name, allowed):
    request = PatchRequest(worktree=tree, diff=created(name), allow=[pattern])
    if allowed:
        assert patch_kernel(request).changed == [name]
    else:
        with pytest.raises(UserError, match="outside the allowed"):
            patch_kernel(request)
