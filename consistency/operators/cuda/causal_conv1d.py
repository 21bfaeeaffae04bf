"""Depthwise causal convolution of width 4 followed by SiLU: packed sequences for prefill and training, one step for decode.

Contract: bf16 in and out; acc = bias, then for taps from the oldest to the current one acc += bf16(x * w), in fp32; out =
bf16(acc / (1 + exp(-acc))). The product is rounded to bf16 because the engine's kernels multiply in bf16; so its prefill and its
decode kernel, which agree with each other, agree with this one too. No reduction crosses threads, tokens or sequences.
"""

import functools
from types import SimpleNamespace

import torch
import triton
import triton.language as tl

from consistency.layout import Layout
from consistency.operators.cuda.case import Case, Inputs, check_gradients, equal_elements, normal
from consistency.operators.cuda.checks import assert_rows, assert_vector
from consistency.operators.cuda.eager import eager

WIDTH = 4
BLOCK_T = 16
BLOCK_C = 128
UPDATE = {"BLOCK_C": 512, "num_warps": 4}


def sequence_starts(cu_seqlens: torch.Tensor, tokens: int) -> torch.Tensor:
    """int32 [tokens]: index of the first token of each token's sequence. No synchronisation."""
    where = torch.searchsorted(cu_seqlens, torch.arange(tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype), right=True) - 1
    return cu_seqlens[where].int()


def causal_conv1d_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Plain torch in the dtype of `x`, without the rounding of products."""
    tokens = torch.arange(x.shape[0], device=x.device)
    acc = bias.to(x.dtype).expand_as(x)
    for tap in range(WIDTH):
        back = WIDTH - 1 - tap
        shifted = torch.cat((x.new_zeros(min(back, len(x)), x.shape[1]), x[: max(0, len(x) - back)]))
        acc = acc + shifted * weight.to(x.dtype)[:, tap] * (tokens - back >= starts)[:, None]
    return torch.nn.functional.silu(acc)


@triton.jit
def _tap(x, w):
    return (x.to(tl.float32) * w.to(tl.float32)).to(tl.bfloat16).to(tl.float32)


@triton.jit
def _accumulate(x_ptr, weight_ptr, bias_ptr, starts_ptr, t, c, tokens, x_stride, live, WIDTH: tl.constexpr):
    start = tl.load(starts_ptr + t, mask=(t >= 0) & (t < tokens), other=0)
    acc = tl.load(bias_ptr + c).to(tl.float32)[None, :] + tl.zeros((t.shape[0], c.shape[0]), dtype=tl.float32)
    for tap in tl.static_range(WIDTH):
        source = t - (WIDTH - 1) + tap
        x = tl.load(x_ptr + source[:, None].to(tl.int64) * x_stride + c[None, :], mask=live[:, None] & (source >= start)[:, None], other=0.0)
        acc += _tap(x, tl.load(weight_ptr + c * WIDTH + tap)[None, :])
    return acc


@triton.jit
def _forward_kernel(x_ptr, weight_ptr, bias_ptr, starts_ptr, out_ptr, tokens, x_stride, channels,
                    WIDTH: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr):
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    acc = _accumulate(x_ptr, weight_ptr, bias_ptr, starts_ptr, t, c, tokens, x_stride, t < tokens, WIDTH)
    acc = acc / (1 + tl.exp(-acc))
    tl.store(out_ptr + t[:, None].to(tl.int64) * channels + c[None, :], acc.to(out_ptr.dtype.element_ty), mask=(t < tokens)[:, None])


@triton.jit
def _grad_kernel(x_ptr, weight_ptr, bias_ptr, starts_ptr, grad_ptr, grad_acc_ptr, partial_ptr, tokens, x_stride, channels,
                 WIDTH: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr):
    """Gradient of the accumulator, and this block's part of the gradients of the taps and of the bias."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    live = t < tokens
    acc = _accumulate(x_ptr, weight_ptr, bias_ptr, starts_ptr, t, c, tokens, x_stride, live, WIDTH)
    sigmoid = 1 / (1 + tl.exp(-acc))
    row = t[:, None].to(tl.int64) * channels + c[None, :]
    grad = tl.load(grad_ptr + row, mask=live[:, None], other=0.0).to(tl.float32) * (sigmoid + acc * sigmoid * (1 - sigmoid))
    tl.store(grad_acc_ptr + row, grad, mask=live[:, None])
    start = tl.load(starts_ptr + t, mask=live, other=0)
    base = partial_ptr + tl.program_id(0).to(tl.int64) * (WIDTH + 1) * channels + c
    for tap in tl.static_range(WIDTH):
        source = t - (WIDTH - 1) + tap
        x = tl.load(x_ptr + source[:, None].to(tl.int64) * x_stride + c[None, :], mask=live[:, None] & (source >= start)[:, None], other=0.0)
        tl.store(base + tap * channels, tl.sum(grad * x.to(tl.float32), axis=0))
    tl.store(base + WIDTH * channels, tl.sum(grad, axis=0))


