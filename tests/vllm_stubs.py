"""As much of vLLM 0.33 as its plug-in touches, under vLLM's names, for tests without vLLM.

Written after vllm/model_executor/layers/{linear.py,fused_moe/routed_experts.py,quantization/*.py}:
who calls which method of a quantisation when, and how loaders cut what a file has.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

QUANTIZATION_METHODS: list[str] = ["fp8", "mxfp4"]
REGISTERED: dict[str, type] = {}
CALLS: list[str] = []


def register_quantization_config(name: str) -> Callable[[type], type]:
    def wrapped(cls: type) -> type:
        assert issubclass(cls, QuantizationConfig)
        if name not in QUANTIZATION_METHODS:
            QUANTIZATION_METHODS.append(name)
        REGISTERED[name] = cls
        CALLS.append(name)
        return cls

    return wrapped


def set_weight_attrs(weight: torch.Tensor, attrs: dict[str, Any] | None) -> None:
    for key, value in (attrs or {}).items():
        assert not hasattr(weight, key), f"Overwriting existing tensor attribute: {key}"
        setattr(weight, key, value)


class QuantizeMethodBase(ABC):
    @abstractmethod
    def create_weights(self, layer: torch.nn.Module, *args: Any, **attrs: Any) -> None: ...

    @abstractmethod
    def apply(self, layer: torch.nn.Module, *args: Any, **more: Any) -> torch.Tensor: ...

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        return


class QuantizationConfig(ABC):
    def __init__(self) -> None:
        self.packed_modules_mapping: dict[str, list[str]] = {}

    @abstractmethod
    def get_name(self) -> str: ...

    @abstractmethod
    def get_supported_act_dtypes(self) -> list[torch.dtype]: ...

    @classmethod
    @abstractmethod
    def get_min_capability(cls) -> int: ...

    @staticmethod
    @abstractmethod
    def get_config_filenames() -> list[str]: ...

    @classmethod
    @abstractmethod
    def from_config(cls, config: dict[str, Any]) -> "QuantizationConfig": ...

    @abstractmethod
    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any: ...


class LinearMethodBase(QuantizeMethodBase):
    pass


class UnquantizedLinearMethod(LinearMethodBase):
    def create_weights(
        self, layer: torch.nn.Module, k: int, n: list[int], *sizes: Any, **attrs: Any
    ) -> None:
        raise AssertionError("no test loads floats")

    def apply(self, layer: torch.nn.Module, *args: Any, **more: Any) -> torch.Tensor:
        raise AssertionError("no test applies floats")


class LinearBase(torch.nn.Module):
    """A layer of `sizes` outputs on one of `ranks` GPUs: cut by outputs, or by inputs."""

    def __init__(
        self,
        config: QuantizationConfig,
        inputs: int,
        sizes: list[int],
        *,
        rank: int = 0,
        ranks: int = 1,
        by_inputs: bool = False,
        prefix: str = "layers.0.proj",
    ) -> None:
        super().__init__()
        self.rank, self.ranks, self.by_inputs = rank, ranks, by_inputs
        self.sizes = sizes if by_inputs else [size // ranks for size in sizes]
        self.quant_method = config.get_quant_method(self, prefix)
        self.quant_method.create_weights(
            layer=self,
            input_size_per_partition=inputs // ranks if by_inputs else inputs,
            output_partition_sizes=self.sizes,
            input_size=inputs,
            output_size=sum(sizes),
            params_dtype=torch.bfloat16,
            weight_loader=self.weight_loader,
        )

    def weight_loader(self, param: Any, loaded: torch.Tensor, shard: int | None = None) -> None:
        room = param.data
        if self.by_inputs:
            dim = getattr(param, "input_dim", None)
        else:
            dim = param.output_dim
            if shard is not None:
                room = room.narrow(dim, sum(self.sizes[:shard]), self.sizes[shard])
        if dim is not None:
            loaded = loaded.narrow(dim, self.rank * room.shape[dim], room.shape[dim])
        assert room.shape == loaded.shape
        room.copy_(loaded)

    def load(self, name: str, loaded: torch.Tensor, shard: int | None = None) -> None:
        param = dict(self.named_parameters())[name]
        param.weight_loader(param, loaded, shard)  # type: ignore[operator]

    def ready(self) -> "LinearBase":
        self.quant_method.process_weights_after_loading(self)
        return self

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self.quant_method.apply(self, x, bias)


class FusedMoEMethodBase(QuantizeMethodBase):
    def __init__(self, moe: Any) -> None:
        self.moe = moe
        self.moe_kernel = None

    def maybe_roundup_sizes(
        self, hidden: int, inner: int, act_dtype: torch.dtype, parallel: Any
    ) -> tuple[int, int]:
        return hidden, inner

    @abstractmethod
    def get_fused_moe_quant_config(self, layer: torch.nn.Module) -> Any: ...


class MoEActivation(Enum):
    SILU = "silu"
    GELU = "gelu"
    SWIGLUOAI = "swigluoai"
    SWIGLUOAI_UNINTERLEAVE = "swigluoai_uninterleave"


class RoutedExperts(torch.nn.Module):
    """Experts of a layer; `inner` of each are on this GPU, and those that `expert_map` names."""

    def __init__(
        self,
        config: QuantizationConfig,
        experts: int,
        hidden: int,
        inner: int,
        activation: MoEActivation,
        *,
        has_bias: bool = False,
        expert_map: torch.Tensor | None = None,
        on_input: bool = False,
        limit: float | None = None,
        prefix: str = "layers.0.experts",
    ) -> None:
        super().__init__()
        self.moe_config = SimpleNamespace(activation=activation, has_bias=has_bias)
        self.expert_map, self.apply_router_weight_on_input = expert_map, on_input
        self.swiglu_limit, self.swiglu_alpha, self.swiglu_beta = limit, None, None
        self.quant_method = config.get_quant_method(self, prefix)
        hidden, self.inner = self.quant_method.maybe_roundup_sizes(
            hidden, inner, torch.bfloat16, None
        )
        self.quant_method.create_weights(
            layer=self,
            num_experts=experts,
            hidden_size=hidden,
            unpadded_hidden_size=hidden,
            intermediate_size_per_partition=self.inner,
            params_dtype=torch.bfloat16,
            weight_loader=self.weight_loader,
            global_num_experts=experts,
        )

    def weight_loader(
        self,
        param: Any,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        assert shard_id in ("w1", "w2", "w3"), shard_id
        room = param.data[expert_id]
        if shard_id != "w2":
            half = room.shape[0] // 2
            room = room.narrow(0, half if shard_id == "w3" else 0, half)
        room.copy_(loaded_weight)
        return True if return_success else None

    def load(self, name: str, loaded: torch.Tensor, shard: str | None, expert: int | None) -> None:
        param = dict(self.named_parameters())[name]
        param.weight_loader(  # type: ignore[operator]
            param, loaded, weight_name=name, shard_id=shard, expert_id=expert
        )

    def ready(self) -> "RoutedExperts":
        self.quant_method.process_weights_after_loading(self)
        return self

    def forward(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return self.quant_method.apply(
            layer=self,
            x=x,
            topk_weights=weights,
            topk_ids=ids,
            shared_experts=None,
            shared_experts_input=None,
        )


_LAYERS = "vllm.model_executor.layers"
_MODULES: dict[str, tuple[Any, ...]] = {
    "vllm": (),
    "vllm.model_executor": (),
    "vllm.model_executor.utils": (set_weight_attrs,),
    _LAYERS: (),
    f"{_LAYERS}.linear": (LinearBase, LinearMethodBase, UnquantizedLinearMethod),
    f"{_LAYERS}.fused_moe": (FusedMoEMethodBase, RoutedExperts),
    f"{_LAYERS}.quantization": (register_quantization_config,),
    f"{_LAYERS}.quantization.base_config": (QuantizationConfig, QuantizeMethodBase),
}


def install(patch: pytest.MonkeyPatch) -> None:
    """Put the stubs where vLLM would be, and forget modules that were made with others."""
    for name, objects in _MODULES.items():
        module = ModuleType(name)
        for each in objects:
            setattr(module, each.__name__, each)
        patch.setitem(sys.modules, name, module)
    sys.modules[f"{_LAYERS}.quantization"].QUANTIZATION_METHODS = QUANTIZATION_METHODS  # type: ignore[attr-defined]
