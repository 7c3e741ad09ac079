"""Library ops on a GPU: their Plan lowered by the CUDA back end, on torch's stream."""

from collections.abc import Mapping
from functools import cache, lru_cache
from typing import Any

import torch

from clocher_kernels.cuda.executor import LOWER
from clocher_kernels.cuda.launch import Device, current_device, execute
from clocher_kernels.cuda.prepack import TORCH_DTYPES, DeviceTensor, rearrange
from clocher_kernels.formats import Format
from clocher_kernels.library.host import checked_attributes, op_plan
from clocher_kernels.ops import OPS
from clocher_kernels.ops.contract import OpSpec
from clocher_kernels.plan import Attr, Plan
from clocher_kernels.torch.stored import kept, planes_of, sizes, type_of, typed


@cache
def gpu(index: int) -> Device:
    """Return the GPU with this index."""
    with torch.cuda.device(index):
        return current_device()


@lru_cache(maxsize=4096)
def _plan(
    name: str,
    arrays: tuple[tuple[str, tuple[str, tuple[int, ...]]], ...],
    formats: tuple[tuple[str, Format], ...],
    known: tuple[tuple[str, int], ...],
    attrs: tuple[tuple[str, Attr], ...],
    act_prec: str,
) -> Plan:
    return op_plan(OPS[name], dict(arrays), dict(formats), dict(known), dict(attrs), act_prec)


def on_gpu(spec: OpSpec, found: Mapping[str, Any], device: Device) -> list[torch.Tensor]:
    """Launch an op on the current stream and return its outputs.

    Weights are rearranged on first use, which CUDA graphs cannot capture: call the op once before.
    CPU tensors need the device `launch.INTERPRETER`.
    """
    attrs = checked_attributes(spec, {n: found[n] for n in spec.attributes if n in found})
    values: dict[str, Any] = {}
    dtypes: dict[str, str] = {}
    for p in spec.given:
        if p.name not in found:
            continue
        if p.kind == "matrix":
            values[p.name] = _matrix(found, p.name)
            continue
        tensor = found[p.name].detach()
        stored, dtypes[p.name] = typed(spec, p, tensor, attrs)
        keep = p.narrow and tensor.is_floating_point()
        values[p.name] = (tensor if keep else stored).contiguous()
    formats = {n: v.format for n, v in values.items() if isinstance(v, DeviceTensor)}
    plan = _plan(
        spec.name,
        tuple((n, (dtype, tuple(values[n].shape))) for n, dtype in dtypes.items()),
        tuple(formats.items()),
        tuple(sizes(spec, found).items()),
        tuple(attrs.items()),
        found.get("act_prec") or "fp32",
    )
    own = {p.name: type_of(spec, p, found) for p in spec.outputs}
    lead = values[spec.given[0].name]
    for name, buffer in plan.buffers.items():
        if name not in values:
            dtype = own.get(name, TORCH_DTYPES[buffer.dtype])
            values[name] = torch.empty(buffer.shape, dtype=dtype, device=lead.device)
    first = plan.calls[0].args.get("x")
    if first and len(plan.calls) > 1:  # quantised or rotated first, from fp32
        values[first] = values[first].float()
    for each in plan.calls:
        arguments = {param: values[name] for param, name in each.args.items()}
        execute(LOWER[each.op](**arguments, **each.attrs, device=device))
    return [values[p.name] for p in spec.outputs]


def _matrix(found: Mapping[str, Any], name: str) -> DeviceTensor:
    planes, fmt, shape = found[name], found[f"{name}_format"], tuple(found[f"{name}_shape"])

    def make() -> DeviceTensor:
        codec, named = planes_of(planes, fmt, shape)
        return rearrange(codec, shape, {n: plane.clone() for n, plane in named.items()})

    made: DeviceTensor = kept(planes, (fmt, shape, "device"), make).value
    return made
