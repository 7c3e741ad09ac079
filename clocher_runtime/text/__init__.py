"""Text to ids and back: tokenizer, chat templates, prompts and their pipeline, answers."""

from clocher_kernels.errors import ClocherError


class Refused(ClocherError):
    """The work failed; `kind` is "refused", "forbidden", "unicode", "memory", "time" or "crash"."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
