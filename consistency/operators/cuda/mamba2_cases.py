"""The Mamba2 scan and its decode step at true shapes, described for the survey, the benchmark and the tests."""

import functools

import torch

from consistency.operators.cuda import mamba2_decode as decode_step
from consistency.operators.cuda import mamba2_scan as scan
from consistency.operators.cuda.case import Case, Inputs, check_gradients, equal_elements, normal, with_settings
from consistency.operators.cuda.mamba2_decode import Mamba2Cache, PrefillTable, mamba2_decode, mamba2_prefill
from consistency.operators.cuda.mamba2_scan import CHUNK, ChunkTable, mamba2_scan, mamba2_scan_op, mamba2_scan_reference, scan_with_state

HEADS, GROUPS, P, N = 64, 8, 64, 128


def parameters(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A, D and dt_bias as a trained mixer has them: A in -16..-1, dt between 1e-3 and 1e-1 at zero input."""
    def uniform(low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand(HEADS, generator=generator, device=generator.device)

    step = torch.exp(uniform(-6.9, -2.3))
    return -uniform(1, 16), uniform(0.5, 1.5), step + torch.log(-torch.expm1(-step))


def draw_tokens(rows: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    return (normal((rows, HEADS, P), generator), normal((rows, HEADS), generator), normal((rows, GROUPS, N), generator, 0.5),
            normal((rows, GROUPS, N), generator, 0.5))


def _stock_scan(x, dt, B, C, A, D, dt_bias):
    from vllm.model_executor.layers.mamba.ops.ssd_combined import mamba_chunk_scan_combined_varlen

    tokens, out = x.shape[0], torch.empty_like(x)
    chunk_ends = torch.cat((torch.arange(0, tokens, CHUNK, device=x.device), torch.full((1,), tokens, device=x.device))).int()
    chunks = chunk_ends.shape[0] - 1
    mamba_chunk_scan_combined_varlen(
        x, dt, A, B, C, chunk_size=CHUNK, cu_seqlens=chunk_ends[:: chunks], cu_chunk_seqlens=chunk_ends,
        last_chunk_indices=torch.full((1,), chunks - 1, dtype=torch.int32, device=x.device),
        seq_idx=torch.zeros(chunks, dtype=torch.int32, device=x.device), out=out, D=D, dt_bias=dt_bias, dt_softplus=True, state_dtype=torch.float32)
    return out


@functools.lru_cache
def _table(tokens: int, device: torch.device) -> ChunkTable:
    return ChunkTable.build([tokens], device)


def _prefill_case() -> Case:
    def inputs(rows: int, generator: torch.Generator) -> Inputs:
        return Inputs(draw_tokens(rows, generator), parameters(generator))

    def exact(x, dt, B, C, A, D, dt_bias):
        return mamba2_scan(x, dt, A, B, C, D, dt_bias, _table(x.shape[0], x.device))

    def reference(x, dt, B, C, A, D, dt_bias):
        table = _table(x.shape[0], x.device)
        return mamba2_scan_reference(x.double(), dt, A, B, C, D, dt_bias, table.starts, table.lengths, table.sequences)

    def configured(settings: dict):
        return functools.partial(with_settings, scan.CHUNK_SCAN, settings, exact)

    def gradients():
        generator = torch.Generator("cuda").manual_seed(5)
        x, dt, B, C, A, D, dt_bias = inputs(300, generator).take(300)
        table = ChunkTable.build([1, 129, 170], "cuda")
        constants = (table.starts, table.lengths, table.sequences)
        names = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D, "dt_bias": dt_bias}
        return check_gradients(mamba2_scan_op, mamba2_scan_reference, names, constants)

    settings = {f"scan {m}x{p}x{k}, {w} warps, {s} stages": {"BLOCK_M": m, "BLOCK_P": p, "BLOCK_K": k, "num_warps": w, "num_stages": s}
                for m, p, k, w, s in ((32, 32, 32, 2, 4), (32, 64, 64, 4, 2), (64, 64, 32, 4, 1), (128, 64, 32, 4, 1), (64, 64, 64, 8, 1))}
    return Case("mamba2_scan", "prefill 64x64, 8 groups, state 128", ("nemotron-3.5",), inputs, exact, reference, _stock_scan,
                configurations={name: configured(s) for name, s in settings.items()}, phases=phases, gradients=gradients, causal=True, decode=())


def phases() -> dict[str, tuple[int, int]]:
    """Decode, chunked prefill and packed prefill against one scan from the first token: outputs, and the state at the end."""
    generator = torch.Generator("cuda").manual_seed(6)
    lengths = [300, 129, 384]
    A, D, dt_bias = parameters(generator)
    tokens = [draw_tokens(length, generator) for length in lengths]
    full = [scan_with_state(x, dt, A, B, C, D, dt_bias, ChunkTable.build([x.shape[0]], "cuda")) for x, dt, B, C in tokens]
    x, dt, B, C = (torch.cat(part) for part in zip(*tokens, strict=True))
    packed = scan_with_state(x, dt, A, B, C, D, dt_bias, ChunkTable.build(lengths, "cuda"))
    found = {"packed": equal_elements(packed[0], torch.cat([f[0] for f in full]))}
    slots = torch.tensor([4, 1, 3], device="cuda")

    def run(sizes: list[int], name: str) -> None:
        cache = Mamba2Cache.allocate(5, HEADS, GROUPS, P, N, "cuda")
        for tensor in cache.tensors():
            tensor.fill_(7)  # remains of another request
        outputs, done = [[], [], []], [0, 0, 0]
        for size in sizes:
            batch = [i for i in range(3) if done[i] < lengths[i]]
            counts = [min(size, lengths[i] - done[i]) for i in batch]
            parts = [torch.cat([tokens[i][j][done[i] : done[i] + c] for i, c in zip(batch, counts, strict=True)]) for j in range(4)]
            table = PrefillTable.build(counts, [done[i] for i in batch], "cuda")
            y = mamba2_prefill(parts[0], parts[1], A, parts[2], parts[3], D, dt_bias, table, slots[batch], cache)
            for i, part in zip(batch, y.split(counts), strict=True):
                outputs[i].append(part)
                done[i] += part.shape[0]
        for _ in range(max(lengths)):
            batch = [i for i in range(3) if done[i] < lengths[i]]
            if not batch:
                break
            # one row of padding between requests, as a captured graph has it
            padded = [batch[0], batch[0], *batch[1:]]
            x, dt, B, C = (torch.stack([tokens[i][j][done[i]] for i in padded]) for j in range(4))
            index = slots[padded].clone()
            index[1] = 0
            reached = torch.tensor([done[i] + 1 for i in padded], device="cuda")
            y = mamba2_decode(x, dt, A, B, C, D, dt_bias, reached, index, *cache.tensors(), 0)
            for i, part in zip(batch, torch.cat((y[:1], y[2:])), strict=True):
                outputs[i].append(part[None])
                done[i] += 1
        found[name] = equal_elements(torch.cat([torch.cat(o) for o in outputs]), packed[0])
        # a sequence that ends on a border has just been folded
        found[f"{name}, state"] = equal_elements(cache.state(slots), packed[1])

    run([], "decode from token 0")
    run([1], "decode from token 1")
    run([100], "decode from token 100")
    run([128], "decode from token 128")
    run([50] * 8, "chunked prefill of 50")
    run([7, 121, 64, 1, 1, 200], "chunks of 7, 121, 64, 1, 1, 200, then decode")
    try:
        stock = torch.cat([_stock_scan(x, dt, B, C, A, D, dt_bias) for x, dt, B, C in tokens])
        found["engine scan with its own cumulative sum"] = equal_elements(stock, packed[0])
        # later chunks differ where a state lies half way between two bf16 numbers
        first = torch.cat([torch.arange(length, device="cuda") < CHUNK for length in lengths])
        found["engine scan with this cumulative sum, first chunks"] = equal_elements(_engine_scan(tokens, A, D, dt_bias)[first], packed[0][first])
    except ImportError:
        pass
    return found


def _engine_scan(tokens: list[tuple[torch.Tensor, ...]], A: torch.Tensor, D: torch.Tensor, dt_bias: torch.Tensor) -> torch.Tensor:
    from vllm.model_executor.layers.mamba.ops import ssd_combined

    def ordered(dt, A, chunk_size, cu_chunk_seqlens, dt_bias=None, **_):
        table = _table(dt.shape[0], dt.device)
        step, cs = scan.cumulative_sums(dt, A, dt_bias, table)
        return cs.transpose(0, 1), step.transpose(0, 1)

    before = ssd_combined._chunk_cumsum_fwd
    ssd_combined._chunk_cumsum_fwd = ordered
    try:
        return torch.cat([_stock_scan(x, dt, B, C, A, D, dt_bias) for x, dt, B, C in tokens])
    finally:
        ssd_combined._chunk_cumsum_fwd = before


def _decode_case() -> Case:
    def inputs(rows: int, generator: torch.Generator) -> Inputs:
        cache = Mamba2Cache.allocate(rows + 1, HEADS, GROUPS, P, N, generator.device)
        for tensor, scale in ((cache.high, 1.0), (cache.x, 1.0), (cache.B, 0.5), (cache.dt, 1.0)):
            for part in tensor:
                part.copy_(normal(tuple(part.shape), generator, scale))
        # a chunk that is not the first, every place in it but the last: a fold would change the state between two calls
        reached = torch.randint(CHUNK + 1, 8193, (rows,), generator=generator, device=generator.device)
        reached -= (reached % CHUNK == 0).to(reached.dtype)
        slots = 1 + torch.randperm(rows, generator=generator, device=generator.device, dtype=torch.int32)
        A, D, dt_bias = parameters(generator)
        cache.cs.copy_(torch.cumsum(torch.nn.functional.softplus(cache.dt.float() + dt_bias[:, None]) * A[:, None], -1))
        # the last one is the state of a recurrent update, for stock
        return Inputs((*draw_tokens(rows, generator), reached, slots), (A, D, dt_bias, *cache.tensors(), cache.state(torch.arange(rows + 1))))

    def exact(x, dt, B, C, reached, slots, A, D, dt_bias, *cache):
        return mamba2_decode(x, dt, A, B, C, D, dt_bias, reached, slots, *cache[:-1], 0)

    def reference(x, dt, B, C, reached, slots, A, D, dt_bias, high, low, x_buffer, B_buffer, dt_buffer, cs_buffer, _):
        slots, place, ratio = slots.long(), ((reached - 1) % CHUNK).long(), HEADS // GROUPS
        rows = torch.arange(len(slots), device=x.device)
        xs, bs, raw = (t[slots].double() for t in (x_buffer, B_buffer, dt_buffer))
        xs[rows, :, place], bs[rows, :, place], raw[rows, :, place] = x.double(), B.double(), dt.double()
        live = torch.arange(CHUNK, device=x.device) <= place[:, None]
        step = torch.nn.functional.softplus(raw + dt_bias.double()[:, None]) * live[:, None]
        total = torch.cumsum(step * A.double()[:, None], -1)
        now = total[rows, :, place][..., None]
        cb = torch.einsum("rgn,rgkn->rgk", C.double(), bs).repeat_interleave(ratio, 1)
        y = torch.einsum("rhk,rhkp->rhp", torch.where(live[:, None], cb * (now - total).clamp_max(0).exp() * step, 0.0), xs)
        y += torch.einsum("rhn,rhpn->rhp", C.double().repeat_interleave(ratio, 1), high[slots].double()) * now.exp()
        return y + x.double() * D.double()[:, None]

    def stock_timed(x, dt, B, C, reached, slots, A, D, dt_bias, *cache):
        from vllm.model_executor.layers.mamba.ops.mamba_ssm import selective_state_update

        def expand(t, *shape):
            return t.view(*t.shape, *(1,) * len(shape)).expand(*t.shape, *shape)

        out = torch.empty_like(x)
        selective_state_update(cache[-1], x, expand(dt, P), expand(A, P, N), B, C, expand(D, P), expand(dt_bias, P), dt_softplus=True,
                               state_batch_indices=slots, dst_state_batch_indices=slots, out=out)
        return out

    def configured(block: int, warps: int):
        def call(*args):
            return with_settings(decode_step.DECODE_ROW, {"BLOCK_K": block, "num_warps": warps}, exact, *args)

        return call

    configurations = {f"block {b}, {w} warps": configured(b, w) for b, w in ((16, 4), (32, 2), (64, 4), (128, 4), (64, 8))}
    return Case("mamba2_scan", "decode", ("nemotron-3.5",), inputs, exact, reference, None, stock_timed, configurations=configurations, prefill=())


CASES = [_prefill_case(), _decode_case()]
