"""Structure-aware mutations of pickled weights: opcodes of the pickle, records of the archive."""

import pickletools
from collections.abc import Callable
from io import BytesIO
from random import Random
from zipfile import ZIP_BZIP2, ZIP_DEFLATED, ZIP_LZMA, ZIP_STORED, ZipFile, ZipInfo

from fuzz.hf_seeds import archive_bytes
from fuzz.mutations import EDGES, MAX_BYTES, Words, mutate_bytes

_PICKLE = "archive/data.pkl"
_GLOBALS = (
    *("builtins bytearray", "collections Counter", "collections OrderedDict", "os mkdir"),
    *(f"torch {name}" for name in ("BoolStorage", "FloatStorage", "Size", "Tensor", "device")),
    *("torch float32", "torch.storage UntypedStorage", "torch._utils _rebuild_parameter"),
    *("torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_tensor_v3"),
    *(f"torch._utils _rebuild_{what}" for what in ("meta_tensor_no_storage", "sparse_tensor")),
)
_PIECES = (
    *(bytes([opcode]) for opcode in b"().02NRQ]abestu}\x81\x85\x86\x8f\x94"),
    *(b"\x86q\3" + b"h\3h\3\x86q\3" * 40, b"(" * 300, b"\x85" * 300, b"}" + b"]\x85" * 20 + b"Ns"),
    *(b"h\0)R", b"h\2", b"X\1\0\0\0a", b"G?\xf0\0\0\0\0\0\0", b"\x8a\xff" + b"\x7f" * 255),
)


def mutate_torch_bin(data: bytes, dice: Random, words: Words) -> bytes:
    """Change the pickle and pack it again, mostly; or records, the directory, any byte."""
    kind = dice.random()
    if kind < 0.15:
        return mutate_bytes(data, dice)
    if kind < 0.3:
        return _edit_directory(data, dice)
    with ZipFile(BytesIO(data)) as archive:
        records = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    if kind < 0.45:
        return _edit_records(records, dice)[:MAX_BYTES]
    pickle = records[_PICKLE]
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        pickle = _edit_pickle(pickle, dice)
    return archive_bytes(records | {_PICKLE: pickle})[:MAX_BYTES]


def _edit_pickle(data: bytes, dice: Random) -> bytes:
    starts = _opcodes(data)
    if len(starts) < 3:
        return mutate_bytes(data, dice)
    at = dice.randrange(len(starts) - 1)
    begin, end = starts[at], starts[at + 1]
    one = data[begin:end]
    edits: tuple[Callable[[], bytes], ...] = (
        lambda: b"",
        lambda: one + one,
        lambda: dice.choice(_PIECES) + one,
        lambda: one + dice.choice(_PIECES),
        lambda: dice.choice(_PIECES),
        lambda: mutate_bytes(one, dice),
        lambda: _integer(dice),
        lambda: b"c" + dice.choice(_GLOBALS).replace(" ", "\n").encode() + b"\n",
        lambda: _other(data, starts, dice),
    )
    if one[:1] in (b"J", b"K") and dice.random() < 0.7:
        edits = (edits[6],)
    elif one[:1] == b"c" and dice.random() < 0.7:
        edits = (edits[7],)
    return data[:begin] + dice.choice(edits)() + data[end:]


def _opcodes(data: bytes) -> list[int]:
    """Return where the opcodes of a pickle begin, as far as it is sound."""
    starts = []
    try:
        for _, _, at in pickletools.genops(data):
            starts.append(int(at or 0))
    except (ValueError, IndexError, OverflowError):
        pass
    return starts


def _integer(dice: Random) -> bytes:
    value = dice.choice(EDGES) * dice.choice((1, 1, -1))
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + value.to_bytes(4, "little", signed=True)
    return b"\x8a\x0a" + value.to_bytes(10, "little", signed=True)


def _other(data: bytes, starts: list[int], dice: Random) -> bytes:
    """Return a run of opcodes from elsewhere in the pickle."""
    begin = dice.randrange(len(starts) - 1)
    end = min(begin + dice.choice((1, 2, 5, 20)), len(starts) - 1)
    return data[starts[begin] : starts[end]]


def _edit_records(records: dict[str, bytes], dice: Random) -> bytes:
    """Drop, rename, repeat, compress or change records."""
    name = dice.choice(list(records))
    kind = dice.randrange(5)
    if kind == 0:
        del records[name]
    elif kind == 1:
        renamed = dice.choice(
            (name.upper(), f"x{name}", "archive/data/9", "../../x", "constants.pkl")
        )
        records[renamed] = records.pop(name)
    elif kind == 2:
        records[name] = mutate_bytes(records[name], dice)
    out = BytesIO()
    with ZipFile(out, "w") as archive:
        for each, data in records.items():
            method = ZIP_STORED
            if kind > 2 and each == name:
                method = dice.choice((ZIP_DEFLATED, ZIP_BZIP2, ZIP_LZMA))
            archive.writestr(ZipInfo(each), data, method)
        if kind == 4:
            archive.comment = b"c" * dice.randrange(30)
    return out.getvalue()


def _edit_directory(data: bytes, dice: Random) -> bytes:
    """Change numbers of the directory, its end, or a record's own header."""
    magic = dice.choice((b"PK\1\2", b"PK\1\2", b"PK\3\4", b"PK\5\6"))
    places = [at for at in range(len(data)) if data.startswith(magic, at)]
    at = dice.choice(places) + 2 * dice.randrange(2, 24)
    width = dice.choice((2, 4))
    value = dice.choice((*EDGES, 8, 12, 14, 0xFFFF, len(data))) % (1 << 8 * width)
    return data[:at] + value.to_bytes(width, "little") + data[at + width :]
