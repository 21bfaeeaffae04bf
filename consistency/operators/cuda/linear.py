"""Linear layer y = x W^T without bias, and the same product with an fp32 result.

Contract: bf16 operands, one fp32 accumulator chained over ascending K in groups of 16, one rounding at the end. On Hopper the tile, the
warps and the instruction do not change these bits; a split of K does. So cuBLASLt keeps its choice by M, but its heuristic may
only offer algorithms that need no reduction between splits and no workspace.

The heuristic is asked once for each (rows, N, K); the answer is kept. Environment variables reach the same algorithms through
torch, but a starved workspace makes torch repeat the search in every call, which costs more than the product in eager mode.
"""

import ctypes
import functools

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


class _Heuristic(ctypes.Structure):
    _fields_ = [("algorithm", ctypes.c_uint64 * 8), ("workspace", ctypes.c_size_t), ("state", ctypes.c_int),
                ("waves", ctypes.c_float), ("reserved", ctypes.c_int * 4)]


class CublasLtError(RuntimeError):
    """cuBLASLt has no algorithm without split-K for a shape, or a call failed."""


@functools.cache
def _library() -> ctypes.CDLL:
    torch.cuda.init()
    torch.cuda.current_blas_handle()  # loads the cuBLASLt that torch itself uses
    with open("/proc/self/maps") as maps:
        paths = sorted({line.split()[-1] for line in maps if "libcublasLt.so" in line})
    if not paths:
        raise CublasLtError("torch did not load libcublasLt; is this a CUDA build of torch?")
    return ctypes.CDLL(paths[0])


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
    """One product: descriptors and the algorithm that serves it, created once and then only called."""

    def __init__(self, device: int, rows: int, n: int, k: int, row_stride: int, dtype: torch.dtype, out_dtype: torch.dtype) -> None:
        library = _library()
        self.handle = _handle(device)
        self.description = _create("cublasLtMatmulDescCreate", _COMPUTE_32F, _TYPES[torch.float32])
        _set("cublasLtMatmulDescSetAttribute", self.description, _DESC_TRANSA, ctypes.c_int32(1))
        # column-major view of row-major data: y^T [n, rows] = W [n, k] x^T [k, rows]
        self.weight, self.x, self.out = _layout(dtype, k, n, k), _layout(dtype, k, rows, row_stride), _layout(out_dtype, n, rows, n)
        preference = _create("cublasLtMatmulPreferenceCreate")
        _set("cublasLtMatmulPreferenceSetAttribute", preference, _PREFERENCE_WORKSPACE, ctypes.c_uint64(0))
        _set("cublasLtMatmulPreferenceSetAttribute", preference, _PREFERENCE_REDUCTION, ctypes.c_uint32(0))
        for operand in range(4):
            _set("cublasLtMatmulPreferenceSetAttribute", preference, _PREFERENCE_ALIGN_A + operand, ctypes.c_uint32(16))
        self.result, found = _Heuristic(), ctypes.c_int()
        _check(library.cublasLtMatmulAlgoGetHeuristic(
            self.handle, self.description, self.weight, self.x, self.out, self.out, preference, 1,
            ctypes.byref(self.result), ctypes.byref(found)), "cublasLtMatmulAlgoGetHeuristic")
        library.cublasLtMatmulPreferenceDestroy(preference)
        if not found.value or self.result.workspace or self.split_k() > 1:
            raise CublasLtError(f"no algorithm without split-K for M {rows}, N {n}, K {k}, {dtype} -> {out_dtype}")
        self.alpha, self.beta = ctypes.c_float(1.0), ctypes.c_float(0.0)

    def split_k(self) -> int:
        """Split of K that the chosen algorithm uses; 1 means none."""
        value, written = ctypes.c_int32(), ctypes.c_size_t()
        _check(_library().cublasLtMatmulAlgoConfigGetAttribute(
            ctypes.byref(self.result.algorithm), _ALGORITHM_SPLIT_K, ctypes.byref(value), ctypes.c_size_t(4), ctypes.byref(written)),
            "cublasLtMatmulAlgoConfigGetAttribute")
        return value.value

    def __call__(self, weight: int, x: int, out: int, stream: int) -> None:
        _check(_library().cublasLtMatmul(
            self.handle, self.description, ctypes.byref(self.alpha), ctypes.c_void_p(weight), self.weight, ctypes.c_void_p(x), self.x,
            ctypes.byref(self.beta), ctypes.c_void_p(out), self.out, ctypes.c_void_p(out), self.out,
            ctypes.byref(self.result.algorithm), None, ctypes.c_size_t(0), ctypes.c_void_p(stream)), "cublasLtMatmul")


@functools.lru_cache(maxsize=16384)
def _plan(*key) -> _Plan:
    return _Plan(*key)


@torch.library.custom_op("consistency_cuda::linear", mutates_args=())
def linear(x: torch.Tensor, weight: torch.Tensor, fp32_out: bool = False) -> torch.Tensor:
    """x [rows, K] (rows may be strided) times weight [N, K] transposed; [rows, N] in the dtype of `x`, or fp32."""
    (rows, k), n = x.shape, weight.shape[0]
    assert_rows(x, k, torch.bfloat16, torch.float16)
    assert_rows(weight, k, x.dtype)
    assert weight.is_contiguous()
    out = torch.empty(rows, n, dtype=torch.float32 if fp32_out else x.dtype, device=x.device)
    if rows:
        plan = _plan(x.device.index, rows, n, k, x.stride(0), x.dtype, out.dtype)
        plan(weight.data_ptr(), x.data_ptr(), out.data_ptr(), torch.cuda.current_stream(x.device).cuda_stream)
    return out


@linear.register_fake
def _(x, weight, fp32_out=False):
    return torch.empty(x.shape[0], weight.shape[0], dtype=torch.float32 if fp32_out else x.dtype, device=x.device)


def _setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:2])


def _backward(ctx, grad):
    # gradients need to be equal from run to run, not for every M: cuBLAS as it is
    x, weight = ctx.saved_tensors
    grad = grad.to(x.dtype)
    return grad @ weight, grad.t() @ x, None


linear.register_autograd(_backward, setup_context=_setup)


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

    small = n * k < 2**27
    witnesses = {
        "triton 64x128x64": lambda x, w: linear_ascending(x, w),
        "triton 16x64x128": lambda x, w: linear_ascending(x, w, 16, 64, 128),
    } if small else {}
    return Case("linear", f"{label} {k}x{n}", families, inputs, linear, reference, torch.nn.functional.linear, configurations=witnesses,
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
