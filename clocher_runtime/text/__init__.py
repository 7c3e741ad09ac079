"""Text to ids and back: tokenizer, chat templates, prompts and their pipeline, answers."""

from collections.abc import Mapping

from clocher_kernels.errors import ClocherError, FormatError


class Refused(ClocherError):
    """The work failed; `kind` is "refused", "forbidden", "unicode", "memory", "time" or "crash"."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def template_text(source: object) -> str:
    """Return the text of a template, or of the "default" in a list; raises FormatError."""
    if isinstance(source, list):
        entries = [entry for entry in source if isinstance(entry, Mapping)]
        named = {entry.get("name"): entry.get("template") for entry in entries}
        source = named.get("default")
    if not isinstance(source, str):
        raise FormatError("chat template: expected text, or a list with one named 'default'")
    return source
