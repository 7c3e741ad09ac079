"""How a small model stands in a large one of its family: which index goes where, which factors.

`inflate` says what it is for.
"""

import math
from dataclasses import dataclass, fields, replace

import numpy as np

from clocher_kernels.errors import UsageError
from clocher_kernels.formats import Format
from clocher_kernels.quant_tensor import encode
from clocher_runtime.convert.placed_tensors import CELL, Axis
from clocher_runtime.models.inventory import EMBED, HEAD, NORM
from clocher_runtime.models.rope import inverse_frequencies
from clocher_runtime.models.spec import ModelSpec

NEVER = -1e4
"""Logit of what must not be chosen, an expert or a token beyond the vocabulary, at the most."""
PADDING = np.tile(np.array([-6e4, 6e4], np.float32), CELL // 2)
"""What the logits of padding read the spare channels with; f16 holds it."""
PLACES: dict[str, tuple[str, ...]] = {
    EMBED: ("vocabulary", "copies"),
    HEAD: ("vocabulary", "stream"),
    NORM: ("stream",),
    "input_layernorm.weight": ("copies",),
    "post_attention_layernorm.weight": ("stream",),
    "self_attn.q_proj.weight": ("queries", "asked"),
    "self_attn.q_proj.bias": ("queries",),
    "self_attn.k_proj.weight": ("keys", "stream"),
    "self_attn.k_proj.bias": ("keys",),
    "self_attn.v_proj.weight": ("values", "stream"),
    "self_attn.v_proj.bias": ("values",),
    "self_attn.o_proj.weight": ("copies", "attended"),
    "self_attn.o_proj.bias": ("copies",),
    "self_attn.sinks": ("heads",),
    "self_attn.attn_sub_norm.weight": ("attended",),
    "mlp.gate_proj.weight": ("inner", "stream"),
    "mlp.gate_proj.bias": ("inner",),
    "mlp.up_proj.weight": ("inner", "stream"),
    "mlp.up_proj.bias": ("inner",),
    "mlp.down_proj.weight": ("copies", "inner"),
    "mlp.down_proj.bias": ("copies",),
    "mlp.ffn_sub_norm.weight": ("inner",),
    "mlp.router.weight": ("experts", "stream"),
    "mlp.router.bias": ("experts",),
    "mlp.experts.gate_up_proj": ("experts", "gate_up", "stream"),
    "mlp.experts.gate_up_proj_bias": ("experts", "gate_up"),
    "mlp.experts.down_proj": ("experts", "copies", "inner"),
    "mlp.experts.down_proj_bias": ("experts", "copies"),
}
"""Names of the axes of each tensor; in a layer, what follows its number."""

_LOUDEST = 1e3  # root mean square that the stream of a trained model stays below
_SIZES = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "windows",
]


