"""Seeded DeepSeek-V4 weights in the published formats, and the same values dequantised for transformers.

Published tensors, with `at` = `layers.{i}.`, `r` the layer's compress ratio, `c` = 2 at ratio 4 and 1 at ratio 128, `m` = hc_mult, H the hidden size:

| name | shape at Flash widths | stored as |
|---|---|---|
| embed.weight, head.weight | [129280, 4096] | bf16 |
| norm.weight, at attn_norm.weight, ffn_norm.weight | [4096] | bf16 |
| hc_head_fn, hc_head_base, hc_head_scale | [m, mH], [m], [1] | fp32 |
| at hc_attn_fn, hc_ffn_fn | [(2 + m)m, mH] = [24, 16384] | fp32 |
| at hc_attn_base, hc_ffn_base; hc_attn_scale, hc_ffn_scale | [24]; [3] | fp32 |
| at attn.wq_a.weight, attn.wkv.weight | [1024, 4096], [512, 4096] | block FP8 |
| at attn.wq_b.weight | [32768, 1024] | block FP8 |
| at attn.wo_a.weight, attn.wo_b.weight | [8192, 4096], [4096, 8192] | block FP8 |
| at attn.q_norm.weight, attn.kv_norm.weight | [1024], [512] | bf16 |
| at attn.attn_sink | [64] | fp32 |
| r > 0: at attn.compressor.wkv.weight, .wgate.weight | [512c, 4096] | bf16 |
| r > 0: at attn.compressor.norm.weight; .ape | [512]; [r, 512c] | bf16; fp32 |
| r = 4: at attn.indexer.wq_b.weight | [8192, 1024] | block FP8 |
| r = 4: at attn.indexer.weights_proj.weight | [64, 4096] | bf16 |
| r = 4: at attn.indexer.compressor.wkv.weight, .wgate.weight | [256, 4096] | bf16 |
| r = 4: at attn.indexer.compressor.norm.weight; .ape | [128]; [4, 256] | bf16; fp32 |
| at ffn.gate.weight | [256, 4096] | bf16 |
| hash layers: at ffn.gate.tid2eid | [129280, 6] | int64 |
| other layers: at ffn.gate.bias | [256] | fp32 |
| at ffn.shared_experts.w1.weight, .w3.weight; .w2.weight | [2048, 4096]; [4096, 2048] | block FP8 |
| at ffn.experts.{e}.w1.weight, .w3.weight; .w2.weight | [2048, 4096]; [4096, 2048] | block FP8 or MXFP4 (int8 [., K/2]) |

A quantised `X.weight` [N, K] has an `X.scale` beside it: [N/128, K/128], one per 128 x 128 block, or for MXFP4 [N, K/32], one per 32 values of a row.
All scales are powers of two, held in float8_e8m0fnu when the experts are MXFP4 and in float32 when they are FP8.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

BLOCK, GROUP = 128, 32
FP8_MAX, FP4_MAX = 448.0, 6.0
FP4_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""magnitudes of E2M1 by their three low bits; bit 3 is the sign"""
SHARD_BYTES = 2 << 30
HEAD_STD = 3.0
"""Standard deviation of the logits. Gaussian logits have entropy ln V - HEAD_STD^2 / 2, so a sampled token has a mean log-probability near -7.3 at
V = 129280 instead of the -11.8 of flat logits."""


# ---- number formats -------------------------------------------------------------------------------------------------

def scale_exponent(largest: torch.Tensor, limit: float) -> torch.Tensor:
    """The smallest e, int32, with largest / 2^e <= limit, within the exponents that UE8M0 and normal fp32 share; the least for zero."""
    mantissa, exponent = torch.frexp(largest.float() / limit)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    return torch.where(largest == 0, -126, exponent).to(torch.int32).clamp(-126, 127)


