"""Packing many tensors at once: what binding asks for is packed while binding goes on.

Inside of `packing` a thread queues the parts of each tensor, and all CPUs work at them, without
waiting between tensors. At the end of `packing` all are done.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

from cpu_fallback.team.placement import usable_cpus

Part = Callable[[], None]


@dataclass(frozen=True)
class _Job:
    """A tensor that is being packed."""

    nbytes: int  # of the tensor, as it is stored
    parts: Sequence[Future[None]]  # its parts, some of them done
    failed: Callable[[], None]  # called if they never all will be


@dataclass
class Together:
    """The tensors that a thread has queued."""

    pool: ThreadPoolExecutor  # what works at them
    jobs: list[_Job] = field(default_factory=list)  # in the order in which they were asked for
    queued: int = 0  # bytes of their tensors
    # set when all are packed, or given up
    ended: threading.Event = field(default_factory=threading.Event)

    def add(
        self,
        parts: Sequence[Part],
        nbytes: int,
        done: Callable[[], None],
        failed: Callable[[], None],
    ) -> None:
        """Queue the parts of a tensor of so many stored bytes.

        `done` is called by a thread of the pool after the last part, `failed` if that never comes.
        """
        lock, left = threading.Lock(), len(parts)

        def work(part: Part) -> None:
            nonlocal left
            part()
            with lock:
                left -= 1
                is_last = not left
            if is_last:
                done()

        futures = [self.pool.submit(work, part) for part in parts]
        self.jobs.append(_Job(nbytes, futures, failed))
        self.queued += nbytes


class _Here(threading.local):
    together: Together | None = None


_here = _Here()


def current() -> Together | None:
    """Return what this thread's tensors are queued in; None outside of `packing`."""
    return _here.together


@contextmanager
def packing(report: Callable[[int], None]) -> Iterator[Together]:
    """Pack in the background what this thread asks for inside, and wait for it at the end.

    Args:
        report: called with the stored bytes of each tensor when it is packed.
    """
    with ThreadPoolExecutor(usable_cpus()) as pool:
        together = _here.together = Together(pool)
        try:
            yield together
            _here.together = None
            while together.jobs:
                job = together.jobs[0]
                for part in job.parts:
                    part.result()
                report(job.nbytes)
                del together.jobs[0]
        except BaseException:  # an interrupt too: tiles that are not whole must not be found later
            pool.shutdown(wait=True, cancel_futures=True)
            for job in together.jobs:
                job.failed()
            raise
        finally:
            _here.together = None
            together.ended.set()


def run(parts: Sequence[Part]) -> None:
    """Work at the parts of one tensor on all CPUs."""
    if len(parts) == 1 or usable_cpus() == 1:
        for part in parts:
            part()
        return
    with ThreadPoolExecutor(usable_cpus()) as pool:
        for future in [pool.submit(part) for part in parts]:
            future.result()
