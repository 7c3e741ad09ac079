"""Exit codes of the commands, and the mapping from exceptions."""

import errno
from enum import IntEnum

from clocher_kernels import errors
from clocher_runtime.signals import Terminated


class ExitCode(IntEnum):
    """What the process says to its caller."""

    OK = 0
    BUG = 1  # unexpected: a defect of Clocher, not of the request
    USAGE = 2  # bad flag, environment variable or number
    MODEL = 3  # model missing, invalid or not supported
    DEVICE = 5  # device or engine not available
    MEMORY = 6  # out of memory
    MISMATCH = 7  # verification found a difference
    REJECTED = 8  # the quality gate failed
    UNDECIDED = 9  # the quality gate needs more text to decide
    INTERRUPTED = 130  # Ctrl-C: 128 + SIGINT
    TERMINATED = 143  # 128 + SIGTERM


_CODES: tuple[tuple[type[BaseException], ExitCode], ...] = (
    (errors.UsageError, ExitCode.USAGE),
    (errors.ModelError, ExitCode.MODEL),
    (errors.DeviceError, ExitCode.DEVICE),
    (errors.UnsupportedOp, ExitCode.DEVICE),
    (errors.OutOfMemory, ExitCode.MEMORY),
    (MemoryError, ExitCode.MEMORY),
    (Terminated, ExitCode.TERMINATED),
    (KeyboardInterrupt, ExitCode.INTERRUPTED),
)


def told(error: BaseException) -> BaseException:
    """Map a refused thread to DeviceError, refused memory to OutOfMemory; return others as is."""
    if isinstance(error, RuntimeError) and str(error) == "can't start new thread":
        return errors.DeviceError(
            "the system gives this process no more threads; lower --threads, or raise its limit of "
            "processes (ulimit -u, or pids.max of its control group)"
        )
    cause: BaseException | None = error if isinstance(error, OSError | ImportError) else None
    while cause is not None:
        if isinstance(cause, OSError | ImportError) and _lacks_memory(cause):
            return errors.OutOfMemory(
                f"the system gives this process no more memory ({cause}); free some, or raise its "
                "limit (ulimit -v, or memory.max of its control group)"
            )
        cause = cause.__cause__ or cause.__context__
    return error


def _lacks_memory(error: OSError | ImportError) -> bool:
    # The dynamic loader reports it in its message only.
    return getattr(error, "errno", None) == errno.ENOMEM or any(
        words in str(error) for words in ("failed to map segment", "annot allocate memory")
    )


def exit_code(error: BaseException) -> ExitCode:
    """Return the exit code for an exception."""
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code
    return ExitCode.BUG
