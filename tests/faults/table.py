"""The faults: what is broken on one side, and what localize has to say about it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

KERNELS = Path(__file__).with_name("kernels")


@dataclass(frozen=True)
class Fault:
    """One implementation bound on one side on top of the all-exact contract, or a weight that is wrong on one side."""

    name: str
    corpus: str
    """rows of the bug corpus that it stands for"""
    family: str
    side: str
    operator: str
    """the operator that localize must name"""
    dimension: str
    """the first dimension, from determinism to engine, in which it must be reported"""
    cause: str
    kernel: str = ""
    """`file.function` below tests/faults/kernels"""
    stale: str = ""
    """instead of a kernel: parameter that keeps its old value when both engines' weights are updated; localize must name it"""


def _nemotron(name, corpus, side, operator, dimension, cause, kernel="", stale=""):
    return Fault(name, corpus, "nemotron-3.5", side, operator, dimension, cause, kernel, stale)


def _qwen3(name, corpus, side, operator, dimension, cause, kernel="", stale=""):
    return Fault(name, corpus, "qwen3", side, operator, dimension, cause, kernel, stale)


FAULTS: tuple[Fault, ...] = (
    # Same symptom, other place: a norm that rounds once too often or too little.
    _nemotron("weight multiplied before the cast", "C03", "rollout", "rms_norm", "engine", "extra rounding", "norms.weight_before_cast"),
    _nemotron("residual sum rounded before the norm", "C03", "training", "rms_norm", "engine", "extra rounding", "norms.sum_rounded_first"),
    # One element in 75,000 differs, which nothing tells from another order of the sum.
    _nemotron("eps added in double", "C02", "training", "rms_norm", "engine", "reduction order", "norms.eps_in_double"),
    _nemotron("without eps", "C02", "rollout", "rms_norm", "engine", "semantics", "norms.without_eps"),
    _nemotron("block size changes at 256 rows", "C01", "rollout", "rms_norm", "batch", "reduction order", "norms.block_by_rows"),
    _nemotron("gate rounded", "C21", "rollout", "gated_rms_norm", "engine", "extra rounding", "norms.gate_rounded"),
    _nemotron("one norm group instead of two", "C48", "training", "gated_rms_norm", "engine", "semantics", "norms.one_group"),
    # Same symptom, other cause: a result that depends on the rows of the call.
    _nemotron("K split below 32 rows", "C11, C13", "rollout", "linear", "batch", "reduction order", "linears.split_below_32_rows"),
    _nemotron("K split by padding class", "C05, C13", "training", "linear", "batch", "reduction order", "linears.split_by_padded_rows"),
    _nemotron("one dynamic scale for the call", "C10", "rollout", "linear", "batch", "other input", "linears.scale_of_the_call"),
    _nemotron("partial sums rounded", "C33", "training", "linear", "engine", "extra rounding", "linears.partial_sums_rounded"),
    _nemotron("head in fp32", "C63", "training", "linear", "engine", "extra rounding", "linears.head_in_fp32"),
    _nemotron("output scale not wired", "miles#1033", "rollout", "linear", "engine", "semantics", "linears.scale_left_out"),
    # Run to run: memory that nobody wrote against additions in any order.
    _nemotron("last rows unwritten", "C40", "rollout", "relu_squared", "determinism", "uninitialised", "norms.rows_left_unwritten"),
    _nemotron("additions in any order", "C15", "training", "linear", "determinism", "reduction order", "linears.random_order"),
    _nemotron("relu left out", "C04", "training", "relu_squared", "engine", "semantics", "norms.relu_left_out"),
    # Prefill against decode: rounding, lost state, late state.
    _nemotron("convolution rounds in prefill", "C46", "rollout", "causal_conv1d", "phase", "extra rounding", "sequences.conv_rounded_in_prefill"),
    _nemotron("convolution loses its history at a chunk", "C50", "rollout", "causal_conv1d", "phase", "stale state",
              "sequences.conv_history_lost_at_chunk"),
    _nemotron("convolution history late at a chunk", "C37", "rollout", "causal_conv1d", "phase", "stale state",
              "sequences.conv_history_late_at_chunk"),
    _nemotron("scan starts a chunk from an empty state", "C09", "rollout", "mamba2_scan", "phase", "stale state",
              "sequences.scan_state_lost_at_chunk"),
    _nemotron("scan state cached in bf16", "C67", "rollout", "mamba2_scan", "phase", "extra rounding", "sequences.scan_state_cached_in_bf16"),
    _nemotron("taps added in another order, unfused", "C21", "training", "causal_conv1d", "engine", "reduction order",
              "sequences.conv_taps_reversed"),
    _nemotron("decay rate in bf16", "C67", "training", "mamba2_scan", "engine", "extra rounding", "sequences.scan_rate_in_bf16"),
    _nemotron("dt bias added in bf16", "C65", "training", "mamba2_scan", "engine", "extra rounding", "sequences.scan_bias_added_in_bf16"),
    _nemotron("dt clamped from below", "C07", "training", "mamba2_scan", "engine", "semantics", "sequences.scan_dt_clamped"),
    _nemotron("causal mask one too wide", "C50", "training", "attention", "engine", "semantics", "sequences.attention_sees_next_token"),
    _nemotron("scores rounded", "C17", "training", "attention", "engine", "extra rounding", "sequences.attention_scores_rounded"),
    _nemotron("window on one side", "C69", "training", "attention", "engine", "semantics", "sequences.attention_window"),
    # A gap in the log-probabilities and no kernel at fault.
    _nemotron("temperature on one side", "C59, C61", "training", "log_softmax", "engine", "semantics", "heads.temperature"),
    _nemotron("top-p renormalised", "C62", "rollout", "log_softmax", "engine", "semantics", "heads.top_p_renormalised"),
    # The first row of a sequence then holds the last one of its neighbour in the batch.
    _nemotron("log-probabilities one position late", "C71", "training", "log_softmax", "batch", "semantics", "heads.one_position_late"),
    _nemotron("x - logsumexp(x)", "C26", "training", "log_softmax", "engine", "reduction order", "heads.by_logsumexp"),
    # Only after a weight update.
    _nemotron("derived copy of the weights kept", "C52, C54", "rollout", "linear", "engine", "stale state", "linears.derived_copy"),
    _nemotron("weights transformed twice", "C53", "rollout", "linear", "engine", "other input", "linears.swapped_again_after_reload"),
    _nemotron("convolution bias not reloaded", "C41", "rollout", "causal_conv1d", "engine", "other input",
              stale="model.layers.4.mixer.conv1d.bias"),
    _nemotron("one projection not reloaded", "C41, C56", "rollout", "linear", "engine", "other input", stale="model.layers.2.mixer.o_proj.weight"),
    # Qwen3: rotary and gated feed-forward.
    _qwen3("positions one late", "C37", "training", "rotary", "engine", "semantics", "sequences.rotary_one_late"),
    _qwen3("positions one ahead in decode", "C50", "rollout", "rotary", "phase", "semantics", "sequences.rotary_one_ahead_in_decode"),
    _qwen3("rotary products rounded", "C21", "rollout", "rotary", "engine", "extra rounding", "sequences.rotary_products_rounded"),
    _qwen3("silu kept in fp32", "C04", "training", "silu_and_mul", "engine", "extra rounding", "norms.silu_kept_wide"),
    # How much of the first result is overwritten depends on the number of rows.
    _qwen3("one buffer for two norms", "C36", "rollout", "rms_norm", "batch", "stale state", "norms.one_buffer_for_heads"),
    _qwen3("next token's embedding", "C72", "training", "embedding", "engine", "semantics", "norms.next_token_id"),
)
