"""What a contract needs inside vLLM on a CUDA device: attention with one split, replayed Mamba2 state, experts, log-probabilities.

Tested with vLLM 0.32.0. The attention backend is registered through `register_backend`; the rest has no extension point:

| patched | why |
|---|---|
| state shape and dtype of `MambaMixer2` and `NemotronHForCausalLM` | a slot also keeps the rows of the open chunk, which decode replays |
| the scan's prefill and decode functions in `mamba_mixer2` | the mixer imports them by name |
| `Mamba2AttentionMetadataBuilder.build` | only here the lengths are known on the host |
| `NemotronHMoE.__init__`, `.forward`; `MoERunner._maybe_apply_routed_scale_to_output` | one operator makes logits, choice and scaled weights |
| `TritonExperts.moe_sum` | the slots of a token are added in slot order |
| `compute_token_logprobs`, `SamplingStates.apply_temperature` (V2 runner) | log-sum-exp over fixed blocks; a division that rounds as torch's |

Each patch runs vLLM's own function when its operator is not bound.
"""

from __future__ import annotations

import functools

import torch
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionImpl, FlashAttentionMetadataBuilder
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.backends.utils import NULL_BLOCK_ID

from consistency.bindings import rollout as bindings
from consistency.engines import events
from consistency.engines.vllm_classes import ContractAttention
from consistency.operators.cuda.mamba2_decode import Mamba2Cache, PrefillTable, decode_into, mamba2_prefill
from consistency.operators.cuda.mamba2_scan import CHUNK


class ContractFlashBuilder(FlashAttentionMetadataBuilder):
    def _get_scheduler_metadata(self, **arguments):
        if _one_split():
            arguments["max_num_splits"] = 1
        return super()._get_scheduler_metadata(**arguments)

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if _one_split():
            metadata.max_num_splits = 1
        return metadata


class ContractFlashImpl(ContractAttention, FlashAttentionImpl):
    pass


class ContractFlashBackend(FlashAttentionBackend):
    @staticmethod
    def get_impl_cls():
        return ContractFlashImpl

    @staticmethod
    def get_builder_cls():
        return ContractFlashBuilder


def _one_split() -> bool:
    return isinstance(bindings.get("attention"), str)


def apply() -> None:
    """Registers the backend and applies every patch. Call once per process, before a model is built."""
    register_backend(AttentionBackendEnum.FLASH_ATTN, f"{__name__}.{ContractFlashBackend.__name__}")
    _patch_mamba_state()
    _patch_mamba_scan()
    _patch_moe()
    _patch_logprobs()


# ---- Mamba2 ---------------------------------------------------------------------------------------------------------

def _replay_shapes(heads: int, dim: int, state: int, groups: int) -> tuple[tuple[int, ...], ...]:
    """What a slot keeps beside vLLM's convolution and scan state: the rows of the open chunk, as `Mamba2Cache.over` takes them."""
    return (heads, CHUNK, dim), (groups, CHUNK, state), (heads, CHUNK), (heads, CHUNK)