def _stored_scale(exponent: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    biased = exponent + 127
    return biased.to(torch.uint8).view(dtype) if dtype == torch.float8_e8m0fnu else (biased << 23).view(torch.float32)


def _spread(scale: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """One fp32 scale per element of [rows, columns] from one scale per block."""
    down, across = -(-rows // scale.shape[0]), -(-columns // scale.shape[1])
    return scale.float().repeat_interleave(down, 0)[:rows].repeat_interleave(across, 1)[:, :columns]


def quantise_fp8(weight: torch.Tensor, scale_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 [N, K], multiples of 128 -> (float8_e4m3fn [N, K], scales [N/128, K/128]). No value saturates."""
    rows, columns = weight.shape
    assert rows % BLOCK == 0 and columns % BLOCK == 0, f"FP8 blocks of {BLOCK} do not divide {rows} x {columns}"
    largest = weight.view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK).abs().amax((1, 3))
    scale = _stored_scale(scale_exponent(largest, FP8_MAX), scale_dtype)
    return (weight / _spread(scale, rows, columns)).to(torch.float8_e4m3fn), scale


def quantise_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 [N, K], K a multiple of 32 -> (int8 [N, K/2], the earlier value in the low nibble; float8_e8m0fnu [N, K/32]). No value saturates."""
    rows, columns = weight.shape
    assert columns % GROUP == 0, f"MXFP4 groups of {GROUP} do not divide {columns}"
    largest = weight.view(rows, columns // GROUP, GROUP).abs().amax(-1)
    scale = _stored_scale(scale_exponent(largest, FP4_MAX), torch.float8_e8m0fnu)
    scaled = weight / _spread(scale, rows, columns)
    values = FP4_VALUES.to(weight.device)
    code = torch.bucketize(scaled.abs(), (values[1:] + values[:-1]) / 2).to(torch.uint8) | (scaled < 0).to(torch.uint8) << 3
    return (code[:, 0::2] | code[:, 1::2] << 4).view(torch.int8), scale


def dequantise(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """A published weight and its scales -> bf16 [N, K]. Exact: FP8 and FP4 have fewer significant bits than bf16 and the scales are powers of two."""
    if weight.dtype == torch.int8:
        packed = weight.view(torch.uint8)
        code = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
        value = FP4_VALUES.to(weight.device)[(code & 7).long()]
        value = torch.where(code > 7, -value, value)
    else:
        value = weight.float()
    return (value * _spread(scale, *value.shape)).bfloat16()


# ---- what a checkpoint holds ----------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Entry:
    """One published tensor before it is stored."""

    name: str
    shape: tuple[int, ...]
    kind: str
    """`bf16`, `fp32`, `table` (a token's experts), `linear` or `expert` (quantised, name ends in `.weight`)"""
    mean: float = 0.0
    std: float = 1.0


def entries(config: dict) -> Iterator[Entry]:
    """Every tensor of a checkpoint with this published configuration, layer by layer.

    Matrices have the standard deviation fan_in^-0.5, so that activations keep unit variance behind each RMSNorm and router logits spread evenly over
    the experts; norm weights, sinks, biases and position tables differ from element to element, so that each of them changes the output.
    """
    c = config
    hidden, heads, dim, streams = c["hidden_size"], c["num_attention_heads"], c["head_dim"], c["hc_mult"]

    def matrix(name, rows, columns, kind="linear", gain=1.0):
        return Entry(name + ".weight", (rows, columns), kind, std=gain * columns ** -0.5)

    def norm(name, size):
        return Entry(name + ".weight", (size,), "bf16", mean=1.0, std=0.2)

    def mixing(name, outputs, scales):
        yield Entry(name + "_fn", (outputs, streams * hidden), "fp32", std=(streams * hidden) ** -0.5)
        yield Entry(name + "_base", (outputs,), "fp32", std=0.5)
        yield Entry(name + "_scale", (scales,), "fp32", mean=1.0, std=0.2)

    def compressor(at, ratio, size):
        width = size * (2 if ratio == 4 else 1)
        yield Entry(at + "ape", (ratio, width), "fp32", std=0.5)
        yield from (matrix(at + name, width, hidden, "bf16") for name in ("wkv", "wgate"))
        yield norm(at + "norm", size)

    def feed_forward(at, kind):
        inner = c["moe_intermediate_size"]
        yield from (matrix(at + name, inner, hidden, kind) for name in ("w1", "w3"))
        yield matrix(at + "w2", hidden, inner, kind, gain=2.0)

    yield Entry("embed.weight", (c["vocab_size"], hidden), "bf16")
    for i, ratio in enumerate(c["compress_ratios"][:c["num_hidden_layers"]]):
        at = f"layers.{i}."
        for site in ("attn", "ffn"):
            yield norm(f"{at}{site}_norm", hidden)
            yield from mixing(f"{at}hc_{site}", (2 + streams) * streams, 3)
        yield from (matrix(f"{at}attn.{name}", rows, hidden) for name, rows in (("wq_a", c["q_lora_rank"]), ("wkv", dim)))
        yield matrix(f"{at}attn.wq_b", heads * dim, c["q_lora_rank"])
        yield matrix(f"{at}attn.wo_a", c["o_groups"] * c["o_lora_rank"], heads * dim // c["o_groups"], gain=2.0)
        yield matrix(f"{at}attn.wo_b", hidden, c["o_groups"] * c["o_lora_rank"])
        yield from (norm(f"{at}attn.{name}", size) for name, size in (("q_norm", c["q_lora_rank"]), ("kv_norm", dim)))
        yield Entry(f"{at}attn.attn_sink", (heads,), "fp32", std=0.5)
        if ratio:
            yield from compressor(f"{at}attn.compressor.", ratio, dim)
        if ratio == 4:
            index = f"{at}attn.indexer."
            yield matrix(index + "wq_b", c["index_n_heads"] * c["index_head_dim"], c["q_lora_rank"])
            yield matrix(index + "weights_proj", c["index_n_heads"], hidden, "bf16")
            yield from compressor(index + "compressor.", ratio, c["index_head_dim"])
        yield matrix(f"{at}ffn.gate", c["n_routed_experts"], hidden, "bf16")
        if i < c["num_hash_layers"]:
            yield Entry(f"{at}ffn.gate.tid2eid", (c["vocab_size"], c["num_experts_per_tok"]), "table")
        else:
            yield Entry(f"{at}ffn.gate.bias", (c["n_routed_experts"],), "fp32", std=0.02)
        yield from feed_forward(f"{at}ffn.shared_experts.", "linear")
        for expert in range(c["n_routed_experts"]):
            yield from feed_forward(f"{at}ffn.experts.{expert}.", "expert")
    yield norm("norm", hidden)
    yield from mixing("hc_head", streams, 1)
    yield matrix("head", c["vocab_size"], hidden, "bf16", gain=HEAD_STD)


def values(entry: Entry, config: dict, seed: int, device: str) -> torch.Tensor:
    """The entry's values, fp32 (int64 for a table), from a generator seeded by (seed, name) alone.

    A CPU and a CUDA generator give different numbers, and so may two kinds of GPU: a checkpoint is written once and read by both engines.
    """
    digest = hashlib.sha256(f"{seed}:{entry.name}".encode()).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    if entry.kind == "table":
        tokens, chosen = entry.shape
        return torch.rand(tokens, config["n_routed_experts"], generator=generator, device=device).topk(chosen, dim=-1).indices
    return torch.randn(entry.shape, generator=generator, device=device).mul_(entry.std).add_(entry.mean)


def stored(entry: Entry, config: dict, seed: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    """The entry under its published names, in the dtypes that the configuration's `expert_dtype` asks for."""
    value = values(entry, config, seed, device)
    if entry.kind == "table":
        return {entry.name: value}
    if entry.kind not in ("linear", "expert"):
        return {entry.name: value if entry.kind == "fp32" else value.bfloat16()}
    if entry.kind == "expert" and config["expert_dtype"] == "fp4":
        weight, scale = quantise_mxfp4(value)
    else:
        weight, scale = quantise_fp8(value, torch.float8_e8m0fnu if config["expert_dtype"] == "fp4" else torch.float32)
    return {entry.name: weight, entry.name.removesuffix("weight") + "scale": scale}


def write(folder: Path, config: dict, seed: int = 0, device: str = "cpu") -> None:
    """Writes config.json, shards of about SHARD_BYTES and their index, through a temporary sibling; at most one shard is in memory."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    where: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    total = size = 0

    def flush() -> None:
        file = f"model-{len(set(where.values())) + 1:05d}.safetensors"
        save_file(shard, temporary / file, {"format": "pt"})
        where.update(dict.fromkeys(shard, file))
        shard.clear()

    try:
        for entry in entries(config):
            tensors = {name: tensor.cpu().contiguous() for name, tensor in stored(entry, config, seed, device).items()}
            size += sum(tensor.nbytes for tensor in tensors.values())
            shard |= tensors
            if size > SHARD_BYTES:
                flush()
                total, size = total + size, 0
        flush()
        index = {"metadata": {"total_size": total + size}, "weight_map": where}
        (temporary / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
        (temporary / "config.json").write_text(json.dumps(config, indent=1))
        temporary.replace(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


# ---- the same values in transformers --------------------------------------------------------------------------------

TRANSFORMERS_NAMES: tuple[tuple[str, str], ...] = (
    (r"^embed\.", "model.embed_tokens."), (r"^head\.", "lm_head."), (r"^norm\.", "model.norm."), (r"^hc_head_", "model.hc_head.hc_"),
    (r"^layers\.", "model.layers."), (r"\.attn\.", ".self_attn."), (r"\.ffn\.", ".mlp."), (r"\.hc_(attn|ffn)_", r".\1_hc."),
    (r"\.attn_norm\.", ".input_layernorm."), (r"\.ffn_norm\.", ".post_attention_layernorm."), (r"\.attn_sink$", ".sinks"),
    (r"\.q_norm\.", ".q_a_norm."), (r"\.wq_(a|b)\.", r".q_\1_proj."), (r"\.wo_(a|b)\.", r".o_\1_proj."), (r"\.wkv\.", ".kv_proj."),
    (r"\.wgate\.", ".gate_proj."),
    (r"\.ape$", ".position_bias"), (r"(compressor)\.norm\.", r"\1.kv_norm."), (r"\.indexer\.compressor\.", ".compressor.indexer."),
    (r"\.self_attn\.indexer\.", ".self_attn.compressor.indexer."), (r"\.weights_proj\.", ".scorer.weights_proj."),
    (r"\.gate\.bias$", ".gate.e_score_correction_bias"), (r"\.shared_experts\.w1\.", ".shared_experts.gate_proj."),
    (r"\.shared_experts\.w2\.", ".shared_experts.down_proj."), (r"\.shared_experts\.w3\.", ".shared_experts.up_proj."))
"""applied in order"""


def transformers_place(name: str, inner: int) -> tuple[str, tuple]:
    """Where a published tensor sits in DeepseekV4ForCausalLM: (parameter or buffer, index into it; () is all of it).

    transformers keeps the experts of a layer in two tensors, gate and up stacked; inner is moe_intermediate_size.
    """
    if match := re.fullmatch(r"layers\.(\d+)\.ffn\.experts\.(\d+)\.w([123])\.weight", name):
        layer, expert, which = match.groups()
        rows = {"1": slice(0, inner), "2": slice(None), "3": slice(inner, 2 * inner)}[which]
        return f"model.layers.{layer}.mlp.experts.{'down_proj' if which == '2' else 'gate_up_proj'}", (int(expert), rows)
    for pattern, replacement in TRANSFORMERS_NAMES:
        name = re.sub(pattern, replacement, name)
    return name, ()


def dequantised(folder: Path, device: str = "cpu") -> Iterator[tuple[str, tuple, torch.Tensor]]:
    """(name in transformers, index into it, values) of every tensor of a checkpoint, one at a time.

    What the checkpoint stores as fp32 or int64 stays so; all else is bf16, quantised tensors exactly.
    """
    inner = json.loads((folder / "config.json").read_text())["moe_intermediate_size"]
    where = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    files = {file: safe_open(folder / file, "pt", device=device) for file in set(where.values())}
    for name in where:
        if name.endswith(".scale") or name.startswith("mtp."):
            continue
        tensor = files[where[name]].get_tensor(name)
        scale = name.removesuffix("weight") + "scale"
        if name.endswith(".weight") and scale in where:
            tensor = dequantise(tensor, files[where[scale]].get_tensor(scale))
        yield *transformers_place(name, inner), tensor


def load_transformers(folder: Path, device: str = "cpu"):
    """DeepseekV4ForCausalLM with the dequantised values of a checkpoint, each parameter in the dtype that `dequantised` gives.

    Differs from `from_pretrained`, which keeps every norm weight in fp32: its norms then return fp32, and the bf16 linear behind them refuses that.
    The attention is transformers' eager one, the only one it has for this model. Raises ValueError when names or shapes do not match one to one.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    config = AutoConfig.from_pretrained(folder)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device(device), no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="eager")
    slots = dict(model.named_parameters()) | {n: b for n, b in model.named_buffers() if n.endswith(("tid2eid", "e_score_correction_bias"))}
    filled: dict[str, int] = dict.fromkeys(slots, 0)
    with torch.no_grad():
        for name, index, tensor in dequantised(folder, device):
            if name not in slots:
                raise ValueError(f"transformers has no '{name}', which the checkpoint {folder} holds")
            slot = slots[name]
            if slot.dtype != tensor.dtype:
                slot.data = slot.data.to(tensor.dtype)
            if slot[index].shape != tensor.shape:
                raise ValueError(f"'{name}' is {tuple(slot[index].shape)} in transformers and {tuple(tensor.shape)} in the checkpoint {folder}")
            slot[index].copy_(tensor)
            filled[name] += tensor.numel()
    if incomplete := [name for name, count in filled.items() if count != slots[name].numel()]:
        raise ValueError(f"the checkpoint {folder} does not fill {len(incomplete)} tensors of transformers, for example '{incomplete[0]}'")
    return model
