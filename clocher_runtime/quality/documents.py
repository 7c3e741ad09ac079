"""The documents of a text: what a comparison scores, and what its intervals resample."""

from collections.abc import Callable, Sequence
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
    owner: tuple[int, ...]  # document of each window, counted from 0, never falling
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


def cut(
    text: str,
    encode: Encode,
    window: int,
    *,
    windows_per_document: int | None = None,
    separator: str | None = None,
    limit: int | None = None,
) -> Documents:
    """Cut a text into at most `limit` documents of windows of `window` tokens.

    Without a separator the text is one run of tokens, the last partial window left out, and each
    `windows_per_document` windows (by default those in 1024 tokens) are a document. With one, each
    part between two separators is a document, encoded by itself; its last window may be short.

    Raises UsageError: a number is out of range, or the text is too short for one window.
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
    found = 0
    for part in [text] if separator is None else text.split(separator):
        ids = encode(part)
        found += len(ids)
        own = [tuple(ids[i : i + window]) for i in range(0, len(ids), window)]
        least = window if separator is None else 2
        own = [ids for ids in own if len(ids) >= least]
        if separator is None:
            owner = [number // windows_per_document for number in range(len(own))]
        elif own:
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
