"""BitNet b1.58: ternary linears with int8 activations, sub-norms, squared ReLU."""

from clocher_runtime.models.families.dense import bitnet_settings, sizes
from clocher_runtime.models.fields import Fields
from clocher_runtime.models.spec import ModelSpec


def spec(fields: Fields) -> ModelSpec:
    """Read a BitNetForCausalLM config; defaults are those of transformers' BitNetConfig.

    Source: Ma et al. 2025, BitNet b1.58 2B4T (arXiv 2504.12285).
    """
    fields.choice("hidden_act", "relu2", ("relu2",))
    base = sizes(
        fields,
        vocab_size=128256,
        hidden_size=2560,
        intermediate_size=6912,
        layers=30,
        heads=20,
        kv_heads=5,
        head_dim=None,
        positions=2048,
        eps=1e-5,
        theta=500000.0,
        tied=False,
    )
    layers, bias = base.pop("layers"), fields.flag("attention_bias", False)
    return ModelSpec(
        family="bitnet",
        windows=(0,) * layers,
        act="relu2",
        qkv_bias=bias,
        o_bias=bias,
        sub_norms=True,
        **base,
        **bitnet_settings(fields),
    )
