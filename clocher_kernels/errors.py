"""The errors Clocher raises on purpose. They know nothing of processes or exit codes.

Every message says what was wrong, what was found, what was expected, and what to do next.
"""


class ClocherError(Exception):
    """Base of every error raised on purpose."""


class UsageError(ClocherError):
    """A flag, an environment variable or an argument has a value that cannot be used."""


class SessionBusy(UsageError):
    """A session was asked for something while a generation has it."""


class ModelError(ClocherError):
    """A model is missing, unreadable or not one that Clocher knows."""


class ModelNotFound(ModelError):
    """The named model is not there."""


class FormatError(ModelError):
    """A model file breaks its format: truncated, overlapping, inconsistent or absurd."""


class ModelChanged(ModelError):
    """A file of a model is no longer the one that was loaded: written to, replaced or gone."""


class UnsupportedModel(ModelError):
    """The file is sound, but its architecture or one of its settings is not known."""


class NonFinite(ModelError):
    """A forward pass made NaN or infinity: a weight holds one, or a value overflowed.

    Attributes:
        sequence: index of the prompt that it happened to, in the call that generated.
    """

    def __init__(self, message: str, sequence: int = 0) -> None:
        super().__init__(message)
        self.sequence = sequence


class ShapeError(ClocherError):
    """Arrays given to an op or a codec do not fit together."""


class UnsupportedOp(ClocherError):
    """A back end has no kernel for this op with this format."""


class DeviceError(ClocherError):
    """A device or back end that was asked for by name is not available."""


class OutOfMemory(ClocherError):
    """The memory that a request needs is not there."""


class WindowError(ClocherError):
    """Something that must not happen inside a timed window was asked for while one is open."""
