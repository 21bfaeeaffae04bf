"""The decode cache keeps an fp32 state in two halves of 16 bits; nothing may be lost, and the upper half must be the scan's rounding."""

import pytest
import torch

decode = pytest.importorskip("consistency.operators.cuda.mamba2_decode", reason="needs Triton to import")

HEADS, DIM, STATE = 2, 4, 8


@pytest.fixture
def cache():
    pages = torch.zeros(6, HEADS * DIM * STATE + 32)[:, :HEADS * DIM * STATE].view(6, HEADS, DIM, STATE)  # strided, as an engine hands it over
    return decode.Mamba2Cache.over(pages, *(torch.zeros(6, 1) for _ in range(4)))


def _states(bits: torch.Tensor) -> torch.Tensor:
    return bits.to(torch.int32).view(torch.float32).view(-1, HEADS, DIM, STATE)


def test_every_lower_half_comes_back(cache):
    """Both signs, odd and even upper halves, all lower halves next to a border of the rounding."""
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF, 0x1234])
    upper = torch.tensor([0x3F80, 0x3F81, 0x0000, 0x0001, 0x7F7E, 0x4000, 0x00FF, 0x3FFF])
    bits = ((upper[:, None] << 16) | lower).flatten().repeat(2)
    bits[64:] -= 1 << 31  # the sign
    state = _states(bits)
    slots = torch.tensor([4, 1])
    cache.store(slots, state)
    assert torch.equal(cache.state(slots).view(torch.int32), state.view(torch.int32))
    assert not cache.high[0].any() and not cache.low[5].any()


def test_upper_half_is_the_nearest_and_a_tie_goes_away_from_zero(cache):
    state = torch.randn(3, HEADS, DIM, STATE, generator=torch.Generator().manual_seed(1))
    slots = torch.tensor([0, 2, 5])
    cache.store(slots, state)
    assert torch.equal(cache.high[slots], state.bfloat16())
    ties = _states(torch.tensor([0x3F808000, 0x3F818000, 0x3F808000 - (1 << 31), 0x3F818000 - (1 << 31)]).repeat(16))
    cache.store(slots[:1], ties)
    assert cache.high[0].flatten()[:4].tolist() == [1.0078125, 1.015625, -1.0078125, -1.015625]
