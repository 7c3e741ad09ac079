"""Weights from NumPy arrays or an .npz file: names and shapes, no config.json or tokenizer.

A ZIP archive's directory is bounded before a library reads it. Source: APPNOTE.TXT 6.3.10,
https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT
"""

import struct
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from clocher_kernels.errors import FormatError, ModelError, UsageError
from clocher_kernels.formats import Float
from clocher_kernels.quant_tensor import QuantTensor
from clocher_runtime.checkpoints.checkpoint import Checkpoint, Stored, lazy_tensor, stored_tensor
from clocher_runtime.disk.files import MappedFile
from clocher_runtime.disk.strict_json import checked_name, checked_shape

_FLOATS = {"<f4": "f32", "<f2": "f16"}
_MAX_RATIO = 1032
"""The most that deflate reaches; a larger promise is a lie."""

MAX_RECORDS = 100_000
MAX_DIRECTORY_BYTES = 1 << 24

_END = struct.Struct("<4s4HIIH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")


def records_of(file: MappedFile) -> list[zipfile.ZipInfo]:
    """Return the records; FormatError for damage, overlaps, or names that differ in case alone."""
    _check_directory(file)
    try:
        with zipfile.ZipFile(file.path) as archive:
            records = archive.infolist()
    except (zipfile.BadZipFile, ValueError, OSError, RuntimeError) as error:
        raise refused(file, str(error)) from None
    end = 0
    for record in sorted(records, key=lambda record: record.header_offset):
        if record.header_offset < end:
            raise refused(file, "records overlap")
        end = record.header_offset + record.compress_size
    if len({record.filename.casefold() for record in records}) < len(records):
        raise refused(file, "two records have one name")
    if end > file.nbytes:
        raise refused(file, "a record reaches beyond the file")
    return records


def _check_directory(file: MappedFile) -> None:
    at = file.nbytes - _END.size
    if at < 0 or file.bytes(0, 4).tobytes() != b"PK\3\4":
        raise refused(file, "it does not begin with a record")
    end_record = file.bytes(at, file.nbytes).tobytes()
    magic, disk, first, here, count, nbytes, begin, comment = _END.unpack(end_record)
    if magic != b"PK\5\6" or comment or (disk, here) != (first, count):
        raise refused(file, "it does not end with a directory; it is truncated, or has a comment")
    end = at
    if at >= _LOCATOR.size + _END64.size:
        locator = _LOCATOR.unpack(file.bytes(at - _LOCATOR.size, at).tobytes())
        if locator[0] == b"PK\6\7":
            end = at - _LOCATOR.size - _END64.size
            end64 = _END64.unpack(file.bytes(end, end + _END64.size).tobytes())
            count, nbytes, begin = end64[7:]
            if end64[0] != b"PK\6\6" or end64[6] != count or locator[2] != end:
                raise refused(file, "its directory contradicts itself")
    if count > MAX_RECORDS or nbytes > MAX_DIRECTORY_BYTES or begin + nbytes != end:
        raise refused(file, f"{count} records in {nbytes} bytes of directory (limit {MAX_RECORDS})")


def refused(file: MappedFile, reason: str) -> FormatError:
    """Return the error for an archive that is not read."""
    return FormatError(f"{file.path}: not a ZIP archive that is read: {reason}")


def open_npz(path: Path) -> Checkpoint:
    """Open the float arrays of an .npz file lazily; f64 is rounded to f32, pickles are refused."""
    file = MappedFile(path)
    tensors: dict[str, Stored] = {}
    try:
        entries = records_of(file)
        with zipfile.ZipFile(path) as archive:
            for entry in entries:
                name = checked_name(entry.filename.removesuffix(".npy"), str(path))
                if name in tensors:
                    raise FormatError(f"{path}: array {name!r} is there twice")
                tensors[name] = _npy(archive, entry, path, f"{path}: array {name!r}")
    except (zipfile.BadZipFile, zlib.error, ValueError, EOFError, RuntimeError) as error:
        raise FormatError(f"{path}: not an .npz file of arrays: {error}") from None
    tokenizer = path.parent / "tokenizer.json"
    return Checkpoint(path.parent, "npz", {}, tensors, (file,), tokenizer_json=tokenizer)


