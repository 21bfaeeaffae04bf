import re
from html.parser import HTMLParser

import pytest

from agent import report
from agent import state as states
from agent.fakes import FakeTools, SilentObserver
from agent.loop import Run
from agent.policies.playbook import Playbook
from agent.state import RunState, load_current

WORLD = {"engine": ["rms_norm", "linear"], "batch": ["linear"], "phase": []}


class Page(HTMLParser):
    """Tags that are left open, outside addresses, scripts and the text."""

    VOID = ("meta", "br", "i/")

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.outside: list[str] = []
        self.words = ""
        self.cells: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append(tag)
        self.outside += [value for name, value in attrs if name in ("src", "href", "action") and value]
        self.outside += [tag] if tag in ("script", "link", "iframe") else []
        if tag == "i" and dict(attrs).get("class") in ("equal", "first", "later"):
            self.cells.append(dict(attrs)["class"])

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words += data


@pytest.fixture
def finished(workspace) -> RunState:
    states.begin(workspace, run="r1", checkpoint="none", device="cpu", policy="playbook", target=0.913)
    tools = FakeTools(WORLD, useless=("linear=exact",))
    return Run(workspace, load_current(workspace), Playbook(), tools, SilentObserver(), minutes=5, attempts=9).go()


def test_page_is_whole_and_fetches_nothing(finished):
    page = Page(report.render(finished))
    assert page.open == [] and page.outside == []
    assert not re.search(r"url\(|@import|https?://", report.render(finished))


def test_page_shows_what_the_run_knows(finished):
    words = Page(report.render(finished)).words
    for attempt in finished.attempts:
        assert attempt.reason in words and attempt.branch in words
    assert "128 → " in words and "not exact" in words and "reduction order" in words and "0.970" in words
    assert all(step in words for step in finished.steps)


def test_cells_tell_first_from_consequence(workspace):
    states.begin(workspace, run="r1", checkpoint="none", device="cpu", policy="playbook", target=0.913)
    state = Run(workspace, load_current(workspace), Playbook(), FakeTools({"engine": ["embedding", "rms_norm", "linear"]}), SilentObserver(),
                minutes=5, attempts=0)
    with pytest.raises(Exception, match="attempts"):
        state.go()
    # `embedding` differs first; what follows differs as a consequence.
    assert Page(report.render(load_current(workspace))).cells == ["first", "later", "later"]
    state = Run(workspace, load_current(workspace), Playbook(), FakeTools({"engine": ["embedding", "rms_norm", "linear"]}), SilentObserver(),
                minutes=5, attempts=9).go()
    assert Page(report.render(state)).cells == ["first", "later", "later", "equal", "equal", "equal"]


def test_candidate_text_is_escaped(finished):
    finished.attempts[0].reason = "<script>alert(1)</script>"
    finished.steps.append("<img src=x onerror=alert(1)>")
    page = Page(report.render(finished))
    assert page.outside == [] and "<script>alert(1)</script>" in page.words


def test_an_unfinished_run_has_a_page(workspace):
    states.begin(workspace, run="r1", checkpoint="none", device="cpu", policy="playbook", target=0.913)
    words = Page(report.render(load_current(workspace))).words
    assert "not finished" in words and "None." in words
