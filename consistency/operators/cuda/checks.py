"""What a tensor must look like where Python meets a kernel."""

import torch

ALIGNMENT = 16
"""Bytes. Triton compiles another variant for a pointer or a stride that is not a multiple of 16, with another
register layout, and a row reduction then adds in another order. So alignment is part of the numeric contract."""


def assert_rows(tensor: torch.Tensor, width: int, *dtypes: torch.dtype) -> None:
    """Assert that `tensor` is [rows, width] on CUDA, one of `dtypes`, contiguous and aligned to 16 bytes."""
    assert tensor.is_cuda, f"expected a CUDA tensor, found one on {tensor.device}"
    assert tensor.ndim == 2 and tensor.shape[1] == width, f"expected [rows, {width}], found {tuple(tensor.shape)}"
    assert tensor.dtype in dtypes, f"expected one of {dtypes}, found {tensor.dtype}"
    assert tensor.stride(1) == 1 and tensor.stride(0) * tensor.element_size() % ALIGNMENT == 0, f"strides {tensor.stride()}"
    assert tensor.data_ptr() % ALIGNMENT == 0, "rows must start at a multiple of 16 bytes"


def assert_vector(tensor: torch.Tensor, length: int, *dtypes: torch.dtype) -> None:
    """Assert that `tensor` is [length] on CUDA, one of `dtypes`, contiguous and aligned to 16 bytes."""
    assert tensor.is_cuda, f"expected a CUDA tensor, found one on {tensor.device}"
    assert tensor.shape == (length,), f"expected [{length}], found {tuple(tensor.shape)}"
    assert tensor.dtype in dtypes, f"expected one of {dtypes}, found {tensor.dtype}"
    assert tensor.stride(0) == 1 and tensor.data_ptr() % ALIGNMENT == 0, "vectors must be contiguous and aligned to 16 bytes"


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` itself if its rows are contiguous and aligned to 16 bytes, else a copy that is."""
    rows_aligned = all(s * tensor.element_size() % ALIGNMENT == 0 for s in tensor.stride()[:-1])
    if tensor.stride(-1) == 1 and rows_aligned and tensor.data_ptr() % ALIGNMENT == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
