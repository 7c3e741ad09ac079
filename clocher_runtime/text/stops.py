"""Strings that end a text, found in text that comes in pieces."""

from collections.abc import Collection, Sequence


def open_length(text: str, strings: Collection[str]) -> int:
    """Return how many characters at the end of a text may begin one of some strings."""
    start = len(text)
    for string in strings:
        at = text.find(string[0], max(0, len(text) - len(string) + 1))
        while 0 <= at < start:
            if string.startswith(text[at:]):
                start = at
            at = text.find(string[0], at + 1)
    return len(text) - start


class StopStrings:
    """Gives out a text up to the first stop string, and never a part of one.

    Args:
        stops: none of them empty.

    Attributes:
        found: the stop string that ended the text.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""  # may be the beginning of a stop string
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Return what more of the text is certain; "" after a stop string was found."""
        if self.found is not None:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        at, found = min(
            ((at, stop) for stop in self._stops if (at := text.find(stop)) >= 0),
            default=(-1, None),
        )
        if found is not None:
            self.found, self._held = found, ""
            return text[:at]
        kept = open_length(text, self._stops)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def flush(self) -> str:
        """Return what was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held
