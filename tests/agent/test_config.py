from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.config import Budget, Config, Target
from agent.errors import UserError

text = st.text(st.characters(blacklist_categories=["Cs"]), min_size=1)


@settings(deadline=None)  # it writes files, on machines that may be busy
@given(model=text, scale=text, weights=st.none() | text, minutes=st.floats(0, 1e6), attempts=st.integers(0, 10**6))
def test_written_file_reads_back_equal(tmp_path_factory, model, scale, weights, minutes, attempts):
    config = Config(model=model, scale=scale, weights=weights, budget=Budget(minutes=minutes, attempts=attempts), target=Target(throughput=0.5))
    path = tmp_path_factory.mktemp("config") / "consistency.toml"
    path.write_text(config.dumps(), encoding="utf-8")
    assert Config.load(path) == config


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('model = "qwen3"\nscale = "tiny"\n[target]\nthroughput = "fast"\n', "target.throughput"),
        ('model = "qwen3"\nscale = "tiny"\nmodle = 1\n', "modle"),
        ('scale = "tiny"\n', "model"),
        ("model = \n", "not valid TOML"),
        ('model = "qwen3"\nscale = "tiny"\n[budget]\nattempts = -1\n', "found -1"),
    ],
)
def test_a_bad_file_is_named_with_its_field(tmp_path: Path, content, said):
    path = tmp_path / "consistency.toml"
    path.write_text(content)
    with pytest.raises(UserError) as error:
        Config.load(path)
    assert said in str(error.value) and str(path) in str(error.value) and "\n" not in str(error.value)


def test_a_missing_file_says_how_to_make_one(tmp_path: Path):
    with pytest.raises(UserError, match="agent run"):
        Config.load(tmp_path / "consistency.toml")
