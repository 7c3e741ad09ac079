"""Qwen2 and Qwen3, dense and MoE, and block-diffusion models made from them."""

from typing import Annotated, Any

from msgspec import Meta

from clocher_runtime.models.config import (
    LAYER_TYPES,
    BlockDiffusionFields,
    Decoder,
    layer_windows,
    read_config,
)
from clocher_runtime.models.config_fields import (
    BlockSize,
    Experts,
    Heads,
    LayerNumber,
    Layers,
    MaskId,
    Size,
)
from clocher_runtime.models.family import Config, Family, From, each_expert
from clocher_runtime.models.spec import BlockDiffusion, ModelSpec, MoeSpec


class _Qwen2(Decoder, kw_only=True):
    vocab_size: Size = 151936
    intermediate_size: Size = 22016
    num_key_value_heads: Heads | None = 32
    max_position_embeddings: Size = 32768
    use_sliding_window: bool = False
    sliding_window: Size | None = 4096
    max_window_layers: Annotated[int, Meta(ge=0, le=1 << 24)] = 28
    layer_types: list[Any] | None = None

    def windows(self) -> tuple[int, ...]:
        """Return the window of each layer; those below `max_window_layers` never slide."""
        layers = self.num_hidden_layers
        window = self.sliding_window if self.use_sliding_window else None
        full = self.max_window_layers if window else layers
        pattern = tuple(LAYER_TYPES[i < full] for i in range(layers))
        return layer_windows(self.layer_types, layers, window, pattern)


class _Qwen3(_Qwen2, kw_only=True):
    head_dim: Heads | None = 128


def qwen2(config: Config) -> ModelSpec:
    """Qwen2: biases on q, k, v."""
    read = read_config(config, _Qwen2)
    return read.spec("qwen2", read.windows(), qkv_bias=True, o_bias=False)


def qwen3(config: Config) -> ModelSpec:
    """Qwen3: norms on query and key heads."""
    read = read_config(config, _Qwen3)
    return read.spec("qwen3", read.windows(), qk_norm="heads")


class _Sdar(_Qwen3, kw_only=True):
    block_size: BlockSize = 4
    mask_token_id: MaskId = 151669

    def diffusion(self) -> BlockDiffusion | None:
        size, mask = self.block_size, self.mask_token_id
        self.block_diffusion = BlockDiffusionFields(size, mask, "block")
        return super().diffusion()


def sdar(config: Config) -> ModelSpec:
    """SDAR: Qwen3 with block diffusion and attention within blocks (Cheng et al. 2025)."""
    read = read_config(config, _Sdar)
    return read.spec("sdar", read.windows(), qk_norm="heads")


class _FastDllm(_Qwen2, kw_only=True):
    bd_size: BlockSize = 32
    small_block_size: BlockSize = 8
    mask_token_id: MaskId = 151665

    def diffusion(self) -> BlockDiffusion | None:
        self.block_diffusion = BlockDiffusionFields(
            self.bd_size,
            self.mask_token_id,
            "block",
            shift=True,
            sub_block_size=self.small_block_size,
        )
        return super().diffusion()


def fast_dllm(config: Config) -> ModelSpec:
    """Fast-dLLM v2: Qwen2 with block diffusion in sub-blocks, shifted logits (Wu et al. 2025)."""
    read = read_config(config, _FastDllm)
    return read.spec("fast_dllm", read.windows(), qkv_bias=True, o_bias=False)


class _Experts(_Qwen2, kw_only=True):
    intermediate_size: Size = 5632
    hidden_size: Size = 2048
    num_hidden_layers: Layers = 24
    num_attention_heads: Heads = 16
    num_key_value_heads: Heads | None = 16
    decoder_sparse_step: Annotated[int, Meta(ge=1, le=1024)] = 1
    mlp_only_layers: list[LayerNumber] | None = None
    moe_intermediate_size: Size = 1408
    num_experts: Experts = 60
    num_local_experts: Experts | None = None
    num_experts_per_tok: Experts = 4
    norm_topk_prob: bool = False

    def experts(self, **more: Any) -> MoeSpec:
        layers, step = range(self.num_hidden_layers), self.decoder_sparse_step
        dense = (i for i in layers if i in (self.mlp_only_layers or ()) or (i + 1) % step)
        experts = self.num_local_experts or self.num_experts  # transformers 5 writes the former
        return MoeSpec(
            experts=experts,
            active=min(self.num_experts_per_tok, experts),
            inner=self.moe_intermediate_size,
            score="softmax",
            normalise=self.norm_topk_prob,
            dense_layers=tuple(dense),
            **more,
        )


class _Qwen2Moe(_Experts, kw_only=True):
    qkv_bias: bool = True
    shared_expert_intermediate_size: Size = 5632

    def windows(self) -> tuple[int, ...]:
        """Return the window of each layer: every second one below `max_window_layers` slides."""
        layers = self.num_hidden_layers
        window = self.sliding_window if self.use_sliding_window else None
        slides = self.max_window_layers if window else 0
        pattern = tuple(LAYER_TYPES[not (i % 2 == 0 and i < slides)] for i in range(layers))
        return layer_windows(self.layer_types, layers, window, pattern)


def qwen2_moe(config: Config) -> ModelSpec:
    """Qwen2-MoE: experts, and a shared expert gated by a sigmoid."""
    read = read_config(config, _Qwen2Moe)
    shared = read.shared_expert_intermediate_size
    moe = read.experts(shared=shared, shared_gate=True)
    bias = {"qkv_bias": read.qkv_bias, "o_bias": False}
    return read.spec("qwen2_moe", read.windows(), moe=moe, **bias)


class _Qwen3Moe(_Experts, kw_only=True):
    intermediate_size: Size = 6144
    num_attention_heads: Heads = 32
    num_key_value_heads: Heads | None = 4
    moe_intermediate_size: Size = 768
    num_experts: Experts = 128
    num_experts_per_tok: Experts = 8


def qwen3_moe(config: Config) -> ModelSpec:
    """Qwen3-MoE (arXiv 2505.09388, section 2): Qwen3 with experts in most layers."""
    read = read_config(config, _Qwen3Moe)
    window = read.sliding_window if read.use_sliding_window else None
    return read.spec(
        "qwen3_moe",
        (window or 0,) * read.num_hidden_layers,
        moe=read.experts(),
        qk_norm="heads",
    )


_ROUTED = {
    "mlp.router": (From("mlp.gate"),),
    **each_expert(*(f"mlp.experts.{{e}}.{name}_proj" for name in ("gate", "up", "down"))),
}
QWEN2 = Family(qwen2)
QWEN3 = Family(qwen3)
SDAR = Family(sdar)
FAST_DLLM = Family(fast_dllm)
QWEN2_MOE = Family(qwen2_moe, _ROUTED)
QWEN3_MOE = Family(qwen3_moe, _ROUTED)
