"""Parsing of `--attn`: which KV pages attention reads."""

import re
from typing import TYPE_CHECKING, NamedTuple

from clocher_kernels.errors import UsageError

if TYPE_CHECKING:  # a command line is read without it
    from clocher_kernels.plan import Attr

PAGE_CELLS = 64
LAST_PAGES = 2
"""Pages at the end that are always read: `ops.selection.LAST_PAGES`."""
LEAST_BUDGET = 4 * PAGE_CELLS
_MOST = 1 << 24
_WORDS = ("dense", "auto")
TAKES = (
    "dense, auto, topk:N (tokens that are read, "
    f"{LEAST_BUDGET} or more), threshold:T (of logits, above 0), window:S+W (first and last "
    "tokens) or dynamic:P (a share above 0 and below 1)"
)


class Selection(NamedTuple):
    """Pages that a token reads; the numbers are those of `ops.selection.select_pages`."""

    name: str
    first: int = 1
    last: int = LAST_PAGES
    budget: int = 0
    margin: float = 0.0
    mass: float = 0.0

    @property
    def is_scored(self) -> bool:
        """Whether pages are chosen by their keys, which needs bounds of these."""
        return bool(self.budget or self.margin or self.mass)

    @property
    def attrs(self) -> "dict[str, Attr]":
        """The same as attributes of a call."""
        return {key: value for key, value in self._asdict().items() if key != "name"}


def parse_selection(text: str) -> Selection | None:
    """Return what `--attn` selects; None: dense. Raises UsageError."""
    if text in _WORDS:
        return None
    kind, _, rest = text.partition(":")
    sinks, _, window = rest.partition("+")
    tokens, number, first, last = _whole(rest), _number(rest), _whole(sinks), _whole(window)
    if kind == "topk" and tokens is not None and tokens >= LEAST_BUDGET:
        return Selection(text, budget=-(-tokens // PAGE_CELLS))
    if kind == "threshold" and 0 < number <= 1e6:
        return Selection(text, margin=number)
    if kind == "dynamic" and 0 < number < 1:
        return Selection(text, mass=number)
    if kind == "window" and first is not None and last:
        pages = max(LAST_PAGES, -(-last // PAGE_CELLS) + 1)
        return Selection(text, first=max(1, -(-first // PAGE_CELLS)), last=pages)
    shown = text if len(text) <= 60 else f"{text[:60]}..."
    raise UsageError(f"attn is {shown!r}; expected {TAKES}")


def _whole(text: str) -> int | None:
    found = int(text) if re.fullmatch("[0-9]{1,8}", text) else None
    return found if found is not None and found <= _MOST else None


def _number(text: str) -> float:
    return float(text) if re.fullmatch(r"[0-9]{1,7}(\.[0-9]{1,7})?|\.[0-9]{1,7}", text) else 0.0
