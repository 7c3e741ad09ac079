"""What vLLM is told about a model whose weights Clocher's kernels multiply by."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)

from clocher_kernels.errors import UsageError
from clocher_kernels.formats import Bsr
from clocher_kernels.library.arrays import format_of
from clocher_kernels.library.signature import one_of_act_prec
from clocher_vllm import NAME
from clocher_vllm.linear import ClocherLinearMethod
from clocher_vllm.moe import ClocherMoEMethod

_MXFP4 = ("mxfp4", "gpt_oss_mxfp4")
_SETTINGS = ("quant_method", "fmt", "act_prec", "modules_to_not_convert", "on_load")


class ClocherConfig(QuantizationConfig):
    """Which layers are quantised, to which format, and what the files of the model hold.

    Args:
        fmt: name of the format, short or whole: "int4_g128", "int8", "mxfp4".
        act_prec: "int8", "fp32" or "": see `clocher_kernels.linear`.
        modules_to_not_convert: names of layers that keep their floats, or beginnings or ends of
            names.
        stored: what the files hold: "" floats, which are rounded when they are loaded; "planes"
            those of linear layers, as transformers saves them with Clocher's quantiser; "experts"
            the MXFP4 experts of gpt-oss.

    Raises:
        FormatError: no format has this name.
        UsageError: a setting cannot be used.
    """

    def __init__(
        self,
        fmt: str = "int4_g128",
        act_prec: str = "",
        modules_to_not_convert: Sequence[str] | None = None,
        stored: str = "",
    ) -> None:
        super().__init__()
        self.format = format_of(fmt)
        if isinstance(self.format, Bsr):
            raise UsageError(f"{fmt}: vLLM loads no block-sparse rows; take another format")
        self.act_prec = one_of_act_prec(act_prec)
        self.kept = list(modules_to_not_convert or ())
        self.stored = stored

    @classmethod
    def get_name(cls) -> str:
        """Return the name of the method."""
        return NAME

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """Return the types that activations may have."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Return the least compute capability of a GPU, times ten; CPUs have none."""
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Return no files: settings stand in config.json, or there are none."""
        return []

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "ClocherConfig":
        """Read `quantization_config` of a config.json.

        Raises:
            UsageError: it has a setting that is not known.
        """
        if config.get("quant_method") in _MXFP4:
            return cls("mxfp4", stored="experts")
        if unknown := sorted(config.keys() - set(_SETTINGS)):
            raise UsageError(
                f"quantization_config has {unknown[0]!r}; {NAME} knows {', '.join(_SETTINGS)}"
            )
        return cls(
            config.get("fmt", "int4_g128"),
            config.get("act_prec", ""),
            config.get("modules_to_not_convert"),
            "" if config.get("on_load", False) else "planes",
        )

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: Mapping[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Take gpt-oss's MXFP4 experts over from vLLM's own method, if the user says so."""
        is_gpt_oss = getattr(hf_config, "model_type", None) == "gpt_oss"
        asked = user_quant == NAME and hf_quant_cfg.get("quant_method") in _MXFP4
        return NAME if asked and is_gpt_oss else None

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Take names of layers as vLLM has them."""
        self.kept = hf_to_vllm_mapper.apply_list(self.kept)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Return what creates and applies the weights of a layer; None: vLLM's own."""
        if isinstance(layer, LinearBase):
            if self.stored == "experts" or self._keeps(prefix):
                return UnquantizedLinearMethod()
            return ClocherLinearMethod(self.format, self.act_prec, self.stored == "planes")
        if isinstance(layer, RoutedExperts) and self.stored != "planes":
            if self._keeps(prefix):
                return None
            experts = self.stored == "experts"
            return ClocherMoEMethod(layer.moe_config, self.format, self.act_prec, experts)
        return None

    def _keeps(self, prefix: str) -> bool:
        """Return whether a layer keeps its floats; vLLM makes one of several, such as q, k, v.

        Raises:
            UsageError: some of them would, others not.
        """
        parent, _, name = prefix.rpartition(".")
        parts = self.packed_modules_mapping.get(name, [name])
        kept = {self._names(f"{parent}.{part}" if parent else part) for part in parts}
        if len(kept) > 1:
            raise UsageError(
                f"{prefix}: modules_to_not_convert names some of {', '.join(parts)}, which are one "
                "layer in vLLM; name all of them or none"
            )
        return kept.pop()

    def _names(self, name: str) -> bool:
        return any(
            name == each or name.startswith(f"{each}.") or name.endswith(f".{each}")
            for each in self.kept
        )
