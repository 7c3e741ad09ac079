"""Plant NaN and infinities in the inputs of an op, or in the stored planes of a tensor."""

from collections.abc import Iterator

import numpy as np
from op_cases import ALL, Arrays, OpRun

from clocher_kernels.dtypes import LARGEST, STORAGE, from_f32, to_f32
from clocher_kernels.formats import Ggml
from clocher_kernels.formats.ggml import KINDS
from clocher_kernels.ops.contract import Case, OpSpec, Value
from clocher_kernels.quant_tensor import QuantTensor

ODD = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf}


def code_of(value: float, dtype: str) -> np.ndarray | None:
    """Return the code of a value in a float type, None if it has none."""
    storage = STORAGE[dtype]
    if np.isfinite(value):
        return from_f32(np.float32([value]), dtype)[0]
    if dtype in ("f32", "f16"):
        return np.array(value, storage)
    codes = np.arange(1 << 8 * storage.itemsize, dtype=storage)
    found = to_f32(codes, dtype)
    same = np.isnan(found) if np.isnan(value) else found == value
    return codes[same][0] if same.any() else None


def planted(tensor: QuantTensor, plane: str, value: float, at: int = 0) -> QuantTensor | None:
    """Return the tensor with a value in a flat place of a float plane.

    None if the plane has no such code, or the format forbids it: then loading looks for it.
    """
    if isinstance(tensor.format, Ggml):
        return _in_block(tensor, tensor.format, value)
    dtype = tensor.format.planes(tensor.shape)[plane].dtype
    code = code_of(value, dtype) if dtype in LARGEST else None
    if code is None or dtype in ("e4m3", "e5m2", "e8m0") or not tensor.planes[plane].size:
        return None
    copies = {name: np.array(stored) for name, stored in tensor.planes.items()}
    copies[plane].reshape(-1)[at] = code
    return QuantTensor(tensor.shape, tensor.format, copies)


def _in_block(tensor: QuantTensor, fmt: Ggml, value: float) -> QuantTensor:
    """Return a tensor of ggml's blocks with a value as the first block's scale."""
    fields = KINDS[fmt.kind].fields
    name = next(n for n in fields.names or () if fields[n] == np.float16)
    blocks = np.array(tensor.planes["blocks"])
    blocks.reshape(-1)[: fields.itemsize].view(fields)[name] = value
    return QuantTensor(tensor.shape, fmt, {"blocks": blocks})


def ready(spec: OpSpec, case: Case) -> OpRun:
    """Return a case whose first token reads what is planted."""
    run = OpRun(spec, case)
    for param in spec.params:
        if param.below and spec.name in ("embed", "gather_rows"):
            run.values[param.name][0] = 0
    return run


def plants(run: OpRun) -> Iterator[tuple[str, str, dict[str, Value]]]:
    """Yield (parameter, what was planted, inputs of the case with one odd value)."""
    for param in run.spec.params:
        value = run.values.get(param.name)
        for name, odd in ODD.items():
            if isinstance(value, QuantTensor):
                for plane in value.planes:
                    copy = planted(value, plane, odd)
                    if copy is not None:
                        what = f"{name} in {param.name}.{plane}"
                        yield param.name, what, {**run.values, param.name: copy}
            elif (
                value is not None
                and "f32" in param.dtypes
                and value.dtype == "f4"
                and param.name not in _SETTINGS
            ):
                if (run.spec.name, param.name) == ("attention", "q") and np.isinf(odd):
                    continue  # `rope` leaves none
                if (run.spec.name, param.name, name) == ("route", "logits", "-inf"):
                    continue  # of an expert that nobody chooses
                array = np.array(value)
                array[(0,) * (array.ndim - 1)][-1] = odd
                yield param.name, f"{name} in {param.name}", {**run.values, param.name: array}


def one_case_of_each() -> list[tuple[OpSpec, Case]]:
    """Return a case of several tokens of each op with each format, attribute, optional parameter.

    Bias and residual are in one of the cases of a product anyway.
    """
    found: dict[object, tuple[OpSpec, Case]] = {}
    for spec, case in ALL:
        many = max(case.sizes.get("M", 1), case.sizes.get("R", 1)) > 1
        if many and spec.name not in _NO_FLOATS:
            attrs = (case.attrs.get(name) for name in ("act", "group", "score"))
            there = (case.options.get(name) for name in ("factors", "scores", "weights"))
            plain = spec.matrix is None and case.options.get("residual")
            key = spec.name, *case.formats.values(), *attrs, *there, plain
            found.setdefault(key, (spec, case))
    return list(found.values())


def odd_tokens(run: OpRun, outputs: Arrays) -> np.ndarray:
    """Return for each token whether something that is not finite, or no token, was written."""
    odd: np.ndarray | bool = False
    for name in run.written:
        array = outputs[name]
        if array.dtype.kind == "f":
            odd = odd | ~np.isfinite(array.reshape(len(array), -1)).all(axis=1)
        elif run.spec.name == "sample":
            odd = odd | (array < 0)
    assert isinstance(odd, np.ndarray)
    return odd


# Angles and what `Sampling` checks are never odd; these ops move integers.
_SETTINGS = frozenset({"temperature", "top_p", "cos", "sin"})
_NO_FLOATS = frozenset({"advance", "kv_append", "page_bounds", "select_pages"})
