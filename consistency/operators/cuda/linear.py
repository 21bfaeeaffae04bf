"""Linear layer y = x W^T without bias, and the same product with an fp32 result.

Contract: bf16 operands, one fp32 accumulator chained over ascending K in groups of 16, one rounding at the end. On Hopper the tile, the
warps and the instruction do not change these bits; a split of K does. So cuBLASLt keeps its choice by M, but its heuristic may
only offer algorithms that need no reduction between splits and no workspace.

The heuristic is asked once for each (rows, N, K) and its first answer is kept, or the fastest of its answers where `tune` has measured them:
the choice is free, since it cannot change bits. Environment variables (a starved workspace) lead torch itself to the same bits; with
torch 2.11 each such eager call repeats the search on the host.
"""

import ctypes
import functools
import itertools
import pathlib
import statistics

import torch
import triton
import triton.language as tl

from consistency.operators.cuda.case import Case, Inputs, check_gradients, normal
from consistency.operators.cuda.checks import assert_rows

_COMPUTE_32F = 68
_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
_DESC_TRANSA = 3
_PREFERENCE_WORKSPACE, _PREFERENCE_REDUCTION, _PREFERENCE_ALIGN_A = 1, 3, 5
_ALGORITHM_SPLIT_K = 2
CANDIDATES = 12
"""Answers asked of the heuristic."""
COLD_BYTES = 192 << 20
TUNE_CALLS = 36
TUNE_REPEATS = 7


class _Heuristic(ctypes.Structure):
    _fields_ = [("algorithm", ctypes.c_uint64 * 8), ("workspace", ctypes.c_size_t), ("state", ctypes.c_int),
                ("waves", ctypes.c_float), ("reserved", ctypes.c_int * 4)]


class CublasLtError(RuntimeError):
    """cuBLASLt has no algorithm without split-K for a shape, or a call failed."""


@functools.cache
def _library() -> ctypes.CDLL:
    torch.cuda.init()
    torch.cuda.current_blas_handle()  # loads the cuBLASLt that torch itself uses
    paths = sorted({line.split()[-1] for line in pathlib.Path("/proc/self/maps").read_text().splitlines() if "libcublasLt.so" in line})
    if not paths:
        raise CublasLtError("torch did not load libcublasLt; is this a CUDA build of torch?")
    library = ctypes.CDLL(paths[0])
    pointer = ctypes.c_void_p
    library.cublasLtMatmul.argtypes = [pointer] * 14 + [ctypes.c_size_t, pointer]
    return library


def _check(status: int, call: str) -> None:
    if status:
        raise CublasLtError(f"{call} returned status {status}")


def _create(function: str, *arguments) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    _check(getattr(_library(), function)(ctypes.byref(handle), *arguments), function)
    return handle


def _set(function: str, target: ctypes.c_void_p, attribute: int, value) -> None:
    _check(getattr(_library(), function)(target, attribute, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value))), function)


def _layout(dtype: torch.dtype, rows: int, columns: int, stride: int) -> ctypes.c_void_p:
    return _create("cublasLtMatrixLayoutCreate", _TYPES[dtype], ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(stride))


@functools.cache
def _handle(device: int) -> ctypes.c_void_p:
    with torch.cuda.device(device):
        return _create("cublasLtCreate")


class _Plan:
    """One product: descriptors and the algorithms that may serve it, created once and then only called."""

    def __init__(self, device: int, rows: int, n: int, k: int, row_stride: int, dtype: torch.dtype, out_dtype: torch.dtype) -> None:
        library, handle = _library(), _handle(device)
        description = _create("cublasLtMatmulDescCreate", _COMPUTE_32F, _TYPES[torch.float32])
        _set("cublasLtMatmulDescSetAttribute", description, _DESC_TRANSA, ctypes.c_int32(1))
        # column-major view of row-major data: y^T [n, rows] = W [n, k] x^T [k, rows]
        weight, x, out = _layout(dtype, k, n, k), _layout(dtype, k, rows, row_stride), _layout(out_dtype, n, rows, n)
        preference = _create("cublasLtMatmulPreferenceCreate")
        _set("cublasLtMatmulPreferenceSetAttribute", preference, _PREFERENCE_WORKSPACE, ctypes.c_uint64(0))
        _set("cublasLtMatmulPreferenceSetAttribute", preference, _PREFERENCE_REDUCTION, ctypes.c_uint32(0))
        for operand in range(4):
            _set("cublasLtMatmulPreferenceSetAttribute", preference, _PREFERENCE_ALIGN_A + operand, ctypes.c_uint32(16))
        results, found = (_Heuristic * CANDIDATES)(), ctypes.c_int()
        _check(library.cublasLtMatmulAlgoGetHeuristic(
            handle, description, weight, x, out, out, preference, CANDIDATES, results, ctypes.byref(found)), "cublasLtMatmulAlgoGetHeuristic")
        library.cublasLtMatmulPreferenceDestroy(preference)
        self.algorithms = [r for r in results[: found.value] if not r.state and not r.workspace and _split_k(r) <= 1]
        if not self.algorithms:
            raise CublasLtError(f"no algorithm without split-K for M {rows}, N {n}, K {k}, {dtype} -> {out_dtype}")
        self._scalars = ctypes.c_float(1.0), ctypes.c_float(0.0)
        alpha, beta = (ctypes.addressof(v) for v in self._scalars)
        self._matmul = library.cublasLtMatmul
        self._before = handle.value, description.value, alpha
        self._between = weight.value, x.value, beta, out.value
        self.choose(0)

    def choose(self, candidate: int) -> None:
        """Use this algorithm from now on."""
        self._algorithm = ctypes.addressof(self.algorithms[candidate].algorithm)

    def __call__(self, weight: int, x: int, out: int, stream: int) -> None:
        weight_layout, x_layout, beta, out_layout = self._between
        status = self._matmul(*self._before, weight, weight_layout, x, x_layout, beta, out, out_layout, out, out_layout,
                              self._algorithm, None, 0, stream)
        if status:
            _check(status, "cublasLtMatmul")