@triton.jit
def _grad_input_kernel(weight_ptr, starts_ptr, grad_acc_ptr, grad_x_ptr, tokens, channels,
                       WIDTH: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr):
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    grad = tl.zeros((BLOCK_T, BLOCK_C), dtype=tl.float32)
    for tap in tl.static_range(WIDTH):
        sink = t + (WIDTH - 1) - tap
        # a later token reads this one only inside the same sequence
        live = (sink < tokens) & (tl.load(starts_ptr + sink, mask=sink < tokens, other=0) <= t)
        upstream = tl.load(grad_acc_ptr + sink[:, None].to(tl.int64) * channels + c[None, :], mask=live[:, None], other=0.0)
        grad += upstream * tl.load(weight_ptr + c * WIDTH + tap).to(tl.float32)[None, :]
    tl.store(grad_x_ptr + t[:, None].to(tl.int64) * channels + c[None, :], grad.to(grad_x_ptr.dtype.element_ty), mask=(t < tokens)[:, None])


@triton.jit
def _update_kernel(x_ptr, state_ptr, weight_ptr, bias_ptr, slots_ptr, out_ptr, x_stride, channels, null_slot,
                   stride_slot, stride_channel, stride_token, WIDTH: tl.constexpr, BLOCK_C: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot == null_slot:
        return
    live = c < channels
    state = state_ptr + slot * stride_slot + c * stride_channel
    oldest = tl.load(state, mask=live)
    older = tl.load(state + stride_token, mask=live)
    old = tl.load(state + 2 * stride_token, mask=live)
    current = tl.load(x_ptr + row * x_stride + c, mask=live)
    taps = weight_ptr + c * WIDTH
    acc = tl.load(bias_ptr + c, mask=live).to(tl.float32)
    acc += _tap(oldest, tl.load(taps, mask=live))
    acc += _tap(older, tl.load(taps + 1, mask=live))
    acc += _tap(old, tl.load(taps + 2, mask=live))
    acc += _tap(current, tl.load(taps + 3, mask=live))
    acc = acc / (1 + tl.exp(-acc))
    tl.store(out_ptr + row * channels + c, acc.to(out_ptr.dtype.element_ty), mask=live)
    tl.store(state, older, mask=live)
    tl.store(state + stride_token, old, mask=live)
    tl.store(state + 2 * stride_token, current, mask=live)


def _assert_weights(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> None:
    channels = x.shape[1]
    assert_rows(x, channels, torch.bfloat16)
    assert weight.shape == (channels, WIDTH) and weight.is_contiguous() and weight.dtype == torch.bfloat16
    assert_vector(bias, channels, torch.bfloat16, torch.float32)
    assert channels % BLOCK_C == 0, f"{channels} channels is not a multiple of {BLOCK_C}"


@torch.library.custom_op("consistency_cuda::causal_conv1d", mutates_args=())
def causal_conv1d(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Packed `x` [tokens, channels] (a slice of a wider tensor is fine), `weight` [channels, 4], `starts` from `sequence_starts`."""
    tokens, channels = x.shape
    _assert_weights(x, weight, bias)
    assert starts.shape == (tokens,) and starts.dtype == torch.int32
    out = torch.empty(tokens, channels, dtype=x.dtype, device=x.device)
    if tokens:
        _forward_kernel[(triton.cdiv(tokens, BLOCK_T), channels // BLOCK_C)](
            x, weight, bias, starts, out, tokens, x.stride(0), channels, WIDTH, BLOCK_T, BLOCK_C)
    return out


@causal_conv1d.register_fake
def _(x, weight, bias, starts):
    return x.new_empty(x.shape)


def _setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad):
    x, weight, bias, starts = ctx.saved_tensors
    tokens, channels = x.shape
    grid = (triton.cdiv(tokens, BLOCK_T), channels // BLOCK_C)
    grad_acc = torch.empty(tokens, channels, dtype=torch.float32, device=x.device)
    partial = torch.empty(grid[0], WIDTH + 1, channels, dtype=torch.float32, device=x.device)
    grad_x = torch.empty(tokens, channels, dtype=x.dtype, device=x.device)
    _grad_kernel[grid](x, weight, bias, starts, grad.contiguous(), grad_acc, partial, tokens, x.stride(0), channels, WIDTH, BLOCK_T, BLOCK_C)
    _grad_input_kernel[grid](weight, starts, grad_acc, grad_x, tokens, channels, WIDTH, BLOCK_T, BLOCK_C)
    sums = partial.sum(0)
    return grad_x, sums[:WIDTH].t().to(weight.dtype).contiguous(), sums[WIDTH].to(bias.dtype), None


causal_conv1d.register_autograd(_backward, setup_context=_setup)


@torch.library.custom_op("consistency_cuda::causal_conv1d_update", mutates_args=("state",))
def causal_conv1d_update(x: torch.Tensor, state: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, slots: torch.Tensor,
                         null_slot: int) -> torch.Tensor:
    """One token for each request: `x` [requests, channels], `state` [slots, channels, 3] in any stride, shifted by one in place.

    A request whose slot is `null_slot` is padding: it is skipped and its output is not written.
    """
    rows, channels = x.shape
    _assert_weights(x, weight, bias)
    assert state.shape[1:] == (channels, WIDTH - 1) and state.dtype == x.dtype
    assert slots.shape == (rows,) and not slots.is_floating_point()
    out = torch.empty(rows, channels, dtype=x.dtype, device=x.device)
    if rows:
        _update_kernel[(rows, triton.cdiv(channels, UPDATE["BLOCK_C"]))](
            x, state, weight, bias, slots, out, x.stride(0), channels, null_slot, *state.stride(), WIDTH, **UPDATE)
    return out


@causal_conv1d_update.register_fake
def _(x, state, weight, bias, slots, null_slot):
    return x.new_empty(x.shape)


def _weights(channels: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    return normal((channels, WIDTH), generator, 0.5), normal((channels,), generator, 0.5)


def _prefill_case(channels: int) -> Case:
    def inputs(rows: int, generator: torch.Generator) -> Inputs:
        starts = torch.zeros(rows, dtype=torch.int32, device=generator.device)
        return Inputs((normal((rows, channels), generator), starts), _weights(channels, generator))

    def exact(x, starts, weight, bias):
        return causal_conv1d(x, weight, bias, starts)

    def stock(x, starts, weight, bias):
        from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_fn

        tokens = x.shape[0]
        state = x.new_zeros(2, channels, WIDTH - 1)
        ends = torch.tensor([0, tokens], dtype=torch.int32, device=x.device)
        index, none = torch.ones(1, dtype=torch.int32, device=x.device), torch.zeros(1, dtype=torch.bool, device=x.device)
        return causal_conv1d_fn(x.t(), weight, bias, state, ends, index, none, "silu").t()

    @functools.lru_cache
    def stock_batch(tokens: int, device: torch.device):
        from vllm.v1.attention.backends.utils import compute_causal_conv1d_metadata

        nums, batch, offsets = compute_causal_conv1d_metadata(torch.tensor([0, tokens], dtype=torch.int32), device=device)
        return (torch.zeros(2, WIDTH - 1, channels, dtype=torch.bfloat16, device=device).transpose(1, 2),
                torch.tensor([0, tokens], dtype=torch.int32, device=device), torch.ones(1, dtype=torch.int32, device=device),
                torch.zeros(1, dtype=torch.bool, device=device), SimpleNamespace(nums_dict=nums, batch_ptr=batch, token_chunk_offset_ptr=offsets))

    def stock_timed(x, starts, weight, bias):
        from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_fn

        state, ends, index, none, metadata = stock_batch(x.shape[0], x.device)
        return causal_conv1d_fn(x.t(), weight, bias, state, ends, index, none, "silu", metadata=metadata).t()

    def reference(x, starts, weight, bias):
        return causal_conv1d_reference(x.double(), weight, bias, starts)

    def gradients():
        generator = torch.Generator("cuda").manual_seed(5)
        x, _, weight, bias = inputs(300, generator).take(300)
        starts = sequence_starts(torch.tensor([0, 1, 3, 130, 300], device="cuda"), 300)
        return check_gradients(causal_conv1d, causal_conv1d_reference, {"x": x, "weight": weight, "bias": bias}, (starts,))

    def phases():
        generator = torch.Generator("cuda").manual_seed(6)
        x, starts, weight, bias = inputs(200, generator).take(200)
        full = causal_conv1d(x, weight, bias, starts)
        state = x.new_zeros(3, channels, WIDTH - 1)
        slots = torch.tensor([2], device="cuda")
        steps = torch.cat([causal_conv1d_update(x[t : t + 1], state, weight, bias, slots, -1) for t in range(200)])
        packed_starts = sequence_starts(torch.tensor([0, 70, 200], device="cuda"), 200)
        packed = causal_conv1d(x, weight, bias, packed_starts)
        alone = causal_conv1d(x[70:].contiguous(), weight, bias, starts[:130])
        found = {"decode": equal_elements(steps, full), "packed against alone": equal_elements(packed[70:], alone)}
        try:
            from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update as stock_update

            found["engine prefill"] = equal_elements(stock(x, starts, weight, bias).contiguous(), full)
            state = x.new_zeros(3, channels, WIDTH - 1)
            index = torch.tensor([2], dtype=torch.int32, device="cuda")
            steps = [stock_update(x[t : t + 1].clone(), state, weight, bias, "silu", conv_state_indices=index) for t in range(200)]
            found["engine decode"] = equal_elements(torch.cat(steps), full)
        except ImportError:
            pass
        return found

    return Case("causal_conv1d", f"prefill {channels}", ("nemotron-3.5",), inputs, exact, reference, stock, stock_timed, phases=phases,
                gradients=gradients, causal=True, decode=())


def _decode_case(channels: int) -> Case:
    def inputs(rows: int, generator: torch.Generator) -> Inputs:
        slots = 1 + torch.randperm(rows, generator=generator, device=generator.device, dtype=torch.int32)
        return Inputs((normal((rows, channels), generator), slots),
                      # channels contiguous, as the engine's cache has them
                      (normal((rows + 1, WIDTH - 1, channels), generator).transpose(1, 2), *_weights(channels, generator)))

    def exact(x, slots, state, weight, bias):
        return causal_conv1d_update(x, state.clone(), weight, bias, slots, 0)

    def exact_timed(x, slots, state, weight, bias):
        return causal_conv1d_update(x, state, weight, bias, slots, 0)

    def stock_timed(x, slots, state, weight, bias):
        from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update as stock_update

        return stock_update(x, state, weight, bias, "silu", conv_state_indices=slots)

    def stock(x, slots, state, weight, bias):
        return stock_timed(x.clone(), slots, state.clone(), weight, bias)

    def reference(x, slots, state, weight, bias):
        window = torch.cat((state[slots.long()], x[:, :, None]), -1).double()
        return torch.nn.functional.silu((window * weight.double()).sum(-1) + bias.double())

    return Case("causal_conv1d", f"decode {channels}", ("nemotron-3.5",), inputs, exact, reference, stock, stock_timed, exact_timed, prefill=())


CASES = [_prefill_case(6144), _decode_case(6144)]


# ---- the contract's names ----------------------------------------------------------------------------------------------

exact_rollout = "exact"
"""On the rollout side the binding is a choice of kernels in the mixer, see engines/vllm_cuda.py."""
stock_rollout = None
_eager = eager(causal_conv1d, _setup, _backward)


def exact_training(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, layout: Layout) -> torch.Tensor:
    """x [T, C], weight [C, 4], bias [C] -> [T, C]; padding rows are zero. Differentiable."""
    x = layout.pack(x)
    starts = layout.kept("starts", x.device, lambda: sequence_starts(layout.cu_seqlens(x.device), x.shape[0]))
    return layout.unpack(_eager(x, weight, bias, starts))
