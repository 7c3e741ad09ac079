"""The documents of a text: what a comparison scores, and what its intervals resample."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np

from clocher_kernels.errors import UsageError

DOCUMENT_TOKENS = 1024
"""Tokens of a document in a text that does not say where its documents end."""

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Documents:
    """Documents, each a run of windows that a model reads one by one, from an empty cache."""

    windows: tuple[tuple[int, ...], ...]  # token ids of each window, at least two
    owner: tuple[int, ...]  # the document of each window, counted from 0, never falling
    window: int  # length of the longest window that was allowed

    @property
    def count(self) -> int:
        """Number of documents."""
        return self.owner[-1] + 1

    @property
    def tokens(self) -> int:
        """Scored tokens: all but the first of each window."""
        return sum(len(window) - 1 for window in self.windows)

    @property
    def digest(self) -> bytes:
        """SHA-256 over all windows and their documents."""
        found = sha256(f"clocher.windows/1 {len(self.windows)}".encode())
        for owner, ids in zip(self.owner, self.windows, strict=True):
            found.update(np.array([owner, len(ids), *ids], "<i8").tobytes())
        return found.digest()

    def __iter__(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield the document and the ids of each window."""
        return iter(zip(self.owner, self.windows, strict=True))


def cut(
    text: str,
    encode: Encode,
    window: int,
    *,
    windows_per_document: int | None = None,
    separator: str | None = None,
    limit: int | None = None,
) -> Documents:
    """Cut a text into documents of windows.

    Without a separator the text is one run of tokens, cut into consecutive windows of `window`
    tokens as `clocher_runtime.quality.compare` does, the last partial one left out; each
    `windows_per_document` windows in a row are a document. With a separator each part between two
    of them is a document: it is encoded by itself, and its last window may be short.

    `text`: what is scored; `encode`: text to token ids; `window`: tokens of a window;
    `windows_per_document`: windows of a document, without a separator; None: as many as
    `DOCUMENT_TOKENS` hold, at least one; `separator`: text between two documents; `limit`: take at
    most this many documents. Raises UsageError: a number is out of range, or the text is too short
    for one window.
    """
    if windows_per_document is None:
        windows_per_document = max(1, DOCUMENT_TOKENS // max(window, 1))
    if window < 2 or windows_per_document < 1:
        raise UsageError(
            f"{window=}, {windows_per_document=}; a window needs at least 2 tokens, a document at "
            "least 1 window"
        )
    if separator == "":
        raise UsageError("the document separator is empty; give the text between two documents")
    windows: list[tuple[int, ...]] = []
    owner: list[int] = []
    if separator is None:
        ids = encode(text)
        for number in range(len(ids) // window):
            windows.append(tuple(ids[number * window : (number + 1) * window]))
            owner.append(number // windows_per_document)
        found = len(ids)
    else:
        found = 0
        for part in text.split(separator):
            ids = encode(part)
            found += len(ids)
            own = [tuple(ids[i : i + window]) for i in range(0, len(ids), window)]
            own = [ids for ids in own if len(ids) > 1]
            if own:
                owner += [owner[-1] + 1 if owner else 0] * len(own)
                windows += own
    if limit is not None:
        kept = sum(document < limit for document in owner)
        windows, owner = windows[:kept], owner[:kept]
    if not windows:
        raise UsageError(
            f"the text has {found} tokens, a window takes {window}; give a longer text, or a "
            "smaller window"
        )
    return Documents(tuple(windows), tuple(owner), window)
