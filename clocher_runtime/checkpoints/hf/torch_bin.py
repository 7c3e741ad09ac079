"""Pickled PyTorch weights (`pytorch_model*.bin`), read without unpickling them.

A pickle is a program: it can run code, compute for ever and ask for any memory, and torch's
restricted unpickler has been made to (CVE-2025-32434). So nobody runs it. Every opcode is followed
with the kinds of values alone, which tells where each tensor lies in the file, a ZIP archive of
uncompressed arrays that is mapped; whatever a dictionary of plain tensors has no use for is
refused. torch is not needed.

Source: torch/serialization.py and torch/_utils.py; pickletools for the opcodes.
"""

import math
import pickletools
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from clocher_kernels.dtypes import STORAGE
from clocher_kernels.errors import FormatError, UnsupportedModel
from clocher_runtime.checkpoints.checkpoint import Checkpoint
from clocher_runtime.checkpoints.hf.arrays import Arrays, StoredArray
from clocher_runtime.checkpoints.hf.checkpoint import find_hf, read_folder, read_shards
from clocher_runtime.checkpoints.hf.foreign import no_directory
from clocher_runtime.disk.files import MappedFile
from clocher_runtime.disk.safetensors_file import DTYPES
from clocher_runtime.disk.strict_json import MAX_ELEMENTS, MAX_RANK, checked_name, checked_shape
from clocher_runtime.disk.zip_directory import Record, stored_records

_PICKLE = "data.pkl"
_PICKLE_BYTES = 1 << 20
_PICKLE_BYTES_PER_RECORD = 1 << 10
_BYTES_PER_DICTIONARY = 8
"""Of the pickle, at the least: a tensor has one, and needs more bytes than that."""
_MAX_DEPTH = 8
_READ_DTYPES = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
_OTHER_DTYPES = """float64 int16 uint64 uint32 uint16 float8_e4m3fnuz float8_e5m2fnuz
    float8_e8m0fnu"""
_STORAGES = {
    "Double": "float64",
    "Float": "float32",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
}
_BYTES = ""
"""Stands for the type of a storage that says none: its elements are bytes."""
_KEY = re.compile("[0-9]{1,9}")
_WAY_OUT = (
    "; convert the model to safetensors (transformers: model.save_pretrained), or get a "
    "safetensors revision of it"
)


def only_pickled(directory: Path) -> bool:
    """Whether a directory has pickled weights and no safetensors."""
    return any(directory.glob("pytorch_model*.bin")) and not any(directory.glob("*.safetensors*"))


def open_torch_bin(path: Path) -> Checkpoint:
    """Open a Hugging Face directory with pickled weights; its kind is "bin".

    Args:
        path: directory with config.json and pytorch_model.bin, or pytorch_model.bin.index.json and
            its shards; or one with these in `hf` or `hf/original`.

    Raises:
        ModelNotFound: a file is missing.
        FormatError: a file is damaged, or holds something other than tensors.
        UnsupportedModel: the files are sound but of a kind that is not read.
        WindowError: a timed window is open.
    """
    directory = find_hf(path)
    if directory is None:
        raise no_directory(path)
    return read_folder(
        directory, "bin", lambda folder: read_shards(folder, "pytorch_model", ".bin", _read_file)
    )


class _Storage(NamedTuple):
    """An array of the archive: the name of its record, its type and how many elements it has."""

    key: str
    dtype: str
    size: int


