"""Widths, rotary tables and cache records that the DeepSeek-V4 cases share."""

import torch

from consistency.models.deepseek_v4 import FLASH
from consistency.models.deepseek_v4_weights import FP8_MAX, quantise_fp8, scale_exponent
from consistency.operators.cuda.case import SWEEP, normal

FAMILY = ("deepseek-v4",)
HIDDEN, HEADS, DIM, ROPE = FLASH["hidden_size"], FLASH["num_attention_heads"], FLASH["head_dim"], FLASH["qk_rope_head_dim"]
NOPE = DIM - ROPE
EPS = FLASH["rms_norm_eps"]
LONG_SWEEP = (*SWEEP, 2048, 4096)
"""row counts of a decode step, of a prefill of one prompt and of a full prefill step"""
PAGE, RECORD, ALIGNMENT = 64, 584, 576
"""Key-value cache of vLLM: pages of 64 entries; an entry has 448 FP8 values, 64 bf16 values and, behind the entries of the page, 8 bytes of scales;
pages are padded to multiples of 576 bytes."""
GROUP = 64
"""values of an entry that share a scale"""


def fp8_weight(rows: int, columns: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """(float8_e4m3fn [rows, columns], fp32 power-of-two scales [rows / 128, columns / 128]) of values with the standard deviation columns^-0.5."""
    return quantise_fp8(normal((rows, columns), generator, columns**-0.5, torch.float32), torch.float32)


def spread(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """fp64 values of a weight [..., rows, columns] with one scale per 128 x 128 block."""
    return weight.double() * scale.double().repeat_interleave(128, -2).repeat_interleave(128, -1)


def rotary_table(positions: int, device: torch.device | str, theta: float = float(FLASH["rope_theta"])) -> torch.Tensor:
    """fp32 [positions, 64], cosines before sines, one of each per pair of values: the layout of vLLM's tables, without YaRN."""
    inverse = theta ** -(torch.arange(0, ROPE, 2, device=device, dtype=torch.float64) / ROPE)
    angles = torch.arange(positions, device=device, dtype=torch.float64)[:, None] * inverse
    return torch.cat((angles.cos(), angles.sin()), 1).float()


def rotate(x: torch.Tensor, table: torch.Tensor, inverse: bool = False) -> torch.Tensor:
    """fp64 rotation of the last 64 values of x [rows, ..., width], neighbouring values in pairs; table [rows, 64] holds the rows' positions."""
    shape = (x.shape[0], *([1] * (x.ndim - 2)), ROPE // 2)
    cos, sin = (part.double().view(shape) for part in table.chunk(2, 1))
    sin = -sin if inverse else sin
    even, odd = x[..., -ROPE::2].double(), x[..., -ROPE + 1::2].double()
    pairs = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
    return torch.cat((x[..., :-ROPE].double(), pairs), -1)


def rms(x: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
    """fp64 RMSNorm of the last dimension."""
    x = x.double()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
    return x if weight is None else x * weight.double()


def page_bytes(entries: int) -> int:
    """Bytes of a page of so many cache entries."""
    return -(-entries * RECORD // ALIGNMENT) * ALIGNMENT


def empty_pages(count: int, entries: int, device: torch.device | str) -> torch.Tensor:
    """uint8 [count, bytes of a page with its padding], zero."""
    return torch.zeros(count, page_bytes(entries), dtype=torch.uint8, device=device)


def records(pages: torch.Tensor, entries: int) -> torch.Tensor:
    """The view [pages, entries, 584] that vLLM's kernels take; its last dimension is a size, not a record: values and scales are apart."""
    return pages[:, : entries * RECORD].unflatten(1, (entries, RECORD))


def write_cache(pages: torch.Tensor, entries: int, keys: torch.Tensor) -> None:
    """Quantises bf16 keys [n, 512] into the first n slots."""
    padded = torch.zeros(pages.shape[0] * entries, DIM, dtype=torch.float32, device=pages.device)
    padded[: keys.shape[0]] = keys.float()
    nope = padded[:, :NOPE].view(-1, NOPE // GROUP, GROUP)
    exponent = scale_exponent(nope.abs().amax(-1).clamp_min(1e-4), FP8_MAX)
    quantised = (nope * torch.exp2(-exponent.float())[..., None]).to(torch.float8_e4m3fn).view(torch.uint8).view(-1, NOPE)
    values = torch.cat((quantised, padded[:, NOPE:].bfloat16().contiguous().view(torch.uint8)), 1)
    size = entries * (RECORD - 8)
    pages[:, :size] = values.view(pages.shape[0], size)
    scales = torch.zeros(padded.shape[0], 8, dtype=torch.uint8, device=pages.device)
    scales[:, : NOPE // GROUP] = (exponent + 127).to(torch.uint8)
    pages[:, size : size + 8 * entries] = scales.view(pages.shape[0], -1)


def read_cache(pages: torch.Tensor, entries: int) -> torch.Tensor:
    """bf16 keys [pages * entries, 512]: exact, as four significant bits and a power of two fit bf16."""
    size = entries * (RECORD - 8)
    values = pages[:, :size].reshape(-1, RECORD - 8)
    exponent = pages[:, size : size + 8 * entries].reshape(-1, 8)[:, : NOPE // GROUP].int() - 127
    nope = values[:, :NOPE].contiguous().view(torch.float8_e4m3fn).float().view(-1, NOPE // GROUP, GROUP)
    rope = values[:, NOPE:].contiguous().view(torch.bfloat16).float()
    return torch.cat(((nope * torch.exp2(exponent.float())[..., None]).view(-1, NOPE), rope), 1).bfloat16()
