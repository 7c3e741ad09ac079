"""Llama and its relatives: SmolLM3, Phi, BitNet, OLMo, Granite, Mistral and Llama 4."""

from typing import Annotated, Any, ClassVar

from msgspec import Meta, Struct

from clocher_kernels.errors import FormatError, UnsupportedModel
from clocher_runtime.disk.strict_json import given, one_of, read_as, shown
from clocher_runtime.models.config import (
    LAYER_TYPES,
    WHERE,
    Count,
    Decoder,
    Epsilon,
    Experts,
    Factor,
    Interval,
    LayerNumber,
    Size,
    Usual,
    checked,
)
from clocher_runtime.models.families import FUSED_QKV, Family, From, each_expert, fused_mlp
from clocher_runtime.models.spec import MoeSpec, QueryGrowth, RopeSpec


class _Llama(Decoder, kw_only=True):
    """Llama 2 and 3: RMSNorm, RoPE, grouped-query attention, SwiGLU."""

    mlp_bias: bool = False

    def more(self) -> dict[str, Any]:
        return {"mlp_bias": self.mlp_bias, **_bitnet(self)}


class _OnlineNorm(Struct):
    use_rms_norm: bool = False
    rms_norm_eps: Epsilon = 1e-6


def _bitnet(config: Decoder) -> dict[str, Any]:
    """Return what a BitNetQuantConfig (transformers) changes."""
    settings, where = config.quantization_config, f"{WHERE}: quantization_config"
    if settings is None or settings.get("quant_method") != "bitnet":
        return {}
    mode = one_of(settings, "quantization_mode", "offline", ("offline", "online"), where)
    linear = one_of(settings, "linear_class", "bitlinear", ("bitlinear", "autobitlinear"), where)
    norm = read_as(given(settings), _OnlineNorm, where)
    return {
        "ternarize": mode == "online" and linear == "autobitlinear",
        "input_norm_eps": norm.rms_norm_eps if norm.use_rms_norm else 0.0,
    }


class _BitNet(Decoder, kw_only=True):
    """BitNet b1.58 (arXiv 2504.12285): ternary linears, int8 activations, sub-norms, ReLU^2."""

    USUAL = Usual(128256, 2560, 6912, 30, 20, 5, None, 2048, 1e-5, 500000.0)
    ACTIVATION: ClassVar[str] = "relu2"

    def more(self) -> dict[str, Any]:
        return {"sub_norms": True, **_bitnet(self)}


class _SomeUnrotated(Decoder, kw_only=True):
    """Layers with a 0 in a list, or every n-th, are not rotated."""

    no_rope_layers: list[bool | int] | None = None
    no_rope_layer_interval: Interval = 4

    def unrotated(self) -> tuple[int, ...]:
        layers, every = self.num_hidden_layers, self.no_rope_layer_interval
        rotated = self.no_rope_layers or [(i + 1) % every != 0 for i in range(layers)]
        if len(rotated) < layers:
            raise FormatError(
                f"{WHERE}: no_rope_layers is {shown(rotated)}; expected {layers} numbers"
            )
        return tuple(i for i in range(layers) if not rotated[i])


class _SmolLm3(_SomeUnrotated, kw_only=True):
    """SmolLM3: Llama with every fourth layer not rotated."""

    USUAL = Usual(128256, 2048, 11008, 36, 16, 4, None, 32768, 1e-6, 2000000.0)

    tie_word_embeddings: bool = True
    mlp_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: Size | None = None

    def more(self) -> dict[str, Any]:
        plain = self.unrotated()
        window = self.sliding_window if self.use_sliding_window else None
        windows = self.windows(window, lambda layer: window and layer in plain)
        return {"windows": windows, "unrotated": plain, "mlp_bias": self.mlp_bias}


class _Phi3(Decoder, kw_only=True):
    """Phi-3, Phi-4 (arXiv 2404.14219, section 2): fused projections, LongRoPE, partial rotation."""

    USUAL = Usual(32064, 3072, 8192, 32, 32, None, None, 4096, 1e-5)

    original_max_position_embeddings: Size | None = 4096
    sliding_window: Size | None = None

    @property
    def scaling(self) -> dict[str, Any] | None:
        rope = super().scaling
        # The first long-context configs used this name.
        if rope is not None and "short_factor" in rope and rope.get("type") == "yarn":
            return {**rope, "type": "longrope"}
        return rope

    def more(self) -> dict[str, Any]:
        return {"windows": (self.sliding_window or 0,) * self.num_hidden_layers}


