"""Read-only looks: three trees, and no way out of them."""

import os
from pathlib import Path

import pytest

from agent.llm import looks
from agent.llm.looks import Looks, roots
from agent.llm.requests import ListCall, ReadCall, SearchCall, Unusable


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    top = tmp_path / "tree"
    (top / "kernels").mkdir(parents=True)
    (top / "contract.toml").write_text('[operators]\nlinear = "exact"\n')
    (top / "kernels" / "a.py").write_text("".join(f"line {n}\n" for n in range(1, 1001)))
    (top / "blob").write_bytes(b"\x7fELF\0\0")
    (top / ".git").write_text("gitdir: /somewhere\n")
    (tmp_path / "secret").write_text("top secret\n")
    (tmp_path / "tree-two").mkdir()
    (tmp_path / "tree-two" / "x").write_text("other\n")
    (top / "out").symlink_to(tmp_path / "secret")
    (top / "up").symlink_to(tmp_path)
    (top / "in").symlink_to(top / "contract.toml")
    (top / "loop").symlink_to(top / "loop")
    os.mkfifo(top / "pipe")
    return top


@pytest.fixture
def look(tree: Path):
    return Looks({"workspace": {"": tree}, "operators": {"": tree / "kernels"}, "stack": {"vllm": tree / "kernels"}}).answer


def test_list_read_search(look):
    assert "kernels/" in look(ListCall(root="workspace")).splitlines() and ".git" not in look(ListCall(root="workspace"))
    assert look(ReadCall(root="workspace", path="contract.toml", first_line=2)) == '     2 linear = "exact"'
    assert look(SearchCall(root="workspace", pattern="line (7|8)$")) == "kernels/a.py:7:line 7\nkernels/a.py:8:line 8"
    assert look(SearchCall(root="workspace", path="kernels/a.py", pattern="line 1000")) == "kernels/a.py:1000:line 1000"
    assert look(ReadCall(root="workspace", path="in")).startswith("     1 [operators]"), "a link that stays inside is fine"
    assert look(ListCall(root="stack")) == "vllm/" and look(ReadCall(root="stack", path="vllm/a.py", first_line=1000)) == "  1000 line 1000"
    assert look(SearchCall(root="stack", path="vllm", pattern="line 999")) == "vllm/a.py:999:line 999"
    assert look(SearchCall(root="workspace", pattern="nowhere at all")) == "no line matches"


@pytest.mark.parametrize("path", ["../secret", "/etc/passwd", "kernels/../../secret", "out", "up/secret", "up", "../tree-two/x", "a\0b",
                                  "..\\secret", "loop", ".git", "gone", "kernels/a.py/x", "~/.ssh/id", "x" * 5000])
@pytest.mark.parametrize("make", [ListCall, ReadCall, lambda **more: SearchCall(pattern="secret", **more)])
def test_no_way_out(look, path, make):
    with pytest.raises(Unusable) as caught:
        look(make(root="workspace", path=path))
    assert "top secret" not in str(caught.value)


@pytest.mark.parametrize("path", ["vllm/../../secret", "torch/x", ".", "vllmx", "a.py"])
def test_no_way_out_of_the_stack(look, path):
    with pytest.raises(Unusable):
        look(ReadCall(root="stack", path=path))


def test_search_follows_no_link(look):
    assert look(SearchCall(root="workspace", pattern="secret")) == "no line matches"


def test_sizes(look, tree):
    text = look(ReadCall(root="workspace", path="kernels/a.py"))
    assert len(text.splitlines()) == 401 and text.endswith("... 600 more lines; ask from line 401")
    (tree / "wide.txt").write_text(("w" * 5000 + "\n") * 300)
    assert len(look(ReadCall(root="workspace", path="wide.txt"))) < looks.CHARACTERS + 100
    for n in range(300):
        (tree / "kernels" / f"f{n:03}").touch()
    assert "more" in look(ListCall(root="workspace", path="kernels")).splitlines()[-1]
    assert len(look(SearchCall(root="workspace", pattern="line")).splitlines()) <= looks.HITS + 1
    with pytest.raises(Unusable, match="lines; there is none"):
        look(ReadCall(root="workspace", path="contract.toml", first_line=10))


def test_what_is_no_text(look, tree, monkeypatch):
    with pytest.raises(Unusable, match="not text"):
        look(ReadCall(root="workspace", path="blob"))
    with pytest.raises(Unusable, match="not a file"):
        look(ReadCall(root="workspace", path="pipe"))
    monkeypatch.setattr(looks, "FILE_BYTES", 10)
    with pytest.raises(Unusable, match="search it"):
        look(ReadCall(root="workspace", path="contract.toml"))


@pytest.mark.parametrize(("pattern", "said"), [("(", "failed"), (r"(a)\1", "back-references"), ("-f/etc/passwd", "no line")])
def test_patterns(look, pattern, said):
    try:
        found = look(SearchCall(root="workspace", pattern=pattern))
    except Unusable as error:
        found = str(error)
    assert said in found


def test_a_whole_root_of_the_stack_is_not_searched(look):
    with pytest.raises(Unusable, match="name a folder to search"):
        look(SearchCall(root="stack", pattern="x"))


def test_the_roots_of_a_run(tmp_path):
    found = roots(tmp_path, tmp_path / "attempts")
    assert found["workspace"] == {"": tmp_path} and (found["operators"][""] / "operators" / "catalog.py").is_file()
    assert all((place / "__init__.py").is_file() for place in found["stack"].values())
