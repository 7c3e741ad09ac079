"""Every case that back ends are compared with the references on."""

from zlib import crc32

from bench.ops import Arrays, OpRun, error, name_of
from clocher_kernels.ops import OPS
from clocher_kernels.ops.contract import Case, OpSpec

__all__ = ["ALL", "ONE_EACH", "ON_CUDA", "Arrays", "OpRun", "error", "name_of"]

ALL = [(spec, case) for spec in OPS.values() for case in spec.cases]
ON_CUDA = [(spec, case) for spec, case in ALL if "cuda" not in case.missing]


def _one_each() -> list[tuple[OpSpec, Case]]:
    """Return one case of each kernel: of each op, formats, and choice of types or functions."""
    of_kernel: dict[tuple[object, ...], list[tuple[OpSpec, Case]]] = {}
    for spec, case in ALL:
        choices = [c for c in case.attrs.items() if isinstance(c[1], str) and c[0] != "activation"]
        kernel = (spec.name, *case.formats.items(), *choices)
        of_kernel.setdefault(kernel, []).append((spec, case))
    return [own[crc32(repr(kernel).encode()) % len(own)] for kernel, own in of_kernel.items()]


ONE_EACH = _one_each()