def _split_k(result: _Heuristic) -> int:
    value, written = ctypes.c_int32(), ctypes.c_size_t()
    _check(_library().cublasLtMatmulAlgoConfigGetAttribute(
        ctypes.byref(result.algorithm), _ALGORITHM_SPLIT_K, ctypes.byref(value), ctypes.c_size_t(4), ctypes.byref(written)),
        "cublasLtMatmulAlgoConfigGetAttribute")
    return value.value


@functools.lru_cache(maxsize=16384)
def _plan(*key) -> _Plan:
    return _Plan(*key)


def plan_for(x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype) -> _Plan:
    """The kept plan of this product."""
    return _plan(x.device.index, x.shape[0], weight.shape[0], x.shape[1], x.stride(0), x.dtype, out_dtype)


def _launch(x: torch.Tensor, weight: torch.Tensor, fp32_out: bool) -> torch.Tensor:
    (rows, k), n = x.shape, weight.shape[0]
    assert_rows(x, k, torch.bfloat16, torch.float16)
    assert_rows(weight, k, x.dtype)
    assert weight.is_contiguous()
    out = torch.empty(rows, n, dtype=torch.float32 if fp32_out else x.dtype, device=x.device)
    if rows:
        plan_for(x, weight, out.dtype)(weight.data_ptr(), x.data_ptr(), out.data_ptr(), torch.cuda.current_stream(x.device).cuda_stream)
    return out


def tune(x: torch.Tensor, weight: torch.Tensor, fp32_out: bool = False) -> int:
    """Measure the algorithms that may serve this product and keep the fastest. Returns its place in the heuristic's order.

    To be called before graphs are captured, once for each weight shape and number of rows.
    """
    out = torch.empty(x.shape[0], weight.shape[0], dtype=torch.float32 if fp32_out else x.dtype, device=x.device)
    plan = plan_for(x, weight, out.dtype)
    # weights come from memory in a model, not from the cache of the call before
    weights = [weight] + [weight.clone() for _ in range(min(8, COLD_BYTES // (weight.numel() * weight.element_size())))]
    times = []
    for candidate in range(len(plan.algorithms)):
        plan.choose(candidate)
        # in a graph, as the engine runs it: launched one by one, small products measure the host
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in range(TUNE_CALLS):
                plan(weights[call % len(weights)].data_ptr(), x.data_ptr(), out.data_ptr(), torch.cuda.current_stream(x.device).cuda_stream)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(TUNE_REPEATS + 1)]
        graph.replay()
        for index, event in enumerate(events):
            event.record()
            if index < TUNE_REPEATS:
                graph.replay()
        torch.cuda.synchronize(x.device)
        times.append(statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events)))
    # the heuristic's own order decides unless the gain is clear
    best = min(range(len(times)), key=times.__getitem__)
    chosen = best if times[best] < 0.97 * times[0] else 0
    plan.choose(chosen)
    return chosen


def _grads(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    # gradients need to be equal from run to run, not for every M: cuBLAS as it is
    grad = grad.to(x.dtype)
    return grad @ weight, grad.t() @ x, None


def _setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:2])


class _Linear(torch.autograd.Function):
    """The eager route of `linear`: a registered operator costs more host time than the product of a small batch."""

    @staticmethod
    def forward(ctx, x, weight, fp32_out):
        ctx.save_for_backward(x, weight)
        return _launch(x, weight, fp32_out)

    @staticmethod
    def backward(ctx, grad):
        return _grads(grad, *ctx.saved_tensors)


@torch.library.custom_op("consistency_cuda::linear", mutates_args=())
def linear_op(x: torch.Tensor, weight: torch.Tensor, fp32_out: bool = False) -> torch.Tensor:
    return _launch(x, weight, fp32_out)


