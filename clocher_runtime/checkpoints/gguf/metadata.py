"""The metadata of a GGUF file's model: entries whose names begin with that of the architecture."""

import numpy as np

from clocher_kernels.errors import UnsupportedModel
from clocher_runtime.checkpoints.gguf.file import GgufFile

_WINDOW, _PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
SLIDING, FULL = "sliding_attention", "full_attention"


class Metadata:
    """The entries of one architecture, by the rest of their names.

    `file`: the file; `arch`: the architecture; `where`: the file's path, for messages; `layers`:
    decoder layers; `head_dim`: values of a head of queries and keys.
    """

    def __init__(self, file: GgufFile) -> None:
        self.file, self.where = file, str(file.file.path)
        self.arch = file.text("general.architecture")
        self.layers = self.integer("block_count")
        heads = self.integer("attention.head_count")
        size = self.integer("embedding_length") // max(heads, 1)
        self.head_dim = self.integer("attention.key_length", size)

    def integer(self, key: str, default: int | None = None) -> int:
        """Return an integer; see `GgufFile.integer`. So for the methods below."""
        return self.file.integer(f"{self.arch}.{key}", default)

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number."""
        return self.file.number(f"{self.arch}.{key}", default)

    def flag(self, key: str, default: bool) -> bool:
        """Return a bool."""
        return self.file.flag(f"{self.arch}.{key}", default)

    def text(self, key: str, default: str) -> str:
        """Return a string."""
        return self.file.text(f"{self.arch}.{key}", default)

    def has(self, key: str) -> bool:
        """Return whether there is such an entry."""
        return f"{self.arch}.{key}" in self.file.keys

    @property
    def window(self) -> int:
        """Keys that a layer with a window sees; 0 where there is none."""
        return self.integer(_WINDOW, 0)

    def layer_types(self, every: int) -> list[str]:
        """Return which layers have a window: all but every n-th, unless a list says it.

        Raises UnsupportedModel.
        """
        value = self.file.value(f"{self.arch}.{_PATTERN}")
        if value is None:
            value = every
        if isinstance(value, np.ndarray) and len(value) == self.layers:
            return [SLIDING if slides else FULL for slides in value]
        if isinstance(value, np.ndarray) or not isinstance(value, int) or value < 1:
            raise UnsupportedModel(
                f"{self.where}: {_PATTERN} is {value!r:.60}; Clocher knows a number of layers and "
                f"a list of {self.layers}"
            )
        return [SLIDING if (layer + 1) % value else FULL for layer in range(self.layers)]
