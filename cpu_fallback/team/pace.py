"""How many threads of a team take part in a step, decided by how long steps take.

A thread whose core is taken away, by another process or by the CPU quota of a container, holds up
all others at the next barrier. If waiting there makes up a tenth of the time, the team tries with
fewer threads, and keeps to that unless steps become slower; later it tries with more again. A
trial that does not pay is repeated after twice the time. A team that has its cores for itself
never tries anything. Results do not depend on the number of threads, so none of this shows in them.
"""

from collections.abc import Callable
from typing import Final

WINDOW_NS: Final = 100_000_000
"""Steps of one size are compared over at least this time: the period of a CPU quota."""

_GLIMPSE_NS: Final = 10_000_000
_HOPELESS: Final = 1.5
_GAIN: Final = 1.1  # How much faster steps must become for more threads to be worth it
_LOSS: Final = 1.05
"""How much slower steps may become with fewer: the CPU time that is left over serves others."""
_LOST: Final = 0.1
_MOST_PATIENCE: Final = 64


class Pace:
    """The number of threads that take part: `active`, 1 .. the size of the team."""

    def __init__(self, threads: int) -> None:
        self.active = threads
        self._threads = threads
        self._size = (0, 0)
        self._before = 0  # threads to go back to if the trial that is on does not pay
        self._settling = False  # a trial begins with what is left of a throttled period
        self._mean = 0.0  # ns of a step without the trial
        self._patience = self._left = 1
        self._turn = 0
        self._begin()

    def stepped(self, size: tuple[int, int], ns: int, lost: Callable[[], int]) -> None:
        """Take note of a step; only steps of one size are compared.

        Args:
            size: its tokens and rows.
            ns: what it took.
            lost: returns what the thread that lost most has lost at barriers since the last call.
        """
        if size != self._size:
            self._abandon(size, lost)
        self._steps += 1
        self._ns += ns
        if self._ns >= WINDOW_NS:
            contended = lost() > _LOST * self._ns
            if self._settling:
                self._settling = False
                self._begin()
            else:
                self._close(contended)
        elif self._hopeless():
            lost()
            self._close(True)

    def _begin(self) -> None:
        self._steps = self._ns = 0

    def _end_trial(self) -> None:
        self._before, self._left, self._settling = 0, self._patience, False

    def _abandon(self, size: tuple[int, int], lost: Callable[[], int]) -> None:
        self._size = size
        if self._before:
            self.active = self._before
            self._end_trial()
        lost()
        self._begin()

    def _hopeless(self) -> bool:
        """Return whether a trial can end early: steps take much longer with it."""
        fair = self.active > self._before or not self._settling
        return self._before > 0 and fair and self._ns >= _GLIMPSE_NS and self._slower_by(_HOPELESS)

    def _slower_by(self, factor: float) -> bool:
        return self._ns > factor * self._mean * self._steps

    def _close(self, contended: bool) -> None:
        """End a window, and a trial if one is on; perhaps begin one."""
        if self._before:
            if self._slower_by(1 / _GAIN if self.active > self._before else _LOSS):
                self.active = self._before
                self._patience = min(2 * self._patience, _MOST_PATIENCE)
            else:
                self._patience = 1
            self._end_trial()
        else:
            self._mean = self._ns / self._steps
            self._consider(contended)
        self._begin()

    def _consider(self, contended: bool) -> None:
        if not contended and self.active == self._threads:
            self._patience = self._left = 1
            return
        self._left -= 1
        if self._left > 0:
            return
        # In turns for one foreign thread, for as many as the team has, and for a single free core.
        self._turn = (self._turn + 1) % 3
        if contended and self.active > 1:
            trial = (self.active - 1, self.active // 2, 1)[self._turn]
        else:
            trial = min(
                (self.active + 1, 2 * self.active, self._threads)[self._turn], self._threads
            )
        self._before, self.active, self._settling = self.active, trial, True
        if trial == self._before:
            self._end_trial()
