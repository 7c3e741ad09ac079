"""One flag, "a timed window is open", checked by the doors that must stay shut while it is.

Compiling, tuning, loading weights and reading files call `refuse_in_window`. The flag lives at the
bottom layer so that kernels need not import the runtime to honour it.
"""

from clocher_kernels.errors import WindowError

_open_window: str | None = None


def open_window(name: str) -> None:
    """Mark a timed window as open.

    Raises:
        WindowError: one is open already; windows never nest.
    """
    global _open_window
    if _open_window is not None:
        raise WindowError(
            f"timed window {name!r} opened inside {_open_window!r}; windows never nest: "
            "close the outer one first"
        )
    _open_window = name


def close_window() -> None:
    """Mark the timed window as closed."""
    global _open_window
    _open_window = None


def refuse_in_window(action: str) -> None:
    """Raise if a timed window is open.

    Args:
        action: what was about to happen, as a phrase: "compile a kernel".

    Raises:
        WindowError: a window is open.
    """
    if _open_window is not None:
        raise WindowError(
            f"refused to {action} while the timed window {_open_window!r} is open; "
            "do it before the window (warm up first)"
        )
