"""What a quantisation will take of memory and disk, known before a weight is read."""

from collections import Counter
from dataclasses import dataclass
from math import prod

from clocher_runtime.convert.q4.parts import part_of
from clocher_runtime.quantize.job import Job
from clocher_runtime.quantize.plan import QuantPlan

_PROGRAM = 250 << 20
"""Resident bytes of the interpreter, its libraries and compiled kernels."""
_HESSIAN = 4 + 8 + 8
"""Bytes for each pair of columns: in float32, and in float64 as it is and factorised."""
_STATE_BYTES = 12
"""Of hidden states, for each token and column, in temporary files."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes."""

    memory: int  # resident, about; files that are mapped and can be dropped do not count
    parts: int  # of planes that the manifest keeps until the model is written
    temporary: int  # of files without a name, in the system's directory for them


def needs_of(job: Job, plan: QuantPlan) -> Needs:
    """Return what a job and the conversion after it will take.

    Two tensors are in memory at a time, each as stored and as it will be. Calibration has the
    results of one layer, a decoded matrix and, for GPTQ, its Hessian and the factor of that. The
    gate runs the float model, whose weights stay in the file, and the quantised one,
    which is packed for the kernels.
    """
    stored = job.checkpoint.tensors
    results = {name: tensor.nbytes for name, tensor in plan.tensors.items()}
    tensors = [stored[name].nbytes + results.get(name, 0) for name in stored]
    memory = _PROGRAM + 2 * max(tensors)
    layers: Counter[str] = Counter()
    calibrated = plan.tensors if job.target_bpw is not None else plan.calibrated
    for name in calibrated:
        layers[part_of(name)] += results[name]
    temporary = 0
    if job.calibration:
        shapes = [plan.tensors[name].shape for name in calibrated]
        decoded = max((4 * prod(shape[-2:]) for shape in shapes), default=0)
        columns = max((shape[-1] for shape in shapes), default=0)
        gptq = any(tensor.method == "gptq" for tensor in plan.tensors.values())
        memory += max(layers.values(), default=0) + decoded + (_HESSIAN * columns**2 if gptq else 0)
        tokens = sum(map(len, job.calibration.sequences))
        temporary = _STATE_BYTES * tokens * int(job.checkpoint.config.get("hidden_size", 0))
    if job.gate:
        memory += 2 * sum(results.values())
    return Needs(memory, layers.total(), temporary)