def open_arrays(arrays: object, where: str) -> Checkpoint:
    """Return a checkpoint of (name, array) pairs or a mapping.

    Arrays are floats [...] or `QuantTensor`s, which bf16 weights need. Raises UsageError.
    """
    if isinstance(arrays, Mapping):
        arrays = arrays.items()
    if not isinstance(arrays, Iterable):
        raise UsageError(
            f"{where} gave {type(arrays).__name__}; expected a dict of arrays, or (name, array) "
            "pairs"
        )
    tensors: dict[str, Stored] = {}
    for pair in arrays:
        if not (isinstance(pair, tuple) and len(pair) == 2):
            raise UsageError(f"{where} gave {type(pair).__name__}; expected (name, array) pairs")
        try:
            name = checked_name(pair[0], where)
            if name in tensors:
                raise FormatError(f"{where}: array {name!r} is there twice")
            tensors[name] = _from_value(pair[1], f"{where}: array {name!r}")
        except ModelError as error:
            raise UsageError(str(error)) from None
    if not tensors:
        raise UsageError(f"{where} gave no arrays")
    return Checkpoint(Path(), "callable", {}, tensors, ())


def _from_value(value: object, where: str) -> Stored:
    if isinstance(value, QuantTensor):
        return value
    if not isinstance(value, np.ndarray) or value.dtype.kind != "f" or value.dtype.itemsize > 8:
        got = f"{value.dtype} array" if isinstance(value, np.ndarray) else type(value).__name__
        raise FormatError(f"{where}: {got}; expected an array of floats, or a QuantTensor")
    if value.dtype.newbyteorder("<").str in _FLOATS:
        value = value.astype(value.dtype.newbyteorder("<"), copy=False)
        fmt = Float(_FLOATS[value.dtype.str])
        return stored_tensor(value.shape, fmt, {"data": value}, where)
    return stored_tensor(value.shape, Float("f32"), {"data": value.astype(np.float32)}, where)


def _npy(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, path: Path, where: str) -> Stored:
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise FormatError(f"{where}: compressed in a way that NumPy does not write")
    with archive.open(entry) as stream:
        version = np.lib.format.read_magic(stream)
        if version not in ((1, 0), (2, 0)):
            raise FormatError(f"{where}: .npy version {version}; known: 1.0, 2.0")
        read = getattr(np.lib.format, f"read_array_header_{version[0]}_0")
        shape, _, dtype = read(stream)
        begin = stream.tell()
    if dtype.str not in (*_FLOATS, "<f8"):
        raise FormatError(f"{where}: dtype {dtype}; expected float16, float32 or float64")
    shape = checked_shape(list(shape), where)
    if begin + int(np.prod(shape, dtype=object)) * dtype.itemsize != entry.file_size:
        raise FormatError(f"{where}: {entry.file_size} bytes, its header describes another size")
    if entry.file_size > _MAX_RATIO * max(entry.compress_size, 1):
        raise FormatError(f"{where}: {entry.file_size} bytes cannot come of its compressed ones")

    def make() -> dict[str, np.ndarray]:
        try:
            with zipfile.ZipFile(path) as archive, archive.open(entry.filename) as stream:
                values = np.lib.format.read_array(stream)
        except (zipfile.BadZipFile, zlib.error, OSError, KeyError, ValueError) as error:
            raise FormatError(f"{where}: {error}") from None
        return {"data": values if values.dtype.str in _FLOATS else values.astype(np.float32)}

    return lazy_tensor(shape, Float(_FLOATS.get(dtype.str, "f32")), make, where)
