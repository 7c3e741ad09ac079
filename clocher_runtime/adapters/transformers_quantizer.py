"""Clocher as a quantisation method of transformers; importing this module registers it.

    from clocher_runtime.adapters.transformers_quantizer import ClocherConfig
    AutoModelForCausalLM.from_pretrained(path, quantization_config=ClocherConfig("int4_g128"))

Source: transformers 5, docs/source/en/quantization/contribute.md.
"""

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils.quantization_config import QuantizationConfigMixin

from clocher_kernels.errors import UsageError
from clocher_kernels.formats.bsr import Bsr
from clocher_kernels.library import format_of
from clocher_kernels.library.host import one_of_act_prec
from clocher_kernels.torch import QuantLinear, quantize_linears

METHOD = "clocher"


@register_quantization_config(METHOD)
class ClocherConfig(QuantizationConfigMixin):
    """Format of a model's linear layers, stored in config.json. Raises FormatError, UsageError.

    `fmt`: such as "int4_g128"; `modules_to_not_convert`: None leaves the head alone.
    """

    def __init__(
        self,
        fmt: str = "int4_g128",
        act_prec: str = "",
        modules_to_not_convert: list[str] | None = None,
        **kwargs: Any,
    ) -> None:
        if more := kwargs.keys() - {"quant_method"}:
            raise UsageError(f"ClocherConfig has no setting {', '.join(sorted(more))}")
        if isinstance(format_of(fmt), Bsr):
            raise UsageError(f"{fmt}: block-sparse rows are not made by rounding; prune first")
        self.quant_method = METHOD  # type: ignore[assignment]  # what others register is text
        self.fmt = format_of(fmt).name
        self.act_prec = one_of_act_prec(act_prec)
        self.modules_to_not_convert = modules_to_not_convert


@register_quantizer(METHOD)
class ClocherQuantizer(HfQuantizer):
    """Replaces linear layers by `QuantLinear`: rounded from floats, or as stored."""

    quantization_config: ClocherConfig

    def _wanted(self, model: PreTrainedModel, name: str) -> bool:
        kept = self.get_modules_to_not_convert(
            model,
            self.quantization_config.modules_to_not_convert,
            list(model._keep_in_fp32_modules or ()),
        )
        return bool(should_convert_module(name, kept))

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        if not self.pre_quantized:
            return
        config = self.quantization_config
        for name, module in list(model.named_modules()):
            if type(module) is torch.nn.Linear and self._wanted(model, name):
                n, k = module.weight.shape
                has_bias = module.bias is not None
                room = QuantLinear(
                    k, n, config.fmt, has_bias, act_prec=config.act_prec, device="meta"
                )
                model.set_submodule(name, room)

    def _process_model_after_weight_loading(
        self, model: PreTrainedModel, **kwargs: Any
    ) -> PreTrainedModel:
        if not self.pre_quantized:
            config = self.quantization_config
            quantize_linears(
                model,
                config.fmt,
                act_prec=config.act_prec,
                wanted=lambda name: self._wanted(model, name),
            )
        return model

    def is_serializable(self) -> bool:
        """Whether it can be saved: yes, planes are buffers."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Whether gradients flow through it: no."""
        return False

    @property
    def is_compileable(self) -> bool:
        """Whether `torch.compile` takes it."""
        return True
