"""Ranks in processes of one machine: gloo between CPUs, NCCL between GPUs, both by torch."""

import re
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from clocher_kernels.errors import DeviceError
from clocher_kernels.ops.collectives import part

_PATIENCE = timedelta(minutes=10)
"""How long a rank waits for another: it may be compiling."""


class ProcessRanks:
    """The ranks of a model, as one of their processes sees them.

    It may be given to an executor before it is connected; only steps need that.

    Args:
        backend: of the executor; a key of `COMMUNICATORS`.
        rank: its own number.
        count: how many there are.
    """

    def __init__(self, backend: str, rank: int, count: int) -> None:
        self.rank, self.count = rank, count
        self._connect = COMMUNICATORS[backend]
        self._group: Any = None

    def connect(self, path: str) -> None:
        """Find the others; returns when all have found each other, and the file may go.

        Args:
            path: of a file that does not exist yet, the same for all.

        Raises:
            DeviceError: not all came.
        """
        try:
            store = dist.FileStore(path, self.count)  # type: ignore[attr-defined]
            self._group = self._connect(store, self.rank, self.count)
            # One may be connected while another still reads what the file says; and NCCL
            # reads it no sooner than for this.
            self._group.barrier().wait()
        except RuntimeError as error:
            raise DeviceError(f"rank {self.rank} could not connect: {error}") from None

    def all_reduce(self, x: Any) -> None:
        """Add up an array of all ranks, in place."""
        self._wait(lambda: self._group.allreduce([_tensor(x)]))

    def all_gather(self, x: Any, y: Any, unit: int) -> None:
        """Write the columns x [M, A*, S] of each rank where they belong in y [M, A*, N]."""
        mine, whole = _tensor(x), _tensor(y)
        runs = [part(whole.shape[-1], unit, rank, self.count) for rank in range(self.count)]
        widest = max(last - first for first, last in runs)
        # All ranks send as much.
        sent = mine.new_zeros((*mine.shape[:-1], widest))
        sent[..., : mine.shape[-1]] = mine
        received = [torch.empty_like(sent) for _ in runs]
        self._wait(lambda: self._group.allgather([received], [sent]))
        for (first, last), columns in zip(runs, received, strict=True):
            whole[..., first:last].copy_(columns[..., : last - first])

    def _wait(self, begin: Callable[[], Any]) -> None:
        try:
            begin().wait()
        except RuntimeError as error:
            # Before it stands a place in gloo's source, and after it advice.
            reason = re.sub(r"^\[\S+\] ", "", str(error).splitlines()[0]).split(". This is")[0]
            raise DeviceError(
                f"rank {self.rank} of {self.count} lost the others ({reason}); load the model again"
            ) from None


def _tensor(array: Any) -> torch.Tensor:
    """Return an array of either kind as a tensor of the same memory."""
    return torch.from_numpy(array) if isinstance(array, np.ndarray) else array


def _gloo(store: Any, rank: int, count: int) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = _PATIENCE
    # By name a machine may not find itself.
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return dist.ProcessGroupGloo(store, rank, count, options)


def _nccl(store: Any, rank: int, count: int) -> Any:
    if torch.cuda.device_count() < count:
        raise DeviceError(
            f"tensor parallel over {count} ranks: this machine has {torch.cuda.device_count()} "
            "GPUs; each rank needs one"
        )
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _PATIENCE
    return dist.ProcessGroupNCCL(store, rank, count, options)


COMMUNICATORS: Mapping[str, Callable[[Any, int, int], Any]] = {
    "cpu": _gloo,
    "reference": _gloo,
    "cuda": _nccl,
}
"""Back end -> makes the group of its ranks, from a store, a rank and their number."""


def take_device(backend: str, rank: int) -> None:
    """Make a rank's GPU the current one of its process."""
    if backend == "cuda":
        torch.cuda.set_device(rank)