class PickledTensor(NamedTuple):
    """What a pickle says of a tensor; offset and strides count elements."""

    storage: _Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _read_file(path: Path) -> tuple[Arrays, MappedFile]:
    """Return views of the tensors of one file."""
    file = MappedFile(path)
    try:
        records = stored_records(file)
        folder, _, _ = next(iter(records), "").partition("/")
        if f"{folder}/{_PICKLE}" not in records:
            raise FormatError(f"{path}: holds no {_PICKLE}, as torch 1.6 and later write it")
        order = records.get(f"{folder}/byteorder")
        if order and file.bytes(order.start, order.end).tobytes() != b"little":
            raise UnsupportedModel(f"{path}: written on a big-endian machine{_WAY_OUT}")
        place = records[f"{folder}/{_PICKLE}"]
        limit = _PICKLE_BYTES + _PICKLE_BYTES_PER_RECORD * len(records)
        if place.nbytes > limit:
            raise FormatError(f"{path}: a pickle of {place.nbytes} bytes; the limit is {limit}")
        tensors = pickled_tensors(file.bytes(place.start, place.end).tobytes(), str(path))
        arrays = {}
        for name, tensor in tensors.items():
            where = f"{path}: tensor {checked_name(name, str(path))!r}"
            record = records.get(f"{folder}/data/{tensor.storage.key}")
            if record is None:
                raise FormatError(f"{where}: the file has no array {tensor.storage.key}")
            arrays[name] = _view(tensor, file, record, where)
    except FormatError as error:
        raise FormatError(f"{error}{_WAY_OUT}") from None
    return arrays, file


def _view(tensor: PickledTensor, file: MappedFile, record: Record, where: str) -> StoredArray:
    """Return a tensor as a read-only view of its record."""
    storage = tensor.storage
    if tensor.dtype not in _READ_DTYPES:
        known = ", ".join(_READ_DTYPES)
        raise UnsupportedModel(f"{where} is {tensor.dtype or 'untyped'}; known: {known}")
    dtype = _READ_DTYPES[tensor.dtype]
    kind = STORAGE[DTYPES[dtype]]
    width = kind.itemsize if storage.dtype else 1
    if storage.dtype not in (tensor.dtype, _BYTES) or storage.size * width != record.nbytes:
        raise FormatError(
            f"{where}: {storage.size} elements of {storage.dtype or 'a byte'} in an array of "
            f"{record.nbytes} bytes"
        )
    shape = checked_shape(list(tensor.shape), where)
    if 0 in shape:
        return StoredArray(dtype, np.zeros(shape, kind), where)
    strides = tuple(stride * kind.itemsize for stride in tensor.strides)
    begin = tensor.offset * kind.itemsize
    if len(strides) != len(shape) or min(strides, default=0) < 0:
        raise FormatError(f"{where}: strides {list(tensor.strides)} of a shape {list(shape)}")
    end = begin + kind.itemsize
    end += sum((dim - 1) * stride for dim, stride in zip(shape, strides, strict=True))
    if math.prod(shape) * kind.itemsize > end - begin:
        raise FormatError(
            f"{where}: its elements share memory: {list(shape)} in {end - begin} bytes"
        )
    if begin < 0 or end > record.nbytes:
        raise FormatError(f"{where}: reaches beyond its array")
    data = file.bytes(record.start + begin, record.start + end).view(kind)
    return StoredArray(
        dtype, np.lib.stride_tricks.as_strided(data, shape, strides, writeable=False), where
    )


class _Refused(Exception):
    """The pickle asks for something that no dictionary of plain tensors needs."""


@dataclass(slots=True, eq=False)
class _Value:
    """A value that the pickle would make: its kind, and what else has to be known of it.

    Attributes:
        held: text, number, tuple or tensor itself; the items of a dictionary once it has some.
    """

    kind: str
    held: Any = None
    depth: int = 0


_ORDERED_DICT = "collections.OrderedDict"
_REBUILD = "torch._utils._rebuild_"
_PARAMETER = f"{_REBUILD}parameter"
_GLOBALS = {
    _ORDERED_DICT: _Value("dictionary type", _ORDERED_DICT),
    **{
        name: _Value("function", name)
        for name in (f"{_REBUILD}tensor_v2", f"{_REBUILD}tensor_v3", _PARAMETER)
    },
    **{f"torch.{n}Storage": _Value("storage type", dtype) for n, dtype in _STORAGES.items()},
    "torch.storage.UntypedStorage": _Value("storage type", _BYTES),
    **{f"torch.{n}": _Value("dtype", n) for n in (*_READ_DTYPES, *_OTHER_DTYPES.split())},
}