class _Olmo2(Decoder, kw_only=True):
    """OLMo 2 (arXiv 2501.00656, section 2.1): post-norms only, norms of whole queries and keys."""

    USUAL = Usual(50304, rms_norm_eps=1e-5)

    def more(self) -> dict[str, Any]:
        return {"pre_norms": False, "post_norms": True, "qk_norm": "rows"}


class _Olmo3(_Olmo2, kw_only=True):
    """OLMo 3: OLMo 2 where three of four layers slide, with the plain rotation."""

    USUAL = Usual(50304, rms_norm_eps=1e-5, rope_theta=500000.0)

    sliding_window: Size | None = 4096

    def more(self) -> dict[str, Any]:
        rope = self.rope(LAYER_TYPES[0])
        if self.rope_parameters is None:  # what stretches others is not for them
            rope = RopeSpec(self.rope_theta)
        windows = self.windows(self.sliding_window, lambda layer: (layer + 1) % 4)
        return {**super().more(), "windows": windows, "window_rope": rope}


class _Granite(Decoder, kw_only=True):
    """Granite 3: Llama with factors for embeddings, residuals, attention and logits."""

    mlp_bias: bool = False
    embedding_multiplier: Factor = 1.0
    logits_scaling: Factor = 1.0
    residual_multiplier: Factor = 1.0
    attention_multiplier: Factor = 1.0

    def more(self) -> dict[str, Any]:
        return {
            "mlp_bias": self.mlp_bias,
            "embedding_scale": self.embedding_multiplier,
            "logit_scale": 1 / self.logits_scaling,
            "residual_scale": self.residual_multiplier,
            "attention_scale": self.attention_multiplier,
        }


class _GraniteHybrid(_Granite, kw_only=True):
    """Granite 4 without Mamba layers and experts: Granite 3 with other tensor names."""

    shared_intermediate_size: Size = 1024
    num_local_experts: Count = 8
    position_embedding_type: str | None = None

    def more(self) -> dict[str, Any]:
        runs = "Clocher runs the Granite 4 models"
        kinds = {"attention", "full_attention"}
        if self.layer_types is None or not kinds.issuperset(map(str, self.layer_types)):
            raise UnsupportedModel(
                f"{WHERE}: layers of Mamba; {runs} whose layers are all attention (micro, 350m, 1b)"
            )
        if self.num_local_experts:
            raise UnsupportedModel(
                f"{WHERE}: num_local_experts is {self.num_local_experts}; {runs} without experts "
                "(micro, 350m, 1b)"
            )
        is_rotated = self.position_embedding_type == "rope"
        return {
            **super().more(),
            "mlp_bias": False,
            "intermediate_size": self.shared_intermediate_size,
            "unrotated": () if is_rotated else tuple(range(self.num_hidden_layers)),
        }


class _Mistral(Decoder, kw_only=True):
    """Mistral: Llama with a sliding window on every layer, none if `sliding_window` is null.

    Attention linears never have a bias, whatever `attention_bias` says.
    """

    USUAL = Usual(32000, 4096, 14336, 32, 32, 8, None, 131072)

    sliding_window: Size | None = 4096

    def more(self) -> dict[str, Any]:
        windows = (self.sliding_window or 0,) * self.num_hidden_layers
        return {"windows": windows, "qkv_bias": False, "o_bias": False}


class _Mixtral(_Mistral, kw_only=True):
    """Mixtral (arXiv 2401.04088): experts weighted by the softmax over the chosen ones."""

    USUAL = Usual(32000, 4096, 14336, 32, 32, 8, None, 131072, 1e-5, 1000000.0)

    sliding_window: Size | None = None
    num_local_experts: Experts = 8
    num_experts_per_tok: Experts = 2

    def more(self) -> dict[str, Any]:
        experts = self.num_local_experts
        active = min(self.num_experts_per_tok, experts)
        moe = MoeSpec(experts=experts, active=active, inner=self.intermediate_size)
        return {**super().more(), "moe": moe}


class _Growth(Struct):
    llama_4_scaling_beta: Annotated[float, Meta(ge=0.0, le=100.0)] = 0.0
    original_max_position_embeddings: Size = 16384


class _Ministral3(_Mistral, kw_only=True):
    """Ministral 3: Mistral with YaRN, and queries that grow beyond the training context."""

    USUAL = Usual(131072, 4096, 14336, 34, 32, 8, 128, 262144, 1e-5)
    SCALING: ClassVar[dict[str, Any] | None] = {
        "type": "yarn",
        "rope_theta": 1000000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "mscale_all_dim": 1.0,
        "mscale": 1.0,
        "llama_4_scaling_beta": 0.1,
    }

    sliding_window: Size | None = None

    def more(self) -> dict[str, Any]:
        read = read_as(given(self.scaling or {}), _Growth, f"{WHERE}: rope_parameters")
        beta, every = read.llama_4_scaling_beta, read.original_max_position_embeddings
        return {**super().more(), "query_growth": QueryGrowth(beta, every) if beta else None}