@linear_op.register_fake
def _(x, weight, fp32_out=False):
    return torch.empty(x.shape[0], weight.shape[0], dtype=torch.float32 if fp32_out else x.dtype, device=x.device)


linear_op.register_autograd(lambda ctx, grad: _grads(grad, *ctx.saved_tensors), setup_context=_setup)


def linear(x: torch.Tensor, weight: torch.Tensor, fp32_out: bool = False) -> torch.Tensor:
    """x [rows, K] (rows may be strided) times weight [N, K] transposed; [rows, N] in the dtype of `x`, or fp32."""
    if torch.compiler.is_compiling():
        return linear_op(x, weight, fp32_out)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _Linear.apply(x, weight, fp32_out)
    return _launch(x, weight, fp32_out)


@triton.jit
def _ascending_kernel(x_ptr, weight_ptr, out_ptr, rows, n, k, x_stride, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, k, BLOCK_K):
        live = start + ks < k
        x = tl.load(x_ptr + m[:, None].to(tl.int64) * x_stride + start + ks[None, :], mask=(m[:, None] < rows) & live[None, :], other=0.0)
        weight = tl.load(weight_ptr + columns[None, :].to(tl.int64) * k + start + ks[:, None], mask=(columns[None, :] < n) & live[:, None], other=0.0)
        accumulator = tl.dot(x, weight, accumulator)
    tl.store(out_ptr + m[:, None].to(tl.int64) * n + columns[None, :], accumulator.to(out_ptr.dtype.element_ty),
             mask=(m[:, None] < rows) & (columns[None, :] < n))


def linear_ascending(x: torch.Tensor, weight: torch.Tensor, block_m: int = 64, block_n: int = 128, block_k: int = 64, warps: int = 4) -> torch.Tensor:
    """The contract as a Triton kernel: the independent witness that cuBLASLt keeps it. Slower; not used by the engines."""
    (rows, k), n = x.shape, weight.shape[0]
    out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    _ascending_kernel[(triton.cdiv(rows, block_m), triton.cdiv(n, block_n))](
        x, weight, out, rows, n, k, x.stride(0), block_m, block_n, block_k, num_warps=warps, num_stages=3)
    return out


def _case(label: str, k: int, n: int, families: tuple[str, ...]) -> Case:
    def inputs(rows: int, generator: torch.Generator) -> Inputs:
        return Inputs((normal((rows, k), generator),), (normal((n, k), generator, k**-0.5),))

    def reference(x, weight):
        return x.double() @ weight.double().t()

    def gradients():
        x, weight = inputs(64, torch.Generator("cuda").manual_seed(5)).take(64)
        return check_gradients(linear, torch.nn.functional.linear, {"x": x, "weight": weight})

    def candidate(index: int):
        def call(x, weight):
            plan = plan_for(x, weight, x.dtype)
            plan.choose(min(index, len(plan.algorithms) - 1))
            try:
                return linear(x, weight)
            finally:
                plan.choose(0)

        return call

    small = n * k < 2**27
    witnesses = {
        "triton 64x128x64": lambda x, w: linear_ascending(x, w),
        "triton 16x64x128": lambda x, w: linear_ascending(x, w, 16, 64, 128),
        "registered operator": linear_op,
        **{f"cuBLASLt candidate {i}": candidate(i) for i in range(1, CANDIDATES)},
    } if small else {}
    return Case("linear", f"{label} {k}x{n}", families, inputs, linear, reference, torch.nn.functional.linear, prepare=tune, configurations=witnesses,
                gradients=gradients if small else None, prefill=(2048, 8192) if small else (2048,))


CASES = [
    _case("mamba in", 2688, 10304, ("nemotron-3.5",)),
    _case("mamba out", 4096, 2688, ("nemotron-3.5",)),
    _case("qkv", 2688, 4608, ("nemotron-3.5",)),
    _case("shared up", 2688, 3712, ("nemotron-3.5",)),
    _case("shared down", 3712, 2688, ("nemotron-3.5",)),
    _case("lm_head", 2688, 131072, ("nemotron-3.5",)),
    _case("qkv", 2048, 4096, ("qwen3",)),
    _case("o", 2048, 2048, ("qwen3",)),
    _case("gate_up", 2048, 12288, ("qwen3",)),
    _case("down", 6144, 2048, ("qwen3",)),
    _case("lm_head", 2048, 151936, ("qwen3",)),
]


# ---- the contract's names ----------------------------------------------------------------------------------------------


def exact_training(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, K], weight [N, K] -> [T, N] in the dtype of x. Differentiable. No model under contract has a bias."""
    assert bias is None, "the contract's linear layer has no bias"
    return linear(x, weight)


exact_rollout = exact_training
stock_rollout = torch.nn.functional.linear