def _replay_dtypes(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    return dtype, dtype, dtype, torch.float32


def _patch_mamba_state() -> None:
    """Every slot also holds the open chunk, whether the scan is bound or not, so that a contract can be bound again in a running engine."""
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
    from vllm.model_executor.models.nemotron_h import NemotronHForCausalLM

    shape, dtype = MambaMixer2.get_state_shape, MambaMixer2.get_state_dtype

    def get_state_shape(self):
        base = shape(self)
        return (*base, *_replay_shapes(*base[1], self.n_groups))

    def get_state_dtype(self):
        return (*dtype(self), *_replay_dtypes(self.model_config.dtype))

    shape_of = NemotronHForCausalLM.get_mamba_state_shape_from_config.__func__
    dtype_of = NemotronHForCausalLM.get_mamba_state_dtype_from_config.__func__

    def shape_from_config(cls, vllm_config):
        base = shape_of(cls, vllm_config)
        return (*base, *_replay_shapes(*base[1], vllm_config.model_config.hf_config.n_groups))

    def dtype_from_config(cls, vllm_config):
        return (*dtype_of(cls, vllm_config), *_replay_dtypes(vllm_config.model_config.dtype))

    MambaMixer2.get_state_shape, MambaMixer2.get_state_dtype = get_state_shape, get_state_dtype
    NemotronHForCausalLM.get_mamba_state_shape_from_config = classmethod(shape_from_config)
    NemotronHForCausalLM.get_mamba_state_dtype_from_config = classmethod(dtype_from_config)


def _patch_mamba_scan() -> None:
    from vllm.forward_context import get_forward_context
    from vllm.model_executor.layers.mamba import mamba_mixer2
    from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadataBuilder

    current: list = [None]
    forward, build = mamba_mixer2.MambaMixer2.conv_ssm_forward, Mamba2AttentionMetadataBuilder.build
    stock = {name: getattr(mamba_mixer2, name) for name in (
        "causal_conv1d_fn", "causal_conv1d_update", "mamba_chunk_scan_combined_varlen", "selective_state_update")}

    @functools.wraps(build)
    def build_with_lengths(self, common_prefix_len, common_attn_metadata, fast_build=False, **kwargs):
        metadata = build(self, common_prefix_len, common_attn_metadata, fast_build, **kwargs)
        if metadata.num_prefills:
            computed, starts = self._prefill_cpu_metadata(common_attn_metadata, metadata.num_reqs, metadata.num_prefills, metadata.num_decode_tokens)
            # on the tensor, which the metadata of the other cache groups shares: the table is then built once for a step
            metadata.query_start_loc_p.prefill = starts.diff().tolist(), computed.tolist()
        return metadata

    @functools.wraps(forward)
    def conv_ssm_forward(self, *args, **kwargs):
        current[0] = self
        return forward(self, *args, **kwargs)

    def bound_metadata():
        """The layer's metadata if the scan is bound; None for stock, and while the engine profiles, when there is no cache yet."""
        metadata = get_forward_context().attn_metadata
        return metadata[current[0].prefix] if metadata is not None and bindings.get("mamba2_scan") is not None else None

    def cache_of_layer() -> Mamba2Cache:
        _, state, *rows = current[0].kv_cache
        return Mamba2Cache.over(state, *rows)

    def seen(operator, rows, decode):
        for observer in events.MAMBA:
            observer(operator, current[0].prefix, rows, decode)

    @functools.wraps(stock["causal_conv1d_fn"])
    def conv_prefill(*args, **kwargs):
        out = stock["causal_conv1d_fn"](*args, **kwargs)
        seen("causal_conv1d", out.t(), False)
        return out

    @functools.wraps(stock["causal_conv1d_update"])
    def conv_decode(*args, **kwargs):
        out = stock["causal_conv1d_update"](*args, **kwargs)
        seen("causal_conv1d", out, True)
        return out

    @functools.wraps(stock["mamba_chunk_scan_combined_varlen"])
    def scan_prefill(x, dt, A, B, C, *, out, D, dt_bias, return_intermediate_states=False, **kwargs):
        metadata = bound_metadata()
        if metadata is not None and not return_intermediate_states:
            starts = metadata.query_start_loc_p
            if not isinstance(starts.prefill, PrefillTable):
                starts.prefill = PrefillTable.build(*starts.prefill, x.device)
            slots = metadata.state_indices_tensor_p.long()
            out.copy_(mamba2_prefill(x, dt, A, B, C, D, dt_bias, starts.prefill, slots, cache_of_layer()))
            # the mixer writes these back: the bits that are there already
            states = current[0].kv_cache[1][slots]
        else:
            states = stock["mamba_chunk_scan_combined_varlen"](
                x, dt, A, B, C, out=out, D=D, dt_bias=dt_bias, return_intermediate_states=return_intermediate_states, **kwargs)
        seen("mamba2_scan", out, False)
        return states

    @functools.wraps(stock["selective_state_update"])
    def scan_decode(state, x, dt, A, B, C, D=None, dt_bias=None, *, state_batch_indices=None, out=None, **kwargs):
        metadata = bound_metadata()
        if metadata is not None:
            slots = state_batch_indices[:, 0].contiguous()
            decode_into(out, x, dt[..., 0], A[:, 0, 0], B, C, D[:, 0], dt_bias[:, 0], metadata.seq_lens[:len(slots)], slots, cache_of_layer(),
                        NULL_BLOCK_ID)
        else:
            stock["selective_state_update"](state, x, dt, A, B, C, D, dt_bias, state_batch_indices=state_batch_indices, out=out, **kwargs)
        seen("mamba2_scan", out, True)

    Mamba2AttentionMetadataBuilder.build = build_with_lengths
    mamba_mixer2.MambaMixer2.conv_ssm_forward = conv_ssm_forward
    mamba_mixer2.causal_conv1d_fn, mamba_mixer2.causal_conv1d_update = conv_prefill, conv_decode
    mamba_mixer2.mamba_chunk_scan_combined_varlen, mamba_mixer2.selective_state_update = scan_prefill, scan_decode


# ---- mixture of experts ---------------------------------------------------------------------------------------------

def _patch_moe() -> None:
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
    from vllm.model_executor.models.nemotron_h import NemotronHMoE

    from consistency.operators.cuda.moe_experts import combine_into
    from consistency.operators.router import rows as router_rows

    current: list = ["", 1.0]
    init, forward = NemotronHMoE.__init__, NemotronHMoE.forward
    scale_output, moe_sum = MoERunner._maybe_apply_routed_scale_to_output, TritonExperts.moe_sum

    @functools.wraps(init)
    def __init__(self, *args, **kwargs):
        init(self, *args, **kwargs)
        router, gate, factor = self.experts.router, self.gate, self.routed_scaling_factor
        compute = router._compute_routing

        def compute_routing(hidden_states, router_logits, indices_type, *, input_ids=None):
            operator = bindings.get("router")
            # where the router is stock, its scale is applied to the sum over experts
            current[:] = self.experts.layer_name, 1.0 if operator else factor
            if operator is None:
                weights, ids = compute(hidden_states, router_logits, indices_type, input_ids=input_ids)
            else:
                weights, ids = operator(hidden_states, gate.weight, gate.e_score_correction_bias, router.top_k, factor)
            for observer in events.EXPERTS:
                observer("router", current[0], router_rows(weights * current[1], ids))
            return weights, ids

        router._compute_routing = compute_routing
        self.experts.scale_in_router = not self.use_latent_moe

    @functools.wraps(forward)
    def moe_forward(self, hidden_states):
        if bindings.get("router") is None:
            return forward(self, hidden_states)
        # the router reads the hidden states; nobody reads the logits
        return self.experts(hidden_states=hidden_states, router_logits=hidden_states)

    @functools.wraps(scale_output)
    def apply_scale(self, shared_output, fused_output):
        if bindings.get("router") is not None and self.scale_in_router:
            return shared_output, fused_output
        return scale_output(self, shared_output, fused_output)

    @functools.wraps(moe_sum)
    def ordered_sum(self, input, output, topk_ids=None, expert_map=None):
        operator = bindings.get("moe_experts")
        if operator is None or expert_map is not None:
            moe_sum(self, input, output, topk_ids, expert_map)
        elif isinstance(operator, str):
            combine_into(input, output)
        else:
            output.copy_(operator(input))
        for observer in events.EXPERTS:
            observer("experts", current[0], output * current[1])

    NemotronHMoE.__init__, NemotronHMoE.forward = __init__, moe_forward
    MoERunner._maybe_apply_routed_scale_to_output = apply_scale
    TritonExperts.moe_sum = ordered_sum


# ---- log-probabilities ----------------------------------------------------------------------------------------------

def _patch_logprobs() -> None:
    from vllm.v1.worker.gpu.sample import logprob, prompt_logprob
    from vllm.v1.worker.gpu.sample.states import SamplingStates

    stock, temperature = logprob.compute_token_logprobs, SamplingStates.apply_temperature

    def rows_of(logits: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of the whole vocabulary, for an observer."""
        operator = bindings.get("log_softmax")
        if operator is not None:
            return operator(logits)
        return stock(logits, torch.arange(logits.shape[1], device=logits.device).expand(logits.shape[0], -1))

    @functools.wraps(stock)
    def compute_token_logprobs(logits, token_ids):
        operator = bindings.get("log_softmax")
        for observer in events.LOGITS:
            observer(rows_of(logits), "log_softmax")
        if operator is None:
            return stock(logits, token_ids)
        token_ids = token_ids.to(torch.int64)
        if hasattr(operator, "lse"):
            return logits.gather(-1, token_ids).float() - operator.lse(logits)[:, None]
        return operator(logits).gather(-1, token_ids)

    @functools.wraps(temperature)
    def apply_temperature(self, logits, expanded_idx_mapping, idx_mapping_np):
        if bindings.get("log_softmax") is None:
            return temperature(self, logits, expanded_idx_mapping, idx_mapping_np)
        own = self.temperature.np[idx_mapping_np]
        if ((own != 0.0) & (own != 1.0)).any():
            divisor = self.temperature.gpu[expanded_idx_mapping].float()
            logits.div_(torch.where(divisor == 0.0, 1.0, divisor)[:, None])

    logprob.compute_token_logprobs = prompt_logprob.compute_token_logprobs = compute_token_logprobs
    SamplingStates.apply_temperature = apply_temperature