class _Llama4(_SomeUnrotated, kw_only=True):
    """Llama 4 (transformers Llama4TextModel): scaled expert inputs, chunks, layers without RoPE."""

    USUAL = Usual(202048, 5120, 8192, 48, 40, 8, 128, 131072, 1e-5, 500000.0)

    intermediate_size_mlp: Size = 16384
    num_experts_per_tok: Experts = 1
    num_local_experts: Experts = 16
    moe_layers: list[LayerNumber] | None = None
    interleave_moe_layer_step: Interval = 1
    use_qk_norm: bool = True
    attention_chunk_size: Size | None = 8192
    attn_temperature_tuning: bool = True
    floor_scale: Size = 8192
    attn_scale: Annotated[float, Meta(ge=0.0, le=100.0)] = 0.1

    def more(self) -> dict[str, Any]:
        layers, step = self.num_hidden_layers, self.interleave_moe_layer_step
        plain = self.unrotated()
        sparse = range(step - 1, layers, step) if self.moe_layers is None else self.moe_layers
        grows = self.attn_temperature_tuning and plain
        size, types = self.attention_chunk_size or 0, self.layer_types
        chunked, full = "chunked_attention", "full_attention"
        if types is None:
            types = [full if layer in plain else chunked for layer in range(layers)]
        checked(types, (chunked, full), layers)
        return {
            "chunks": tuple(size if kind == chunked else 0 for kind in types),
            "unrotated": plain,
            "query_growth": QueryGrowth(self.attn_scale, self.floor_scale, 1) if grows else None,
            "intermediate_size": self.intermediate_size_mlp,
            "qk_norm": "after" if self.use_qk_norm else "",
            "moe": MoeSpec(
                experts=self.num_local_experts,
                active=min(self.num_experts_per_tok, self.num_local_experts),
                inner=self.intermediate_size,
                score="sigmoid",
                scale_inputs=True,
                shared=self.intermediate_size,
                dense_layers=tuple(i for i in range(layers) if i not in sparse),
            ),
        }


def _moved(*names: str) -> dict[str, tuple[From, ...]]:
    return {name: (From(name.replace("mlp.", "feed_forward.", 1)),) for name in names}


_MLP = [f"mlp.{each}{n}_proj" for each in ("", "shared_expert.") for n in ("gate", "up", "down")]
_EXPERTS = "feed_forward.experts.gate_up_proj"
_BITNET = Family("bitnet", _BitNet)
FAMILIES = {
    "LlamaForCausalLM": Family("llama", _Llama),
    "BitNetForCausalLM": _BITNET,
    "BitnetForCausalLM": _BITNET,
    "SmolLM3ForCausalLM": Family("smollm3", _SmolLm3),
    "Phi3ForCausalLM": Family("phi3", _Phi3, {**FUSED_QKV, **fused_mlp("mlp.gate_up_proj")}),
    "Olmo2ForCausalLM": Family("olmo2", _Olmo2),
    "Olmo3ForCausalLM": Family("olmo3", _Olmo3),
    "GraniteForCausalLM": Family("granite", _Granite),
    "GraniteMoeHybridForCausalLM": Family(
        "granite_hybrid",
        _GraniteHybrid,
        {
            **fused_mlp("shared_mlp.input_linear"),
            "mlp.down_proj": (From("shared_mlp.output_linear"),),
        },
    ),
    "MistralForCausalLM": Family("mistral", _Mistral),
    "Ministral3ForCausalLM": Family("ministral3", _Ministral3),
    "MixtralForCausalLM": Family(
        "mixtral",
        _Mixtral,
        {
            "mlp.router": (From("block_sparse_moe.gate"),),
            **each_expert("block_sparse_moe.experts.{e}.", "w1", "w3", "w2"),
        },
    ),
    "Llama4ForCausalLM": Family(
        "llama4",
        _Llama4,
        {
            "self_attn.q_proj": (From("self_attn.q_proj", "paired"),),
            "self_attn.k_proj": (From("self_attn.k_proj", "paired"),),
            **_moved(*_MLP, "mlp.router", "mlp.experts.down_proj"),
            "mlp.experts.gate_up_proj": (From(_EXPERTS, "first"), From(_EXPERTS, "second")),
        },
    ),
}
