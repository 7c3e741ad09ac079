"""Which weights of a Plan are packed into tiles, or copied into large pages, before it runs."""

import weakref
from collections.abc import Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from clocher_kernels.formats import Bsr, Int4
from clocher_kernels.guards import refuse_in_window, require
from clocher_kernels.ops import matrices
from clocher_kernels.ops.contract import Value, has_codes
from clocher_kernels.plan import Call, Plan
from clocher_kernels.quant_tensor import QuantTensor
from cpu_fallback.team.large_pages import HUGE, allocate, give_back, is_mapped, spare
from cpu_fallback.team.placement import usable_cpus
from cpu_fallback.tiles import row_pack
from cpu_fallback.tiles.neurons import are_packed, nbytes_of
from cpu_fallback.tiles.tile_pack import is_packed

_CHUNK = 4 << 20
_BY_COLUMN = {"relu2_gate_up": False, "skip_linear": True}
"""Op that has its weight by neuron too -> whether a neuron is a column."""
_copies: dict[int, np.ndarray] = {}


def waiting(plan: Plan, values: Mapping[str, Value], copied: Set[str]) -> dict[str, int]:
    """Return the bytes of each weight that binding a Plan will pack or copy.

    Args:
        plan: what is bound.
        values: every parameter by name.
        copied: weights to copy if they are read in place and lie in a mapped file.
    """
    found: dict[str, int] = {}
    for call in plan.calls:
        for name in matrices(call):
            tensor = values[name]
            if not isinstance(tensor, QuantTensor):
                continue  # refused by name when the call is bound
            if has_codes(call):
                found[name] = 0 if is_packed(tensor) else tensor.nbytes
                if name == call.args["w"]:
                    found[name] += _second_layout(call, tensor)
            elif name == call.args.get("w") and name in copied and reads_in_place(call, tensor):
                planes = tensor.planes.values()
                fresh = [p.nbytes for p in planes if _is_worth_it(p) and id(p) not in _copies]
                found[name] = sum(fresh)
    return found


def _second_layout(call: Call, tensor: QuantTensor) -> int:
    """Return the bytes of what lets a call leave out zeros, if that is not packed yet."""
    columns = _BY_COLUMN.get(call.op)
    if columns is None:
        return 0
    if isinstance(tensor.format, Int4):
        return 0 if row_pack.are_packed(tensor) else row_pack.nbytes_of(tensor)
    return 0 if are_packed(tensor, columns) else nbytes_of(tensor.shape, columns)


def reads_in_place(call: Call, tensor: Value) -> bool:
    """Return whether a call multiplies by a weight as it is stored, from wherever it lies."""
    dense = isinstance(tensor, QuantTensor) and not isinstance(tensor.format, Bsr)
    return dense and not has_codes(call)


def check_memory(packed: int, beside: int) -> None:
    """Refuse to pack so many bytes beside buffers, which are allocated but not touched yet.

    Raises:
        OutOfMemory: it does not fit.
    """
    if packed:
        require(
            max(0, packed + beside - spare()),
            f"packing weights takes {packed >> 20} MiB beside buffers of {beside >> 20}, together",
            "--pretranspose none reads them from the file, slower",
        )


def in_large_pages(tensor: QuantTensor) -> QuantTensor:
    """Return a tensor whose large planes are copies in large pages, if they lie in a mapped file.

    They are copied once, shared by all Plans, and kept as long as the originals live, whose pages
    are given back.
    """
    return replace(tensor, planes={name: _copied(p) for name, p in tensor.planes.items()})


def _copied(array: np.ndarray) -> np.ndarray:
    if not _is_worth_it(array):
        return array
    key = id(array)
    if key not in _copies:
        refuse_in_window("copy weights")
        made, source = allocate(array.nbytes), array.reshape(-1).view(np.uint8)

        def part(start: int) -> None:
            made[start : start + _CHUNK] = source[start : start + _CHUNK]

        with ThreadPoolExecutor(usable_cpus()) as pool:
            list(pool.map(part, range(0, array.nbytes, _CHUNK)))
        _copies[key] = made.view(array.dtype).reshape(array.shape)
        weakref.finalize(array, _copies.pop, key, None)
        give_back(array)
    return _copies[key]


def _is_worth_it(array: np.ndarray) -> bool:
    return array.nbytes >= HUGE and is_mapped(array)
