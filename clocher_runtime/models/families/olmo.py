"""OLMo 2 and 3."""

from typing import Any

from clocher_runtime.models.config import LAYER_TYPES, Decoder, layer_windows, read_config
from clocher_runtime.models.config_fields import Epsilon, Size, Theta
from clocher_runtime.models.family import Config, Family
from clocher_runtime.models.spec import ModelSpec, RopeSpec


class _Olmo2(Decoder, kw_only=True):
    vocab_size: Size = 50304
    rms_norm_eps: Epsilon = 1e-5

    def olmo(self, family: str, windows: tuple[int, ...] = (), **more: Any) -> ModelSpec:
        """Return the model: what both have, and what the family adds."""
        bias = self.attention_bias
        return self.spec(
            family,
            windows,
            pre_norms=False,
            post_norms=True,
            qk_norm="rows",
            qkv_bias=bias,
            o_bias=bias,
            **more,
        )


def olmo2(config: Config) -> ModelSpec:
    """OLMo 2: norms of what attention and MLP add, and of whole queries and keys.

    Source: 2 OLMo 2 Furious (arXiv 2501.00656), section 2.1.
    """
    return read_config(config, _Olmo2).olmo("olmo2")


class _Olmo3(_Olmo2, kw_only=True):
    rope_theta: Theta = 500000.0
    sliding_window: Size | None = 4096
    layer_types: list[Any] | None = None


def olmo3(config: Config) -> ModelSpec:
    """OLMo 3: OLMo 2 with three layers of four sliding, which have the plain rotation."""
    read = read_config(config, _Olmo3)
    layers = read.num_hidden_layers
    pattern = tuple(LAYER_TYPES[(i + 1) % 4 == 0] for i in range(layers))
    windows = layer_windows(read.layer_types, layers, read.sliding_window, pattern)
    rope = read.rope(LAYER_TYPES[0])
    if read.rope_parameters is None:  # what stretches others is not for them
        rope = RopeSpec(read.rope_theta)
    return read.olmo("olmo3", windows, window_rope=rope)


OLMO2 = Family(olmo2)
OLMO3 = Family(olmo3)
