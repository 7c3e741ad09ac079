"""Every case that back ends are compared with the references on."""

from bench.ops.op_run import Arrays, OpRun, error, name_of
from clocher_kernels.ops import OPS

__all__ = ["ALL", "ON_CUDA", "Arrays", "OpRun", "error", "name_of"]

ALL = [(spec, case) for spec in OPS.values() for case in spec.cases]
ON_CUDA = [(spec, case) for spec, case in ALL if "cuda" not in case.missing]
