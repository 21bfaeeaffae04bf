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


def _recurrent(x, dt, A, B, C, D, dt_bias, table, initial=None):
    """What `scan_with_state` promises, token by token in fp64: y, the state at each sequence's last full chunk, cs by chunk."""
    ratio, chunk = x.shape[1] // B.shape[1], decode.CHUNK
    y, states = torch.zeros(x.shape, dtype=torch.float64), []
    cs = torch.zeros(len(table.starts), x.shape[1], chunk, dtype=torch.float64)
    for sequence in range(len(table.sequences) - 1):
        state = initial[sequence].double() if initial is not None else torch.zeros(x.shape[1], x.shape[2], B.shape[2], dtype=torch.float64)
        boundary = state
        for c in range(int(table.sequences[sequence]), int(table.sequences[sequence + 1])):
            total = torch.zeros(x.shape[1], dtype=torch.float64)
            for place in range(int(table.lengths[c])):
                t = int(table.starts[c]) + place
                step = torch.nn.functional.softplus(dt[t].double() + dt_bias)
                total = total + step * A
                cs[c, :, place] = total
                b, c_row = (part[t].double().repeat_interleave(ratio, 0)[:, None] for part in (B, C))
                state = state * (step * A).exp()[:, None, None] + (step[:, None] * x[t].double())[..., None] * b
                y[t] = (state * c_row).sum(-1) + x[t].double() * D[:, None]
            if int(table.lengths[c]) == chunk:
                boundary = state
        states.append(boundary)
    return y, torch.stack(states).float(), cs.float()


@pytest.mark.parametrize("sizes", [[300], [50] * 6, [7, 121, 64, 1, 1, 106], [128, 128, 44], [1] * 3 + [297]])
def test_prefill_in_any_chunks_gives_the_rows_of_one_scan(monkeypatch, sizes):
    """Row maps, and what is kept between steps: a second sequence of other lengths runs beside the first, in slots that held something else."""
    monkeypatch.setattr(decode, "scan_with_state", _recurrent)
    generator = torch.Generator().manual_seed(3)

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    lengths, slots = [300, 180], torch.tensor([3, 1])
    A, D, bias = -draw(2).abs(), draw(2), draw(2) - 2
    tokens = [(draw(n, 2, 4), draw(n, 2), draw(n, 1, 8), draw(n, 1, 8)) for n in lengths]
    whole = [_recurrent(x, dt, A, B, C, D, bias, decode.ChunkTable.build([len(x)], "cpu")) for x, dt, B, C in tokens]
    cache = decode.Mamba2Cache.allocate(5, 2, 1, 4, 8, "cpu", torch.float32)
    for tensor in (cache.x, cache.B, cache.dt, cache.cs):
        tensor.fill_(7)
    cache.store(torch.arange(5), torch.full((5, 2, 4, 8), 9.0))
    done, rows = [0, 0], [[], []]
    for size in sizes:
        live = [i for i in range(2) if done[i] < lengths[i]]
        counts = [min(size, lengths[i] - done[i]) for i in live]
        parts = [torch.cat([tokens[i][j][done[i]:done[i] + n] for i, n in zip(live, counts, strict=True)]) for j in range(4)]
        table = decode.PrefillTable.build(counts, [done[i] for i in live], "cpu")
        y = decode.mamba2_prefill(parts[0], parts[1], A, parts[2], parts[3], D, bias, table, slots[live], cache)
        for i, part, n in zip(live, y.split(counts), counts, strict=True):
            rows[i].append(part)
            done[i] += n
    for i in range(2):
        assert torch.allclose(torch.cat(rows[i]), whole[i][0], rtol=1e-4, atol=1e-5)
        assert torch.allclose(cache.state(slots[i:i + 1])[0], whole[i][1][0], rtol=1e-4, atol=1e-5)
        last = lengths[i] // decode.CHUNK * decode.CHUNK
        open_rows = lengths[i] - last
        assert torch.equal(cache.x[slots[i], :, :open_rows], tokens[i][0][last:].transpose(0, 1))
        assert torch.allclose(cache.cs[slots[i], :, :open_rows], whole[i][2][-1, :, :open_rows], rtol=1e-4, atol=1e-5)
    assert (cache.x[[0, 2, 4]] == 7).all()
