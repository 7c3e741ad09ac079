"""The errors Clocher raises on purpose: problem, found and expected value, next step."""


def counted(count: int, noun: str) -> str:
    """Return a count with its noun, for messages: "1 token", "2 tokens"."""
    return f"{count} {noun}{'s' * (count != 1)}"


class ClocherError(Exception):
    """Base of every error raised on purpose."""


class UsageError(ClocherError):
    """A flag, an environment variable or an argument has an unusable value."""


class PromptTooLong(UsageError):
    """A prompt surely has more tokens than the context."""


class SessionBusy(UsageError):
    """A session is in use by another generation."""


class ModelError(ClocherError):
    """A model is missing, unreadable or unsupported."""


class ModelNotFound(ModelError):
    """The named model is not there."""


class FormatError(ModelError):
    """A model file breaks its format: truncated, overlapping, inconsistent or absurd."""


class ModelChanged(ModelError):
    """A model file was modified, replaced or removed after loading."""


class UnsupportedModel(ModelError):
    """The file is sound, but its architecture or one of its settings is not supported."""


class NonFinite(ModelError):
    """A forward pass produced NaN or infinity for the prompt with index `sequence` in the call."""

    def __init__(self, message: str, sequence: int = 0) -> None:
        super().__init__(message)
        self.sequence = sequence


class ConstraintFailed(ClocherError):
    """A sampled token broke the output constraint that should have masked it out."""


class ShapeError(ClocherError):
    """Arrays given to an op or a codec do not fit together."""


class UnsupportedOp(ClocherError):
    """A back end has no kernel for this op with this format."""


class DeviceError(ClocherError):
    """The requested device or back end is not available."""


class OutOfMemory(ClocherError):
    """Not enough memory."""


class WindowError(ClocherError):
    """A forbidden action was attempted inside a timed window."""
