"""localize against every fault of the table: operator and dimension of at least 95 %, and never 'all equal'."""

import pytest

from tests.faults.run import run
from tests.faults.table import FAULTS

LEAST_RIGHT = 0.95


@pytest.fixture(scope="session")
def outcomes():
    return list(run())


@pytest.mark.engine
def test_no_fault_is_called_exact(outcomes):
    assert [o.fault for o in outcomes if o.found is None] == []


@pytest.mark.engine
def test_operator_dimension_and_side_are_named(outcomes):
    wrong = [f"{o.fault}: expected {o.expected[:2]} on {o.side}, found {o.found} at {o.site} on {o.deviating}" for o in outcomes if not o.right]
    assert len(outcomes) == len(FAULTS)
    assert len(wrong) <= (1 - LEAST_RIGHT) * len(outcomes), "\n".join(wrong)


@pytest.mark.engine
def test_the_cause_is_named(outcomes):
    wrong = [f"{o.fault}: expected {o.expected[2]}, found {o.found} ({o.detail})" for o in outcomes if not o.cause_right]
    assert len(wrong) <= (1 - LEAST_RIGHT) * len(outcomes), "\n".join(wrong)


def test_faults_that_look_alike_differ_in_the_answer():
    """The table is a test of diagnosis only if one symptom has several causes and one cause several places."""
    assert len(FAULTS) >= 20
    assert len({f.name for f in FAULTS}) == len(FAULTS)
    for dimension in ("determinism", "batch", "phase", "engine"):
        answers = {(f.operator, f.cause) for f in FAULTS if f.dimension == dimension}
        assert len(answers) >= 2, dimension
    assert {f.side for f in FAULTS} == {"rollout", "training"}
