"""Routed experts of vLLM by `torch.ops.clocher.moe_gate_up` and `moe_down`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase

import clocher_kernels.torch  # noqa: F401  # registers torch.ops.clocher
from clocher_kernels.errors import UsageError
from clocher_kernels.formats import Format
from clocher_vllm.planes import add, names, pack, take

_BLOCK = 32
"""Weights that share a scale in MXFP4."""


class _Gate(NamedTuple):
    """How gate and up become one, as `moe_gate_up` is told.

    Attributes:
        act: its name.
        alternates: vLLM has their rows in turns, as the kernels do; else one behind the other.
    """

    act: str
    alternates: bool


_GATES = {
    "silu": _Gate("silu", False),
    "swigluoai": _Gate("clamped", True),
    "swigluoai_uninterleave": _Gate("clamped", False),
}
_LIMIT, _ALPHA = 7.0, 1.702  # gpt-oss: vllm/model_executor/layers/fused_moe/oracle/mxfp4.py


class ClocherMoEMethod(FusedMoEMethodBase):
    """Weights of routed experts in a format of Clocher's.

    Args:
        moe: vLLM's facts of the layer.
        fmt: the format.
        act_prec: see `clocher_kernels.linear`.
        stored: the files have MXFP4 experts of gpt-oss; else floats, rounded after loading.

    Raises:
        UsageError: the experts have an activation that the kernels do not have.
    """

    def __init__(self, moe: Any, fmt: Format, act_prec: str, stored: bool) -> None:
        super().__init__(moe)
        if moe.activation.value not in _GATES:
            raise UsageError(
                f"experts with activation {moe.activation.value!r}; there are kernels for "
                f"{', '.join(_GATES)}. Name the experts in modules_to_not_convert"
            )
        if stored:
            self.weight_dtype = "gpt_oss_mxfp4"  # by which vLLM's gpt-oss knows how to load
        self.format, self.act_prec, self.stored = fmt, act_prec, stored
        self._gate, self._names = _GATES[moe.activation.value], names(fmt)

    def maybe_roundup_sizes(
        self,
        hidden_size: int,
        intermediate_size_per_partition: int,
        act_dtype: torch.dtype,
        moe_parallel_config: Any,
    ) -> tuple[int, int]:
        """Return sizes with whole blocks: vLLM cuts gpt-oss's experts between them."""
        hidden, inner = super().maybe_roundup_sizes(
            hidden_size, intermediate_size_per_partition, act_dtype, moe_parallel_config
        )
        return hidden, -(-inner // _BLOCK) * _BLOCK if self.stored else inner

    def create_weights(
        self,
        layer: torch.nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Make room for what the files have; see `FusedMoEMethodBase`."""
        attrs = dict(extra_weight_attrs)
        if self.stored:
            attrs["weight_loader"] = _taking_all(attrs["weight_loader"])
        inner = intermediate_size_per_partition
        layer.clocher_shapes = {
            "w13": [num_experts, 2 * inner, hidden_size],
            "w2": [num_experts, hidden_size, inner],
        }
        for name, (experts, rows, columns) in layer.clocher_shapes.items():
            if self.stored:
                # Zeros: what is between the last rank's share and a whole block adds nothing.
                blocks = torch.zeros(experts, rows, columns // 2, dtype=torch.uint8)
                scales = torch.zeros(experts, rows, columns // _BLOCK, dtype=torch.uint8)
                add(layer, f"{name}_weight", blocks, **attrs)
                add(layer, f"{name}_weight_scale", scales, quant_method="block", **attrs)
            else:
                room = torch.empty(experts, rows, columns, dtype=params_dtype)
                add(layer, f"{name}_weight", room, **attrs)
            if self.moe.has_bias:
                add(
                    layer,
                    f"{name}_bias",
                    torch.zeros(experts, rows, dtype=params_dtype),
                    **attrs,
                )

    def get_fused_moe_quant_config(self, layer: torch.nn.Module) -> None:
        """Return none: vLLM's own kernels have no part in it."""
        return

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Make the planes that the kernels take, with gate and up in turns."""
        clamps = self._gate.act == "clamped"
        if layer.swiglu_beta not in (None, 1.0) or (layer.swiglu_limit is not None and not clamps):
            raise UsageError(
                f"experts with activation {self.moe.activation.value!r}, limit "
                f"{layer.swiglu_limit} and beta {layer.swiglu_beta}; there are kernels for silu "
                "without a limit, and for swigluoai with a beta of 1"
            )
        if not hasattr(layer, "w13_weight"):
            return
        for name, (experts, rows, columns) in layer.clocher_shapes.items():
            weight = take(layer, f"{name}_weight")
            if self.stored:
                whole = weight.view(experts, rows, columns // _BLOCK, _BLOCK // 2)
                add(layer, f"{name}_blocks", whole)
                add(layer, f"{name}_scales", take(layer, f"{name}_weight_scale"))
            elif name == "w13" and not self._gate.alternates:
                pack(layer, f"{name}_", weight, self.format, _in_turns)
            else:
                pack(layer, f"{name}_", weight, self.format)
        if self.moe.has_bias:
            gate = take(layer, "w13_bias").float()
            if not self._gate.alternates:
                experts, rows = gate.shape
                gate = gate.view(experts, 2, rows // 2).transpose(1, 2).reshape(experts, rows)
            add(layer, "w13_bias", gate.contiguous())
            add(layer, "w2_bias", take(layer, "w2_bias").float())

    def apply(
        self,
        layer: torch.nn.Module,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: torch.nn.Module | None = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return what the chosen experts make of x, [M, K] in its type, summed by weight.

        Args:
            layer: the experts.
            x: [M, K].
            topk_weights: [M, A] fp32.
            topk_ids: [M, A], over the experts of all ranks.
            shared_experts: vLLM runs them itself for methods without a kernel object.
            shared_experts_input: for those.
        """
        ids, weights = topk_ids, topk_weights.float()
        here = None
        if layer.expert_map is not None:
            ids = layer.expert_map[ids.long()]
            here = (ids >= 0).float()
            ids, weights = ids.clamp(min=0), weights * here
        ids = ids.to(torch.int32)
        on_input = layer.apply_router_weight_on_input
        clamped: dict[str, float] = {}
        if self._gate.act == "clamped":
            clamped["limit"] = _LIMIT if layer.swiglu_limit is None else layer.swiglu_limit
            clamped["alpha"] = _ALPHA if layer.swiglu_alpha is None else layer.swiglu_alpha
        hidden = torch.ops.clocher.moe_gate_up(
            x,
            ids,
            self._planes(layer, "w13"),
            factors=weights if on_input else None,
            bias=getattr(layer, "w13_bias", None),
            act=self._gate.act,
            **clamped,
            **self._facts(layer, "w13"),
        )
        y: torch.Tensor = torch.ops.clocher.moe_down(
            hidden,
            ids,
            self._planes(layer, "w2"),
            weights=here if on_input else weights,
            bias=getattr(layer, "w2_bias", None),
            **self._facts(layer, "w2"),
        )
        return y

    def _planes(self, layer: torch.nn.Module, name: str) -> list[torch.Tensor]:
        return [getattr(layer, f"{name}_{plane}") for plane in self._names]

    def _facts(self, layer: torch.nn.Module, name: str) -> dict[str, Any]:
        shape = layer.clocher_shapes[name]
        return {"w_format": self.format.name, "w_shape": shape, "act_prec": self.act_prec}


def _in_turns(rows: np.ndarray) -> np.ndarray:
    """Return the rows of gate and up in turns, [2 I, K], from those one behind the other."""
    half = len(rows) // 2
    return np.stack([rows[:half], rows[half:]], axis=1).reshape(rows.shape)


def _taking_all(loader: Callable[..., Any]) -> Callable[..., Any]:
    """Return a loader that also takes all experts at once, as vLLM's gpt-oss hands them over.

    vLLM's own does so for the method name "gpt_oss_mxfp4" only.
    """

    def load(
        param: torch.nn.Parameter,
        loaded_weight: torch.Tensor,
        weight_name: str = "",
        shard_id: str | None = None,
        expert_id: int | None = None,
        return_success: bool = False,
    ) -> bool | None:
        if expert_id is not None:
            done: bool | None = loader(
                param,
                loaded_weight,
                weight_name,
                shard_id=shard_id,
                expert_id=expert_id,
                return_success=return_success,
            )
            return done
        room = param.data[tuple(slice(size) for size in loaded_weight.shape)]
        room.copy_(loaded_weight)
        return True if return_success else None

    return load
