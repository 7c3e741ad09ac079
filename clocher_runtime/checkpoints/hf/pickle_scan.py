"""What a pickle of tensors would do, followed without doing it, before torch's unpickler may.

That unpickler runs no foreign code, but it computes what it is told to: hashes of tuples nested so
that they take for ever, arrays of any size. Here every opcode is followed with the kinds of values
alone, and whatever a dictionary of plain tensors has no use for is refused.
"""

import pickletools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from clocher_kernels.errors import FormatError
from clocher_runtime.disk.strict_json import MAX_ELEMENTS, MAX_RANK

ORDERED_DICT = "collections.OrderedDict"
_MAX_DEPTH = 8
_UTILS = "torch._utils._rebuild_"
_PARAMETER = f"{_UTILS}parameter"
_STORAGES = (
    "Double Float Half BFloat16 Long Int Short Char Byte Bool".replace(" ", "Storage ") + "Storage"
)
_DTYPES = """float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 float8_e4m3fnuz
    float8_e5m2fnuz float8_e8m0fnu int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool"""
_KINDS = {
    ORDERED_DICT: "dictionary type",
    **dict.fromkeys((f"{_UTILS}tensor_v2", f"{_UTILS}tensor_v3", _PARAMETER), "function"),
    **{f"torch.{name}": "storage type" for name in _STORAGES.split()},
    "torch.storage.UntypedStorage": "storage type",
    **{f"torch.{name}": "dtype" for name in _DTYPES.split()},
}
_KEY = re.compile("[0-9]{1,9}")


class Refused(Exception):
    """The pickle asks for something that no dictionary of plain tensors needs."""


@dataclass(frozen=True, slots=True, eq=False)
class _Value:
    """A value that the pickle would make: its kind, and what else has to be known of it."""

    kind: str
    held: Any = None
    depth: int = 0


_DICTIONARY, _LIST, _TENSOR, _STORAGE = map(_Value, ("dictionary", "list", "tensor", "storage"))
_OTHER = _Value("number")


def scan_pickle(data: bytes, where: str) -> set[str]:
    """Return the keys of the storages that a pickle names.

    Args:
        data: the pickle.
        where: what it is, for messages: the file.

    Raises:
        FormatError: it asks for anything but dictionaries, lists and tensors.
    """
    machine = _Machine()
    try:
        for opcode, argument, _ in pickletools.genops(data):
            machine.follow(opcode.name, argument)
    except Refused as error:
        raise FormatError(f"{where}: the pickle is refused ({error})") from None
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise FormatError(f"{where}: the pickle is damaged ({type(error).__name__})") from None
    return machine.keys


