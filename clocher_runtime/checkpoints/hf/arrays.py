"""What the readers of quantised Hugging Face checkpoints share: taking arrays, reading settings."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from clocher_kernels.errors import FormatError, UnsupportedModel
from clocher_runtime.checkpoints.checkpoint import Stored

FLOATS = ("F32", "F16", "BF16")

REQUANTISE = "quantise the float checkpoint again"

_MAX_GROUP = 999_999

# They scale activations and the KV cache, which run as the session's settings say.
_ACTIVATION_SCALES = (
    ".input_scale",
    ".input_zero_point",
    ".output_scale",
    ".output_zero_point",
    ".activation_scale",
    ".q_scale",
    ".k_scale",
    ".v_scale",
)


@dataclass(frozen=True, slots=True, eq=False)
class StoredArray:
    """An array as a shard holds it.

    Attributes:
        dtype: safetensors name.
        array: view of the mapped file.
        where: file and tensor, for messages.
    """

    dtype: str
    array: np.ndarray
    where: str

    def expect(self, dtypes: tuple[str, ...], *shapes: tuple[int, ...]) -> None:
        """Raise FormatError unless the array has one of these dtypes and shapes (if any given)."""
        if self.dtype not in dtypes:
            raise FormatError(f"{self.where}: dtype {self.dtype}, expected {' or '.join(dtypes)}")
        if shapes and self.array.shape not in shapes:
            expected = " or ".join(str(list(shape)) for shape in shapes)
            raise FormatError(f"{self.where}: shape {list(self.array.shape)}, expected {expected}")

    def matrix(self) -> tuple[int, int]:
        """Return the two dimensions; raise FormatError if there are others, or an empty one."""
        if self.array.ndim != 2 or 0 in self.array.shape:
            raise FormatError(
                f"{self.where}: shape {list(self.array.shape)}, expected 2 dimensions of at least 1"
            )
        return self.array.shape


Arrays = dict[str, StoredArray]
Tensors = dict[str, Stored]


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """A checkpoint while its quantised tensors are being recognised.

    Attributes:
        rest: arrays that no tensor has claimed yet.
        settings: `quantization_config`.
        notes: what a person should know about how it was read.
    """

    rest: Arrays
    settings: Mapping[str, Any]
    notes: list[str] = field(default_factory=list)

    def ending(self, suffix: str) -> list[str]:
        """Return the names of unclaimed arrays that end so."""
        return [name for name in self.rest if name.endswith(suffix)]

    def claim(self, name: str, owner: StoredArray) -> StoredArray:
        """Take an array that belongs to another one.

        Raises:
            FormatError: there is no such array.
        """
        if name not in self.rest:
            raise FormatError(f"{owner.where}: packed, but {name!r} is missing")
        return self.rest.pop(name)

    def drop_activation_scales(self) -> None:
        """Leave out the scales of activations and of the KV cache, with a note."""
        dropped = [name for name in self.rest if name.endswith(_ACTIVATION_SCALES)]
        for name in dropped:
            del self.rest[name]
        if dropped:
            self.notes.append(
                f"{len(dropped)} stored scales of activations or of the KV cache are not used, "
                f"such as {dropped[0]}: these run as act_prec and kv_dtype say"
            )

    def refuse_orphans(self, *suffixes: str) -> None:
        """Raise FormatError if an array is left that only makes sense beside a packed weight."""
        for name, stored in self.rest.items():
            if name.endswith(suffixes):
                raise FormatError(f"{stored.where}: no packed weight belongs to it")

    def choice(self, key: str, default: Any, known: Iterable[Any], way_out: str = "") -> Any:
        """Return a setting that must be one of the known ones; null counts as left out."""
        return one_of(self.settings, key, default, known, way_out)

    def group_size(self) -> int | None:
        """Return the setting `group_size`, None for -1: a scale per row."""
        return columns_per_group(self.settings.get("group_size"))


def columns_per_group(value: object) -> int | None:
    """Return a setting `group_size`, None for -1: a scale per row.

    Raises:
        FormatError: it is neither -1 nor a number that a format's name can spell.
    """
    if type(value) is not int or not (value == -1 or 1 <= value <= _MAX_GROUP):
        raise FormatError(
            f"quantization_config: group_size is {value!r:.60}; expected -1 or 1 to {_MAX_GROUP}"
        )
    return None if value == -1 else value


def one_of(
    settings: Mapping[str, Any], key: str, default: Any, known: Iterable[Any], way_out: str = ""
) -> Any:
    """Return a setting that must be one of the known ones; null counts as left out.

    Raises:
        UnsupportedModel: it is another one.
    """
    value = settings.get(key)
    value = default if value is None else value
    known = tuple(known)
    # True == 1 in Python, and a list has no hash.
    if not any(type(value) is type(item) and value == item for item in known):
        raise unknown(key, value, known, way_out)
    return value


def unknown(key: str, value: object, known: Iterable[object], way_out: str = "") -> Exception:
    """Return the error for a setting that is not known."""
    text = f"quantization_config: {key} {value!r:.60} is not known; known: "
    text += ", ".join(str(item) for item in known)
    return UnsupportedModel(f"{text}; {way_out}" if way_out else text)


def refuse_act_order(g_idx: StoredArray, columns: int, group: int | None) -> None:
    """Refuse columns whose groups are not simply runs of `group` columns.

    Raises:
        FormatError: it is no i32 [K].
        UnsupportedModel: the order of the columns matters.
    """
    g_idx.expect(("I32", "I64"), (columns,))
    if not np.array_equal(g_idx.array, np.arange(columns) // (group or columns)):
        raise UnsupportedModel(
            f"{g_idx.where}: its columns are in activation order (desc_act, actorder=group), so "
            "neighbours do not share a scale, which no format here can hold; "
            f"{REQUANTISE} with desc_act=false or static groups"
        )
