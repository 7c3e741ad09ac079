"""The flag "a timed window is open", which forbids compiling, tuning, loading and reading."""

from clocher_kernels.errors import WindowError

_open_window: str | None = None


def open_window(name: str) -> None:
    """Mark a timed window as open; WindowError if one is: windows never nest."""
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
    """Raise WindowError if a window is open; `action` is a phrase: "compile a kernel"."""
    if _open_window is not None:
        raise WindowError(
            f"refused to {action} while the timed window {_open_window!r} is open; "
            "do it before the window (warm up first)"
        )
