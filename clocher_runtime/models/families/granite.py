"""Granite 3 and 4, dense."""

from typing import Annotated, Any

from msgspec import Meta

from clocher_kernels.errors import UnsupportedModel
from clocher_runtime.models.config import Decoder, read_config
from clocher_runtime.models.config_fields import WHERE, Factor, Size
from clocher_runtime.models.family import Config, Family, From, fused_mlp
from clocher_runtime.models.spec import ModelSpec


class _Granite(Decoder, kw_only=True):
    mlp_bias: bool = False
    embedding_multiplier: Factor = 1.0
    logits_scaling: Factor = 1.0
    residual_multiplier: Factor = 1.0
    attention_multiplier: Factor = 1.0

    def granite(self, family: str, **more: Any) -> ModelSpec:
        """Return the model: what all Granites have, and what the family adds."""
        bias = self.attention_bias
        return self.spec(
            family,
            qkv_bias=bias,
            o_bias=bias,
            embedding_scale=self.embedding_multiplier,
            logit_scale=1 / self.logits_scaling,
            residual_scale=self.residual_multiplier,
            attention_scale=self.attention_multiplier,
            **more,
        )


def granite(config: Config) -> ModelSpec:
    """Granite 3: Llama with a factor for embeddings, residuals, attention and logits."""
    read = read_config(config, _Granite)
    return read.granite("granite", mlp_bias=read.mlp_bias)


class _Hybrid(_Granite, kw_only=True):
    shared_intermediate_size: Size = 1024
    num_local_experts: Annotated[int, Meta(ge=0, le=65536)] = 8
    layer_types: list[Any] | None = None
    position_embedding_type: str | None = None


def granite_hybrid(config: Config) -> ModelSpec:
    """Granite 4 without Mamba layers and experts: Granite 3 in other tensors.

    Raises:
        UnsupportedModel: it has Mamba layers or experts.
    """
    read = read_config(config, _Hybrid)
    kinds = {"attention", "full_attention"}
    if read.layer_types is None or not kinds.issuperset(map(str, read.layer_types)):
        raise UnsupportedModel(
            f"{WHERE}: layers of Mamba; Clocher runs the Granite 4 models whose layers are all "
            "attention (micro, 350m, 1b)"
        )
    if read.num_local_experts:
        raise UnsupportedModel(
            f"{WHERE}: num_local_experts is {read.num_local_experts}; Clocher runs the Granite 4 "
            "models without experts (micro, 350m, 1b)"
        )
    layers = range(read.num_hidden_layers)
    return read.granite(
        "granite_hybrid",
        intermediate_size=read.shared_intermediate_size,
        unrotated=() if read.position_embedding_type == "rope" else tuple(layers),
    )


GRANITE = Family(granite)
GRANITE_HYBRID = Family(
    granite_hybrid,
    {**fused_mlp("shared_mlp.input_linear"), "mlp.down_proj": (From("shared_mlp.output_linear"),)},
)
