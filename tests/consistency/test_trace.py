import torch
from hypothesis import given
from hypothesis import strategies as st

from consistency.layout import Layout
from consistency.trace import ABSENT, Recorder, Site, fingerprint

SITE = Site("000.linear", 0, "linear", "qkv_proj")


@given(st.integers(0, 63), st.integers(1, 3))
def test_one_ulp_in_one_element_changes_the_fingerprint(column, ulps):
    rows = torch.randn(4, 64).bfloat16()
    moved = rows.clone()
    moved.view(torch.int16)[2, column] += ulps
    same = fingerprint(rows) == fingerprint(moved)
    assert same.tolist() == [True, True, False, True]


def test_swapped_columns_and_signed_zero_are_seen():
    rows = torch.tensor([[1.0, 2.0, 0.0]])
    assert fingerprint(rows) != fingerprint(rows[:, [1, 0, 2]])
    assert fingerprint(rows) != fingerprint(torch.tensor([[1.0, 2.0, -0.0]]))


def test_fingerprint_does_not_depend_on_batch_or_strides():
    rows = torch.randn(7, 48)
    assert torch.equal(fingerprint(rows)[3:4], fingerprint(rows[3:4].clone()))
    assert torch.equal(fingerprint(rows), fingerprint(rows.t().contiguous().t()))


def test_recorder_places_rows_by_request_and_position():
    recorder = Recorder([3, 2], dump=["000.linear"])
    recorder.begin(torch.tensor([1, 0, -1]), torch.tensor([1, 0, 5]))
    rows = torch.arange(6.0).view(3, 2)
    recorder.record(SITE, rows)
    arrays = recorder.arrays()
    assert arrays["row_request"].tolist() == [0, 0, 0, 1, 1] and arrays["row_position"].tolist() == [0, 1, 2, 0, 1]
    prints = arrays["fp/000.linear"]
    assert prints[0] == fingerprint(rows)[1] and prints[4] == fingerprint(rows)[0]
    assert (prints[1:4] == ABSENT).all()
    assert arrays["dump/000.linear"][4].tolist() == [0.0, 1.0]


def test_recorder_part_of_a_step_and_rows_past_the_request():
    recorder = Recorder([2])
    recorder.begin(torch.tensor([0, 0, 0]), torch.tensor([0, 1, 2]))
    recorder.record(SITE, torch.randn(2, 4), slice(1, None))
    assert (recorder.prints["000.linear"] == ABSENT).tolist() == [True, False]


def test_layout_padded_and_packed_hold_the_same_sequences():
    lengths = [3, 1, 4]
    padded, packed = Layout.padded(lengths), Layout.packed(lengths)
    assert padded.rows == 12 and packed.rows == 8
    assert [b - a for a, b in padded.spans()] == [b - a for a, b in packed.spans()] == lengths
    assert packed.positions().tolist() == [0, 1, 2, 0, 0, 1, 2, 3]
    rows = torch.randn(8, 2)
    assert torch.equal(packed.flatten(packed.pad(rows)), rows)
    rows = torch.randn(12, 2)
    assert torch.equal(padded.flatten(padded.pad(rows)), rows)
