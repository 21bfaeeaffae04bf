"""vLLM layers that look their operator up in the contract; an unbound operator runs the parent class unchanged.

Registered through `CustomOp.register_oot` and `register_backend`, vLLM's public extension points. Imported in vLLM's processes only.
"""

from __future__ import annotations

from vllm import _custom_ops as ops
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers.activation import ReLUSquaredActivation, SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.mamba.mamba_mixer2 import Mixer2RMSNormGated
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl, CPUAttentionMetadataBuilder
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from consistency.bindings import rollout as bindings


class ContractRMSNorm(RMSNorm):
    def forward(self, x, residual=None):
        operator = bindings.get("rms_norm")
        if operator is None:
            return super().forward(x, residual)
        y, total = operator(x, self.weight.data, self.variance_epsilon, residual)
        return y if total is None else (y, total)


class ContractSiluAndMul(SiluAndMul):
    def forward(self, x):
        operator = bindings.get("silu_and_mul")
        return super().forward(x) if operator is None else operator(x)


class ContractReLUSquared(ReLUSquaredActivation):
    def forward(self, x):
        operator = bindings.get("relu_squared")
        return super().forward(x) if operator is None else operator(x)


class ContractGatedNorm(Mixer2RMSNormGated):
    def forward(self, x, gate):
        operator = bindings.get("gated_rms_norm")
        if operator is None:
            return super().forward(x, gate)
        return operator(x, gate, self.weight.data, self.variance_epsilon, self.n_groups)


class ContractRotary(RotaryEmbedding):
    def forward(self, positions, query, key=None):
        operator = bindings.get("rotary")
        if operator is None:
            return super().forward(positions, query, key)
        heads = [t.view(t.shape[0], -1, self.head_size) for t in (query, key)]
        q, k = operator(positions, *heads, theta=float(self.base), max_positions=self.max_position_embeddings)
        return q.flatten(1), k.flatten(1)



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


class ContractAttentionImpl(CPUAttentionBackendImpl):
    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs):
        operator = bindings.get("attention")
        if attn_metadata is None or operator is None or isinstance(operator, str):
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
        operator(self, layer, query, key, value, kv_cache, attn_metadata, output)
        return output


class ContractAttentionBackend(CPUAttentionBackend):
    @staticmethod
    def get_impl_cls():
        return ContractAttentionImpl

    @staticmethod
    def get_builder_cls():
        return ContractMetadataBuilder



def register() -> None:
    """Registers every class. Call once per process, before a model is built."""
    for cls in (ContractRMSNorm, ContractSiluAndMul, ContractReLUSquared, ContractGatedNorm, ContractRotary):
        CustomOp.register_oot(cls, name=cls.__bases__[0].__name__)
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.{ContractAttentionBackend.__name__}")
