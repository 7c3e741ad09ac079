"""Chat templates: Jinja programs of models, run in a process with limits (docs/limits.md)."""

from collections.abc import Iterable, Mapping
from typing import Any

from clocher_kernels.errors import FormatError, UsageError
from clocher_runtime.text.text_process import PROCESS, Refused

MAX_TEMPLATE_BYTES = 64 << 10
MAX_SECONDS = 1.0
MAX_MEMORY_BYTES = 256 << 20


class ChatTemplate:
    """A template (or a list with a "default") with transformers' functions; raises FormatError."""

    def __init__(self, source: object) -> None:
        self._text = template_text(source)
        if len(self._text.encode("utf-8", errors="replace")) > MAX_TEMPLATE_BYTES:
            raise FormatError(
                f"chat template of {len(self._text)} characters; the limit is "
                f"{MAX_TEMPLATE_BYTES} bytes"
            )
        try:
            self._reads = frozenset(self._ask("compile_template"))
        except Refused as error:
            # Constant expressions are evaluated already here.
            stopped = "" if error.kind == "refused" else " stopped"
            raise FormatError(f"chat template{stopped}: {error}") from None

    def render(self, **variables: Any) -> str:
        """Return the text; raises UsageError (rejected), FormatError (forbidden, over limits)."""
        try:
            text: str = self._ask("render", variables=variables)
        except Refused as error:
            if error.kind == "refused":
                raise UsageError(f"chat template refused the messages: {error}") from None
            raise FormatError(f"chat template stopped: {error}") from None
        return text

    def refuse_unread(self, variables: Iterable[str]) -> None:
        """Raise UsageError if the template does not read one of the variables."""
        if unread := sorted(set(variables) - self._reads):
            raise UsageError(
                f"{unread[0]!r} is neither an option nor a variable of the chat template, which "
                f"reads {', '.join(sorted(self._reads))}"
            )

    def _ask(self, operation: str, **arguments: Any) -> Any:
        return PROCESS.ask(operation, MAX_SECONDS, MAX_MEMORY_BYTES, source=self._text, **arguments)


def template_text(source: object) -> str:
    """Return the text of a template, or of the "default" in a list; raises FormatError."""
    if isinstance(source, list):
        entries = [entry for entry in source if isinstance(entry, Mapping)]
        named = {entry.get("name"): entry.get("template") for entry in entries}
        source = named.get("default")
    if not isinstance(source, str):
        raise FormatError("chat template: expected text, or a list with one named 'default'")
    return source