@dataclass(frozen=True, slots=True)
class Fit:
    """A small model in a large one.

    Attributes:
        own: the small model.
        large: the large one, which is like it in all but sizes and the eps of norms.
        embedding: format of the large model's embedding.
        scaled: queries, values and what enters the sub-norms are scaled in their matrices
            (ternary); else queries read channels of their own.
    """

    own: ModelSpec
    large: ModelSpec
    embedding: Format
    scaled: bool

    @property
    def copies(self) -> int:
        """How often the channels of the small model's stream stand in the large one's."""
        return 1 if self.scaled else 2

    @property
    def spare(self) -> int:
        """The first of the channels that hold the same for every token."""
        return self.copies * self.own.hidden_size

    @property
    def twins(self) -> int:
        """How often an expert stands in the large model."""
        own, large = self.own.moe, self.large.moe
        return large.active // own.active if own and large else 1

    @property
    def constant(self) -> np.ndarray:
        """What the spare channels hold: most of the energy that eps stands for, fp32 [CELL]."""
        most = math.sqrt(0.9 * self.spare * self.own.norm_eps / CELL)
        values = np.full((1, CELL), 2.0 ** math.floor(math.log2(most)), np.float32)
        return np.asarray(encode(values, self.embedding).decode()[0])

    @property
    def eps(self) -> float:
        """Of the large model's norms: the rest."""
        energy = float((self.constant.astype(np.float64) ** 2).sum())
        return (self.spare * self.own.norm_eps - energy) / self.large.hidden_size

    @property
    def stretch(self) -> int:
        """Values of a large head for each of a small one."""
        return self.large.head_dim // self.own.head_dim

    @property
    def norm_factor(self) -> float:
        """Of the weights of norms."""
        return math.sqrt(self.spare / self.large.hidden_size)

    @property
    def alarm(self) -> np.ndarray:
        """Weights of the last norm on the spare channels, so that PADDING reads at most NEVER."""
        seen = self.constant / (_LOUDEST * self.norm_factor) * np.abs(PADDING)
        return np.asarray(-2 * NEVER / seen.sum() * np.sign(-PADDING), np.float32)

    def factors(self) -> dict[str, float]:
        """Return factors of tensors' values by name as in `PLACES`; of others 1."""
        own, large = self.own, self.large
        query = math.sqrt(self.stretch)
        found = dict.fromkeys(
            (NORM, "input_layernorm.weight", "post_attention_layernorm.weight"), self.norm_factor
        )
        found["self_attn.q_proj.bias"] = query
        if not self.scaled:
            return found
        found["self_attn.q_proj.weight"] = query
        if own.sub_norms:
            for norm, source, share in (
                ("self_attn.attn_sub_norm", "self_attn.v_proj", self._attended_share),
                (
                    "mlp.ffn_sub_norm",
                    "mlp.up_proj",
                    own.intermediate_size / large.intermediate_size,
                ),
            ):
                found[f"{norm}.weight"] = math.sqrt(share)
                for kind in ("weight", "bias"):
                    found[f"{source}.{kind}"] = math.sqrt(large.norm_eps / own.norm_eps / share)
        return found

    @property
    def _attended_share(self) -> float:
        """Of the values that attention gives, those that are the small model's, or copies."""
        own, large = self.own, self.large
        heads = own.num_kv_heads * (large.num_heads // large.num_kv_heads)
        return heads * own.head_dim / (large.num_heads * large.head_dim)

    def axes(self) -> dict[str, Axis]:
        """Return the axes that `PLACES` names."""
        own, large = self.own, self.large
        hidden, channels = own.hidden_size, np.arange(own.hidden_size)
        small, wide = own.head_dim, large.head_dim
        group, room = (m.num_heads // m.num_kv_heads for m in (own, large))
        kv = np.arange(own.num_kv_heads)
        # Small heads by the large ones that hold them; only the first of each is read.
        holders = (kv[:, None] * room + np.arange(room)).reshape(-1)
        held = (kv[:, None] * group + np.arange(room) % group).reshape(-1)
        is_read = holders % room < group
        dims = np.arange(small)
        turned = dims * self.stretch  # where a pair has the frequency that it had

        def in_heads(to: np.ndarray, of: np.ndarray, place: np.ndarray, heads: int) -> Axis:
            return Axis(
                heads * wide,
                (to[:, None] * wide + place).reshape(-1),
                (of[:, None] * small + dims).reshape(-1),
            )

        axes = {
            "stream": Axis(large.hidden_size, channels, channels),
            "asked": Axis(large.hidden_size, channels + self.spare - hidden, channels),
            "copies": Axis(
                large.hidden_size, np.arange(self.spare), np.tile(channels, self.copies)
            ),
            "queries": in_heads(holders, held, turned, large.num_heads),
            "keys": in_heads(kv, kv, turned, large.num_kv_heads),
            "values": in_heads(kv, kv, dims, large.num_kv_heads),
            "attended": in_heads(holders[is_read], held[is_read], dims, large.num_heads),
            "heads": Axis(large.num_heads, holders, held),
            "inner": first(own.intermediate_size, large.intermediate_size),
            "gate_up": first(2 * own.intermediate_size, 2 * large.intermediate_size),
            "vocabulary": first(own.vocab_size, large.vocab_size),
        }
        if own.moe is not None and large.moe is not None:
            copies = np.arange(own.moe.experts * self.twins)
            axes["experts"] = Axis(large.moe.experts, copies, copies % own.moe.experts)
        return axes

    def check(self, preset: str) -> None:
        """Raise UsageError unless the small model fits."""
        own, large = self.own, self.large
        self._check_alike(preset)
        groups = [model.num_heads // model.num_kv_heads for model in (own, large)]
        sizes = [
            ("layers", own.num_layers, large.num_layers),
            ("tokens", own.vocab_size, large.vocab_size),
            ("channels", self.spare + CELL, large.hidden_size),
            ("inner channels", own.intermediate_size, large.intermediate_size),
            ("key and value heads", own.num_kv_heads, large.num_kv_heads),
            ("query heads for each of these", groups[0], groups[1]),
            ("values in a head", own.head_dim, large.head_dim),
        ]
        multiples: list[tuple[str, int, int]] = [("values in a head", own.head_dim, large.head_dim)]
        if own.moe and large.moe:
            sizes.append(("experts", own.moe.experts * self.twins, large.moe.experts))
            multiples.append(("active experts", own.moe.active, large.moe.active))
        if own.sub_norms:
            multiples.append(("query heads for each of key and value", groups[0], groups[1]))
        for what, needed, there in sizes:
            if needed > there:
                raise UsageError(
                    f"{preset} has {there} {what}, the model needs {needed}; choose a larger preset"
                )
        for what, needed, there in multiples:
            if there % needed:
                raise UsageError(
                    f"{preset} has {there} {what}; expected a multiple of the model's {needed}"
                )
        wanted = inverse_frequencies(own.rope, own.head_dim, own.max_positions)
        found = inverse_frequencies(large.rope, large.head_dim, own.max_positions)
        if not np.allclose(found[:: self.stretch], wanted, rtol=1e-5, atol=0):
            raise UsageError(
                f"heads of {large.head_dim} have not the frequencies of the model's, of "
                f"{own.head_dim}, with a rotation of kind {own.rope.kind}; choose another preset"
            )

    def _check_alike(self, preset: str) -> None:
        """Raise UsageError if the models differ in more than sizes."""
        own, large = self.own, self.large
        sizes = {name: getattr(large, name) for name in _SIZES}
        moe = (
            large.moe
            and own.moe
            and replace(
                own.moe, experts=large.moe.experts, active=large.moe.active, inner=large.moe.inner
            )
        )
        tied = large.tied and own.tied
        grown = replace(own, **sizes, moe=moe, norm_eps=large.norm_eps, tied=tied)
        differ = [
            field.name
            for field in fields(ModelSpec)
            if getattr(grown, field.name) != getattr(large, field.name)
        ]
        if large.windows[: own.num_layers] != own.windows and large.num_layers >= own.num_layers:
            differ.append("windows")
        if own.input_norm_eps:
            differ.append("input_norm_eps")
        if differ:
            raise UsageError(
                f"{preset} is of another kind than the model: other {', '.join(differ)}; choose a "
                "preset that differs in sizes alone"
            )


def first(count: int, size: int) -> Axis:
    """Return an axis whose first indices are the small tensor's."""
    return Axis(size, np.arange(count), np.arange(count))
