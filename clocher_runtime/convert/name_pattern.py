"""Regular expressions for tensor names, from files that nobody has checked yet.

They are matched by RE2, in time linear in the name, where Python's own `re` would try for years
what a hostile pattern such as `(a+)+b` asks of it. The syntax is that of `re` without what cannot
be matched so: look-around (`(?=`, `(?!`) and back-references.

Source: R. Cox, "Regular Expression Matching Can Be Simple And Fast", 2007.
"""

from typing import Any

from clocher_kernels.errors import UsageError

MAX_PATTERN_CHARS = 500


class NamePattern:
    """A pattern that a whole name has to match.

    Attributes:
        text: the pattern as it was written.
    """

    __slots__ = ("_compiled", "text")

    def __init__(self, text: str) -> None:
        """Compile a pattern.

        Raises:
            UsageError: it is too long, or no regular expression that RE2 knows.
        """
        if len(text) > MAX_PATTERN_CHARS:
            raise UsageError(f"a pattern has at most {MAX_PATTERN_CHARS} characters")
        self.text = text
        self._compiled = _compile(text)

    def matches(self, name: str) -> bool:
        """Return whether the pattern matches the whole name."""
        return self._compiled.fullmatch(name) is not None


def _compile(text: str) -> Any:
    # Imported here, because a model whose manifest has been applied runs without it.
    import re2

    options = re2.Options()
    options.log_errors = False
    try:
        return re2.compile(text, options)
    except (re2.error, UnicodeError) as error:
        said = error.args[0] if error.args else ""
        reason = said.decode(errors="replace") if isinstance(said, bytes) else str(error)
        raise UsageError(
            f"pattern {text!r:.80}: {reason}; expected a regular expression for tensor names, "
            "without look-around or back-references"
        ) from None
