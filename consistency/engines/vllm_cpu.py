"""What a contract needs inside vLLM on the CPU: attention without a key-value split, and the patches of the CPU engine.

Tested with vLLM 0.32.0. The attention backend is registered through `register_backend`; the rest has no extension point:

| patched | why |
|---|---|
| the convolution's and the scan's prefill and decode functions in `mamba_mixer2` | the mixer imports them by name |
| `_custom_ops._supports_onednn = False` | oneDNN drops the original weight, which an in-place update needs; the throughput figure shows the cost |

Each patch runs vLLM's own function when its operator is not bound.
"""

from __future__ import annotations

import functools
import itertools

import torch
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl, CPUAttentionMetadataBuilder
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from consistency.bindings import rollout as bindings
from consistency.engines import events
from consistency.engines.vllm_classes import ContractAttention


class ContractMetadataBuilder(CPUAttentionMetadataBuilder):
    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if bindings.get("attention") == "single_split" and not self.is_cross_attention and not self.is_encoder_only_attention:
            metadata.scheduler_metadata = ops.cpu_attn_get_scheduler_metadata(
                num_reqs=common_attn_metadata.num_reqs, num_heads=self.num_heads, num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim, seq_lens=metadata.seq_lens, dtype=self.dtype, query_start_loc=metadata.query_start_loc,
                causal=metadata.causal, sliding_window_size=self.window_size, isa=self.isa, enable_kv_split=False,
                dynamic_causal=metadata.dynamic_causal, kv_cache_dtype=self.kv_cache_dtype)
        return metadata


class ContractAttentionImpl(ContractAttention, CPUAttentionBackendImpl):
    pass


class ContractAttentionBackend(CPUAttentionBackend):
    @staticmethod
    def get_impl_cls():
        return ContractAttentionImpl

    @staticmethod
    def get_builder_cls():
        return ContractMetadataBuilder


def apply() -> None:
    """Registers the backend and applies every patch. Call once per process, before a model is built."""
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.{ContractAttentionBackend.__name__}")
    _patch_mamba()
    ops._supports_onednn = False


def _patch_mamba() -> None:
    from vllm.model_executor.layers.mamba import mamba_mixer2

    current: list[str] = [""]
    stock = {name: getattr(mamba_mixer2, name) for name in (
        "causal_conv1d_fn", "causal_conv1d_update", "mamba_chunk_scan_combined_varlen", "selective_state_update")}
    forward = mamba_mixer2.MambaMixer2.conv_ssm_forward

    @functools.wraps(forward)
    def conv_ssm_forward(self, *args, **kwargs):
        current[0] = self.prefix
        return forward(self, *args, **kwargs)

    def seen(operator, rows, decode):
        for observer in events.MAMBA:
            observer(operator, current[0], rows, decode)

    @functools.wraps(stock["causal_conv1d_fn"])
    def conv_prefill(x, weight, bias, conv_states, query_start_loc, cache_indices=None, has_initial_state=None, **kwargs):
        operator = bindings.get("causal_conv1d")
        if operator is None or operator.sequence is None:
            out = stock["causal_conv1d_fn"](x, weight, bias, conv_states=conv_states, query_start_loc=query_start_loc,
                                            cache_indices=cache_indices, has_initial_state=has_initial_state, **kwargs)
        else:
            out = torch.empty_like(x)
            for i, (a, b) in enumerate(_spans(query_start_loc)):
                slot = int(cache_indices[i])
                state = conv_states[slot] if has_initial_state is not None and bool(has_initial_state[i]) else None
                rows, state = operator.sequence(x[:, a:b].t(), weight, bias, state)
                out[:, a:b] = rows.t()
                conv_states[slot] = state
        seen("causal_conv1d", out.t(), False)
        return out

    @functools.wraps(stock["causal_conv1d_update"])
    def conv_decode(x, conv_state, weight, bias=None, activation=None, conv_state_indices=None, **kwargs):
        operator = bindings.get("causal_conv1d")
        if operator is None or operator.decode is None:
            out = stock["causal_conv1d_update"](x, conv_state, weight, bias, activation, conv_state_indices=conv_state_indices, **kwargs)
        else:
            out = operator.decode(x, conv_state, conv_state_indices, weight, bias)
        seen("causal_conv1d", out, True)
        return out

    @functools.wraps(stock["mamba_chunk_scan_combined_varlen"])
    def scan_prefill(x, dt, A, B, C, *, cu_seqlens, out, D, dt_bias, initial_states, state_dtype, return_intermediate_states=False, **kwargs):
        operator = bindings.get("mamba2_scan")
        if operator is None or operator.sequence is None or return_intermediate_states:
            states = stock["mamba_chunk_scan_combined_varlen"](
                x, dt, A, B, C, cu_seqlens=cu_seqlens, out=out, D=D, dt_bias=dt_bias, initial_states=initial_states,
                state_dtype=state_dtype, return_intermediate_states=return_intermediate_states, **kwargs)
        else:
            states = []
            for i, (a, b) in enumerate(_spans(cu_seqlens)):
                y, state = operator.sequence(x[a:b], dt[a:b], A, B[a:b], C[a:b], D, dt_bias, None if initial_states is None else initial_states[i])
                out[a:b] = y
                states.append(state)
            states = torch.stack(states).to(state_dtype)
        seen("mamba2_scan", out, False)
        return states

    @functools.wraps(stock["selective_state_update"])
    def scan_decode(state, x, dt, A, B, C, D=None, dt_bias=None, *, state_batch_indices=None, out=None, **kwargs):
        operator = bindings.get("mamba2_scan")
        if operator is None or operator.decode is None:
            stock["selective_state_update"](state, x, dt, A, B, C, D, dt_bias, state_batch_indices=state_batch_indices, out=out, **kwargs)
        else:
            out.copy_(operator.decode(state, state_batch_indices, x, dt[..., 0], A[:, 0, 0], B, C, D[:, 0], dt_bias[:, 0]))
        seen("mamba2_scan", out, True)

    mamba_mixer2.MambaMixer2.conv_ssm_forward = conv_ssm_forward
    mamba_mixer2.causal_conv1d_fn, mamba_mixer2.causal_conv1d_update = conv_prefill, conv_decode
    mamba_mixer2.mamba_chunk_scan_combined_varlen, mamba_mixer2.selective_state_update = scan_prefill, scan_decode


def _spans(starts: torch.Tensor) -> list[tuple[int, int]]:
    return list(itertools.pairwise(starts.tolist()))
