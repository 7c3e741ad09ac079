"""What every item of a part is given: the device, the timer, and the ceilings of this run."""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from bench.gpu.record import Row
from bench.gpu.timer import DryTimer, Timing, reason
from clocher_kernels.cuda.launch import INTERPRETER, Launch
from clocher_kernels.cuda.lowering import LOWER
from clocher_kernels.cuda.workbench import Workbench, gpu_workbench
from clocher_kernels.errors import UnsupportedOp

# How a reason starts if there is no kernel for what was asked.
REFUSALS = ("UnsupportedOp", "ShapeError")


@dataclass
class Setting(Workbench):
    """A workbench whose items seed `random` by their id.

    Attributes:
        copy_gbs: GB/s (read plus written) of a large copy in this process; 0 until measured.
    """

    copy_gbs: float = 0.0

    def lower(self, op: str, **arguments: object) -> list[Launch]:
        """Return the launches of an op.

        Raises:
            UnsupportedOp: there is no kernel.
        """
        if op not in LOWER:
            raise UnsupportedOp(f"the CUDA back end has no kernel for {op!r}")
        return LOWER[op](**arguments, device=self.device)

    def measured(self, timing: Timing | str, nbytes: int, **facts: object) -> Row:
        """Return the row of one contender: time, bandwidth and its share of the copy's.

        Args:
            timing: the time of a call, or why there is none.
            nbytes: bytes that a call has to move.
            facts: what the row says besides.
        """
        if isinstance(timing, str):
            return {**facts, "status": _status_of(facts.get("who"), timing), "reason": timing}
        row: Row = {**facts, "nbytes": nbytes}
        if self.dry:
            return row
        gbs = nbytes / timing.us / 1e3
        row |= {"us": timing.us, "us_low": timing.low, "us_high": timing.high, "gbs": gbs}
        return self.with_share(row, gbs)

    def with_share(self, row: Row, gbs: float) -> Row:
        """Note the share of the copy's bandwidth that a row reaches; above 1 it is no measurement.

        Args:
            row: what was measured.
            gbs: the bytes that it had to move, over its time.
        """
        if self.copy_gbs:
            row |= {"share": gbs / self.copy_gbs, "copy_gbs": self.copy_gbs}
            if row["share"] > 1:
                why = f"{100 * row['share']:.0f} % of a copy's bandwidth: its bytes came from a "
                why += "cache, or are fewer than counted"
                row |= {"status": "failed", "reason": why}
        return row


def _status_of(who: object, why: str) -> str:
    """Return why there is no time: a peer may be missing, our own kernels may not."""
    if not str(who).startswith("clocher"):
        return "not measured"
    return "refused" if why.startswith(REFUSALS) else "failed"


@dataclass(frozen=True)
class Item:
    """One thing that a part does. `run` returns rows; an exception becomes a failed row."""

    id: str
    run: Callable[[Setting], Sequence[Row]]


def run_item(setting: Setting, item: Item) -> list[Row]:
    """Return the rows of an item; what it raises becomes a row."""
    setting.random.manual_seed(zlib.crc32(item.id.encode()))
    try:
        rows = list(item.run(setting))
        setting.timer.synchronize()
    except Exception as error:
        why = reason(error)
        rows = [{"status": "refused" if why.startswith(REFUSALS) else "failed", "reason": why}]
    for row in rows:
        row.setdefault("status", "ok")
    return rows


def is_lost(setting: Setting) -> bool:
    """Return whether the GPU has stopped answering, as it does after an illegal access."""
    try:
        setting.timer.synchronize()
    except Exception:
        return True
    return False


def make_setting(dry: bool) -> Setting:
    """Return the setting of this machine."""
    torch.set_grad_enabled(False)
    if dry:
        from bench.gpu import interpreter  # noqa: F401  changes the interpreter

        return Setting(INTERPRETER, DryTimer(), 1 << 20, torch.Generator("cpu"))
    made = gpu_workbench()
    return Setting(made.device, made.timer, made.l2_bytes, made.random)