def pickled_tensors(data: bytes, where: str) -> dict[str, PickledTensor]:
    """Return the tensors that a pickle would make.

    Args:
        data: the pickle.
        where: what it is, for messages: the file.

    Raises:
        FormatError: it makes anything but a dictionary of plain tensors.
    """
    machine = _Machine(1 + len(data) // _BYTES_PER_DICTIONARY)
    try:
        for opcode, argument, _ in pickletools.genops(data):
            machine.follow(opcode.name, argument)
        made = machine.stack[-1]
    except _Refused as error:
        raise FormatError(f"{where}: the pickle is refused ({error})") from None
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise FormatError(f"{where}: the pickle is damaged ({type(error).__name__})") from None
    if made.kind != "dictionary" or not made.held:
        raise FormatError(f"{where}: holds {made.kind}, expected a dictionary of tensors")
    for name, value in made.held.items():
        if not isinstance(name, str) or value.kind != "tensor":
            raise FormatError(
                f"{where}: {name!r:.80} is {value.kind}, expected a dictionary of tensors alone "
                "(is it a training checkpoint?)"
            )
    return {name: value.held for name, value in made.held.items()}


class _Machine:
    """The stack of an unpickler, of kinds instead of values."""

    def __init__(self, dictionaries: int) -> None:
        self.stack: list[_Value] = []
        self._dictionaries = dictionaries
        self._marked: list[list[_Value]] = []
        self._memo: dict[int, _Value] = {}

    def follow(self, name: str, argument: Any) -> None:
        """Do what one opcode does to the stack."""
        if name in _PUSHED:
            self.stack.append(_PUSHED[name])
        elif name in _READ:
            self.stack.append(_READ[name](argument))
        elif name in ("BINPUT", "LONG_BINPUT"):
            self._memo[argument] = self.stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            self.stack.append(self._memo[argument])
        elif name in _DONE:
            _DONE[name](self)
        elif name not in ("PROTO", "STOP"):
            raise _Refused(f"it has the opcode {name}")

    def mark(self) -> None:
        """Begin a run of values."""
        self._marked.append(self.stack)
        self.stack = []

    def run(self) -> list[_Value]:
        """Take the values since the last mark."""
        values, self.stack = self.stack, self._marked.pop()
        return values

    def last(self, count: int) -> list[_Value]:
        """Take the last values."""
        if len(self.stack) < count:
            raise IndexError
        values = self.stack[-count:]
        del self.stack[-count:]
        return values

    def tuple_of(self, values: list[_Value]) -> None:
        """Make a tuple."""
        depth = 1 + max((value.depth for value in values), default=0)
        if depth > _MAX_DEPTH:
            raise _Refused(f"tuples nested deeper than {_MAX_DEPTH}")
        self.stack.append(_Value("tuple", tuple(values), depth))

    def dictionary(self) -> None:
        """Make a dictionary, unless there are more of them than tensors of this size need."""
        self._dictionaries -= 1
        if self._dictionaries < 0:
            raise _Refused("it makes too many dictionaries")
        self.stack.append(_Value("dictionary"))

    def append(self, values: list[_Value]) -> None:
        """Add values to a list."""
        if self.stack[-1].kind != "list":
            raise _Refused(f"it appends to a {self.stack[-1].kind}")

    def set_items(self, values: list[_Value]) -> None:
        """Add keys and values to a dictionary."""
        target = self.stack[-1]
        if target.kind != "dictionary" or len(values) % 2:
            raise _Refused(f"it sets items of a {target.kind}")
        target.held = target.held or {}
        for key, value in zip(values[::2], values[1::2], strict=True):
            if key.kind not in ("text", "integer"):
                raise _Refused(f"a key is a {key.kind}")
            target.held[key.held] = value

    def build(self) -> None:
        """Give a dictionary attributes, as those of a module have; they are of no use here."""
        if [value.kind for value in self.last(1) + self.stack[-1:]] != ["dictionary"] * 2:
            raise _Refused("it sets the state of something that is no dictionary")

    def storage(self) -> None:
        """Name a storage: ("storage", type, key, device, elements)."""
        (value,) = self.last(1)
        if _kinds(value) != ["text", "storage type", "text", "text", "integer"]:
            raise _Refused("it names something that is no storage")
        label, dtype, key, _, count = (item.held for item in value.held)
        if label != "storage" or not _KEY.fullmatch(key) or not 0 <= count <= MAX_ELEMENTS:
            raise _Refused("it names an odd storage")
        self.stack.append(_Value("storage", _Storage(key, dtype, count)))

    def call(self) -> None:
        """Call a function."""
        function, arguments = self.last(2)
        kinds, values = _kinds(arguments), arguments.held
        if function.held == _ORDERED_DICT and kinds == []:
            self.dictionary()
            return
        if function.held == _PARAMETER and kinds == ["tensor", "flag", "dictionary"]:
            self.stack.append(values[0])
            return
        expected = ["storage", "integer", "tuple", "tuple", "flag", "dictionary"]
        if function.held == f"{_REBUILD}tensor_v3":
            expected.append("dtype")
        if function.kind != "function" or function.held == _PARAMETER or kinds != expected:
            raise _Refused(f"it calls {function.held or function.kind!s:.80} in an unusual way")
        shape, strides = (tuple(n.held for n in numbers.held) for numbers in values[2:4])
        if set(_kinds(values[2]) + _kinds(values[3])) - {"integer"} or len(shape) > MAX_RANK:
            raise _Refused("a tensor has an odd shape")
        dtype = values[6].held if len(values) == 7 else values[0].held.dtype
        tensor = PickledTensor(values[0].held, dtype, values[1].held, shape, strides)
        self.stack.append(_Value("tensor", tensor))


def _kinds(value: _Value) -> list[str]:
    """Return the kinds of what a tuple holds."""
    if value.kind != "tuple":
        raise _Refused(f"a {value.kind} where a tuple belongs")
    return [item.kind for item in value.held]


def _global(argument: str) -> _Value:
    name = argument.replace(" ", ".")
    if argument.count(" ") != 1 or name not in _GLOBALS:
        raise _Refused(f"it asks for {name!s:.100}")
    return _GLOBALS[name]


_NUMBER = _Value("number")
_PUSHED = {
    "NONE": _NUMBER,
    "NEWTRUE": _Value("flag"),
    "NEWFALSE": _Value("flag"),
    "EMPTY_LIST": _Value("list"),
    "EMPTY_TUPLE": _Value("tuple", (), 1),
}
_READ: dict[str, Callable[[Any], _Value]] = {
    "GLOBAL": _global,
    "BINUNICODE": lambda argument: _Value("text", argument),
    "BINFLOAT": lambda argument: _NUMBER,
    **dict.fromkeys(
        ("BININT", "BININT1", "BININT2", "LONG1"), lambda argument: _Value("integer", argument)
    ),
}
_DONE: dict[str, Callable[[_Machine], None]] = {
    "MARK": _Machine.mark,
    "EMPTY_DICT": _Machine.dictionary,
    "TUPLE": lambda machine: machine.tuple_of(machine.run()),
    "TUPLE1": lambda machine: machine.tuple_of(machine.last(1)),
    "TUPLE2": lambda machine: machine.tuple_of(machine.last(2)),
    "TUPLE3": lambda machine: machine.tuple_of(machine.last(3)),
    "APPEND": lambda machine: machine.append(machine.last(1)),
    "APPENDS": lambda machine: machine.append(machine.run()),
    "SETITEM": lambda machine: machine.set_items(machine.last(2)),
    "SETITEMS": lambda machine: machine.set_items(machine.run()),
    "BUILD": _Machine.build,
    "BINPERSID": _Machine.storage,
    "REDUCE": _Machine.call,
}
