"""Qwen2 and Qwen3, dense and MoE, and block-diffusion models made from them."""

from typing import Annotated, Any

from msgspec import Meta

from clocher_runtime.models.config import (
    BlockDiffusionFields,
    BlockSize,
    Decoder,
    Experts,
    Interval,
    LayerNumber,
    MaskId,
    Size,
    Usual,
)
from clocher_runtime.models.families import Family, From, each_expert
from clocher_runtime.models.spec import MoeSpec


class _Qwen2(Decoder, kw_only=True):
    """Qwen2: biases on q, k, v."""

    USUAL = Usual(151936, 4096, 22016, 32, 32, 32, None, 32768)

    use_sliding_window: bool = False
    sliding_window: Size | None = 4096
    max_window_layers: Annotated[int, Meta(ge=0, le=1 << 24)] = 28

    @property
    def window(self) -> int | None:
        return self.sliding_window if self.use_sliding_window else None

    def slides(self, layer: int) -> bool:
        """Return whether a layer has a window; those below `max_window_layers` never have."""
        return self.window is not None and layer >= self.max_window_layers

    def more(self) -> dict[str, Any]:
        windows = self.windows(self.window, self.slides)
        return {"windows": windows, "qkv_bias": True, "o_bias": False}


class _Qwen3(_Qwen2, kw_only=True):
    """Qwen3: norms on query and key heads."""

    USUAL = Usual(151936, 4096, 22016, 32, 32, 32, 128, 32768)

    def more(self) -> dict[str, Any]:
        return {"windows": self.windows(self.window, self.slides), "qk_norm": "heads"}


class _Sdar(_Qwen3, kw_only=True):
    """SDAR: Qwen3 with block diffusion and attention within blocks (Cheng et al. 2025)."""

    block_size: BlockSize = 4
    mask_token_id: MaskId = 151669

    def blocks(self) -> BlockDiffusionFields | None:
        return BlockDiffusionFields(self.block_size, self.mask_token_id, "block")


class _FastDllm(_Qwen2, kw_only=True):
    """Fast-dLLM v2: Qwen2 with block diffusion in sub-blocks, shifted logits (Wu et al. 2025)."""

    bd_size: BlockSize = 32
    small_block_size: BlockSize = 8
    mask_token_id: MaskId = 151665

    def blocks(self) -> BlockDiffusionFields | None:
        size, part = self.bd_size, self.small_block_size
        return BlockDiffusionFields(size, self.mask_token_id, "block", True, part)


class _Experts(_Qwen2, kw_only=True):
    USUAL = Usual(151936, 2048, 5632, 24, 16, 16, None, 32768)
    decoder_sparse_step: Interval = 1

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
    """Qwen2-MoE: experts, and a shared expert gated by a sigmoid."""

    qkv_bias: bool = True
    shared_expert_intermediate_size: Size = 5632

    def slides(self, layer: int) -> bool:
        """Return whether a layer has a window: every second one below `max_window_layers`."""
        return self.window is not None and layer % 2 == 0 and layer < self.max_window_layers

    def more(self) -> dict[str, Any]:
        moe = self.experts(shared=self.shared_expert_intermediate_size, shared_gate=True)
        return {**super().more(), "qkv_bias": self.qkv_bias, "moe": moe}


class _Qwen3Moe(_Experts, kw_only=True):
    """Qwen3-MoE (arXiv 2505.09388, section 2): Qwen3 with experts in most layers."""

    USUAL = Usual(151936, 2048, 6144, 24, 32, 4, None, 32768)

    moe_intermediate_size: Size = 768
    num_experts: Experts = 128
    num_experts_per_tok: Experts = 8

    def more(self) -> dict[str, Any]:
        windows = (self.window or 0,) * self.num_hidden_layers
        return {"windows": windows, "moe": self.experts(), "qk_norm": "heads"}


_ROUTED = {"mlp.router": (From("mlp.gate"),), **each_expert()}
FAMILIES = {
    "Qwen2ForCausalLM": Family("qwen2", _Qwen2),
    "Qwen3ForCausalLM": Family("qwen3", _Qwen3),
    "SDARForCausalLM": Family("sdar", _Sdar),
    "Fast_dLLM_QwenForCausalLM": Family("fast_dllm", _FastDllm),
    "Qwen2MoeForCausalLM": Family("qwen2_moe", _Qwen2Moe, _ROUTED),
    "Qwen3MoeForCausalLM": Family("qwen3_moe", _Qwen3Moe, _ROUTED),
}