class _Machine:
    """The stack of an unpickler, of kinds instead of values."""

    def __init__(self) -> None:
        self.keys: set[str] = set()
        self._stack: list[_Value] = []
        self._marked: list[list[_Value]] = []
        self._memo: dict[int, _Value] = {}

    def follow(self, name: str, argument: Any) -> None:
        """Do what one opcode does to the stack."""
        if name in _PUSHED:
            self._stack.append(_PUSHED[name])
        elif name in _READ:
            self._stack.append(_READ[name](argument))
        elif name in ("BINPUT", "LONG_BINPUT"):
            self._memo[argument] = self._stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            self._stack.append(self._memo[argument])
        elif name in _DONE:
            _DONE[name](self)
        elif name not in ("PROTO", "STOP"):
            raise Refused(f"it has the opcode {name}")

    def mark(self) -> None:
        """Begin a run of values."""
        self._marked.append(self._stack)
        self._stack = []

    def run(self) -> list[_Value]:
        """Take the values since the last mark."""
        values, self._stack = self._stack, self._marked.pop()
        return values

    def last(self, count: int) -> list[_Value]:
        """Take the last values."""
        if len(self._stack) < count:
            raise IndexError
        values = self._stack[-count:]
        del self._stack[-count:]
        return values

    def tuple_of(self, values: list[_Value]) -> None:
        """Make a tuple."""
        depth = 1 + max((value.depth for value in values), default=0)
        if depth > _MAX_DEPTH:
            raise Refused(f"tuples nested deeper than {_MAX_DEPTH}")
        self._stack.append(_Value("tuple", tuple(values), depth))

    def append(self, values: list[_Value]) -> None:
        """Add values to a list."""
        if self._stack[-1].kind != "list":
            raise Refused(f"it appends to a {self._stack[-1].kind}")

    def set_items(self, values: list[_Value]) -> None:
        """Add keys and values to a dictionary."""
        if self._stack[-1].kind != "dictionary" or len(values) % 2:
            raise Refused(f"it sets items of a {self._stack[-1].kind}")
        for key in values[::2]:
            if key.kind not in ("text", "integer"):
                raise Refused(f"a key is a {key.kind}")

    def build(self) -> None:
        """Give a dictionary attributes, as those of a module have."""
        if [value.kind for value in self.last(1) + self._stack[-1:]] != ["dictionary"] * 2:
            raise Refused("it sets the state of something that is no dictionary")

    def storage(self) -> None:
        """Name a storage: ("storage", type, key, device, elements)."""
        (value,) = self.last(1)
        kinds = _kinds(value)
        if kinds != ["text", "storage type", "text", "text", "integer"]:
            raise Refused("it names something that is no storage")
        label, _, key, _, count = (item.held for item in value.held)
        if label != "storage" or not _KEY.fullmatch(key) or not 0 <= count <= MAX_ELEMENTS:
            raise Refused("it names an odd storage")
        self.keys.add(key)
        self._stack.append(_STORAGE)

    def call(self) -> None:
        """Call a function."""
        function, arguments = self.last(2)
        kinds = _kinds(arguments)
        if function.held == ORDERED_DICT and kinds == []:
            self._stack.append(_DICTIONARY)
            return
        if function.held == _PARAMETER and kinds == ["tensor", "flag", "dictionary"]:
            self._stack.append(_TENSOR)
            return
        expected = ["storage", "integer", "tuple", "tuple", "flag", "dictionary"]
        if function.held == f"{_UTILS}tensor_v3":
            expected.append("dtype")
        if function.kind != "function" or function.held == _PARAMETER or kinds != expected:
            raise Refused(f"it calls {function.held or function.kind!s:.80} in an unusual way")
        for numbers in arguments.held[2:4]:
            if set(_kinds(numbers)) - {"integer"} or len(numbers.held) > MAX_RANK:
                raise Refused("a tensor has an odd shape")
        self._stack.append(_TENSOR)


def _kinds(value: _Value) -> list[str]:
    """Return the kinds of what a tuple holds."""
    if value.kind != "tuple":
        raise Refused(f"a {value.kind} where a tuple belongs")
    return [item.kind for item in value.held]


def _global(argument: str) -> _Value:
    name = argument.replace(" ", ".")
    if argument.count(" ") != 1 or name not in _KINDS:
        raise Refused(f"it asks for {name!s:.100}")
    return _Value(_KINDS[name], name)


def _integer(argument: int) -> _Value:
    return _Value("integer", argument)


_PUSHED = {
    "NONE": _OTHER,
    "NEWTRUE": _Value("flag"),
    "NEWFALSE": _Value("flag"),
    "EMPTY_DICT": _DICTIONARY,
    "EMPTY_LIST": _LIST,
    "EMPTY_TUPLE": _Value("tuple", (), 1),
}
_READ: dict[str, Callable[[Any], _Value]] = {
    "GLOBAL": _global,
    "BINUNICODE": lambda argument: _Value("text", argument),
    "BINFLOAT": lambda argument: _OTHER,
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1"), _integer),
}
_DONE: dict[str, Callable[[_Machine], None]] = {
    "MARK": _Machine.mark,
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
