"""Calibration: quantise the linears of a model, layer by layer, with what they see of a text.

One pass of the float model over the text. The inputs of a layer's linears are summed (`stats`),
then its matrices are quantised (`matrix`), one expert at a time, and the layer is written before
the next one begins. Layers do not depend on each other's results: GPTQ with the inputs that the
quantised layers before would give was measured and gained nothing at four bits. Equal inputs, seed
and thread count of the BLAS give equal bytes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from clocher_kernels.errors import UsageError
from clocher_kernels.formats import Int4, Int8
from clocher_kernels.quant_tensor import QuantTensor
from clocher_runtime.checkpoints.checkpoint import Checkpoint
from clocher_runtime.convert.q4.parts import part_of
from clocher_runtime.models.inventory import layer_name
from clocher_runtime.quantize.capture import Walk
from clocher_runtime.quantize.layer_job import LayerJob
from clocher_runtime.quantize.plan import PlannedTensor, QuantPlan
from clocher_runtime.quantize.rows import make_text

Progress = Callable[[int, int, str], None]

METHODS = ("imx", "gptq")


class Parts(Protocol):
    """Where finished layers go; `weights.q4.parts.PartsWriter` is one."""

    def finished(self, part: str) -> dict[str, dict[str, Any]] | None:
        """Return the records of a part that an earlier run finished."""

    def write(
        self, part: str, tensors: Mapping[str, QuantTensor], records: Mapping[str, dict[str, Any]]
    ) -> None:
        """Write a part."""


@dataclass(frozen=True, slots=True)
class Calibrated:
    """What is known of a calibrated tensor.

    Attributes:
        method: the method that was asked for.
        fallback: None, or what was taken instead and why; for experts how many of them.
        tokens_seen: tokens that the statistics hold; for experts the smallest number, the 5th
            percentile, the median and the largest, the held-out ones excluded.
        damp: relative damping of the Hessian; 0 without GPTQ, for experts the largest.
        err: "out_nmse" and "out_nmse_rtn": squared error of the outputs on held-out text relative
            to the outputs, of the result and of plain rounding; for experts their mean, and
            "out_nmse_worst".
    """

    method: str
    fallback: str | None
    tokens_seen: int | list[int]
    damp: float
    err: dict[str, float]


def calibrate(
    checkpoint: Checkpoint,
    plan: QuantPlan,
    text_ids: Sequence[Sequence[int]],
    *,
    parts: Parts,
    threads: int = 1,
    seed: int = 0,
    progress: Progress | None = None,
    directory: Path | None = None,
) -> dict[str, Calibrated]:
    """Quantise the tensors of a plan whose method is "imx" or "gptq".

    Args:
        checkpoint: the float model; tensors that are stored quantised are decoded.
        plan: what becomes of each tensor.
        text_ids: token sequences; one in sixteen, chosen by the seed, is held out.
        parts: gets each layer when it is done, and knows those done before.
        threads: threads of the search; products use the threads of the BLAS.
        seed: of the held-out choice.
        progress: called with (done, total, what) layers.
        directory: for temporary files, 8 bytes per token and column; None: the system's.

    Raises:
        UsageError: a tensor of the plan cannot be calibrated, or the text does not fit the model.
    """
    wanted = {name: t for name, t in plan.tensors.items() if t.method != "rtn"}
    _check(wanted)
    by_part: dict[str, dict[str, PlannedTensor]] = {}
    for name, tensor in wanted.items():
        by_part.setdefault(part_of(name), {})[name] = tensor
    done = {part: records for part in by_part if (records := parts.finished(part)) is not None}
    walk = Walk(checkpoint, make_text(text_ids, seed), directory)
    known = {name for i in range(walk.num_layers) for name in walk.matrices(i)}
    known |= {name for name in wanted if part_of(name) == "rest"}
    if strange := sorted(set(wanted) - known):
        raise UsageError(
            f"tensor {strange[0]!r} cannot be calibrated: the {walk.spec.family} model does not "
            "multiply by it; give it the method rtn"
        )
    total = walk.num_layers + ("rest" in by_part)
    for index in range(walk.num_layers):
        if len(done) == len(by_part):
            break
        part = part_of(layer_name(index, ""))
        if part in by_part and part not in done:
            job = LayerJob(walk, by_part[part], threads, seed)
            walk.layer(index, job)
            parts.write(part, job.finish(), job.records)
            done[part] = job.records
        else:
            walk.layer(index)
        walk.advance()
        if progress is not None:
            progress(index + 1, total, part)
    if "rest" in by_part and "rest" not in done:
        job = LayerJob(walk, by_part["rest"], threads, seed)
        walk.head_inputs(job)
        parts.write("rest", job.finish(), job.records)
        done["rest"] = job.records
        if progress is not None:
            progress(total, total, "rest")
    return {name: Calibrated(**record) for part in done.values() for name, record in part.items()}


def _check(wanted: Mapping[str, PlannedTensor]) -> None:
    for name, tensor in wanted.items():
        fmt = tensor.format
        if tensor.method not in METHODS:
            raise UsageError(f"tensor {name!r}: method {tensor.method!r}; known: rtn, imx, gptq")
        if not isinstance(fmt, Int4 | Int8) or fmt.group == "tensor":
            raise UsageError(
                f"tensor {name!r}: {tensor.method} needs an int4 or int8 format with scales per "
                f"row or group, got {fmt.name}; give it the method rtn"
            )
