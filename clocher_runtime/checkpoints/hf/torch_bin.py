"""Pickled PyTorch weights (`pytorch_model*.bin`), by torch's restricted unpickler and mapped.

Compressed archives, and anything but a dictionary of plain tensors, are refused; a ZIP directory is
bounded before a library reads it. Source: APPNOTE.TXT 6.3.10,
https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT
"""

import struct
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

from clocher_kernels.dtypes import STORAGE
from clocher_kernels.errors import FormatError, UnsupportedModel
from clocher_runtime.checkpoints.checkpoint import Checkpoint
from clocher_runtime.checkpoints.hf.checkpoint import read_folder
from clocher_runtime.checkpoints.hf.shards import DTYPES, Arrays, StoredArray
from clocher_runtime.checkpoints.locate import find_hf, no_model
from clocher_runtime.disk.files import MappedFile
from clocher_runtime.disk.strict_json import checked_name, checked_shape

MAX_RECORDS = 100_000
MAX_DIRECTORY_BYTES = 1 << 24

_END = struct.Struct("<4s4HIIH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_PICKLE_BYTES, _PICKLE_BYTES_PER_RECORD = 1 << 17, 1 << 10
_TORCH_DTYPES = (
    *("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
    *("int64", "int32", "int8", "uint8", "bool"),
)
_READ_DTYPES = dict(zip(_TORCH_DTYPES, DTYPES, strict=True))
_WAY_OUT = (
    "; convert the model to safetensors (transformers: model.save_pretrained), or get a "
    "safetensors revision of it"
)


def open_torch_bin(path: Path) -> Checkpoint:
    """Open a directory (or its `hf`, `hf/original`) with pickled weights. Raises ModelError."""
    directory = find_hf(path)
    if directory is None:
        raise no_model(path)
    return read_folder(directory, "bin", "pytorch_model", ".bin", _read_file)


def _read_file(path: Path) -> tuple[Arrays, MappedFile]:
    file = MappedFile(path)
    try:
        import torch  # slow, and only pickled weights need it
    except ImportError:
        raise UnsupportedModel(
            f"{path}: reading pickled weights needs torch, which is not installed; "
            f"pip install '.[torch]' in a clone of Clocher{_WAY_OUT}"
        ) from None
    try:
        _check_records(file)
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if not isinstance(state, dict) or not state:
            raise FormatError(
                f"{path}: holds {type(state).__name__}, expected a dictionary of tensors"
            )
        return {name: _view(torch, name, value, path) for name, value in state.items()}, file
    except UnsupportedModel:
        raise
    except FormatError as error:
        raise FormatError(f"{error}{_WAY_OUT}") from None
    except Exception as error:  # torch has no type for a damaged or refused file
        reason = str(error).strip().partition("\n")[0].partition("weights_only")[0]
        raise FormatError(
            f"{path}: torch refuses the pickle ({type(error).__name__}: "
            f"{reason or 'its content':.200}){_WAY_OUT}"
        ) from None


def _check_directory(file: MappedFile) -> None:
    at = file.nbytes - _END.size
    if at < 0 or file.bytes(0, 4).tobytes() != b"PK\3\4":
        raise _refused(file, "it does not begin with a record")
    end_record = file.bytes(at, file.nbytes).tobytes()
    magic, disk, first, here, count, nbytes, begin, comment = _END.unpack(end_record)
    if magic != b"PK\5\6" or comment or (disk, here) != (first, count):
        raise _refused(file, "it does not end with a directory; it is truncated, or has a comment")
    end = at
    if at >= _LOCATOR.size + _END64.size:
        locator = _LOCATOR.unpack(file.bytes(at - _LOCATOR.size, at).tobytes())
        if locator[0] == b"PK\6\7":
            end = at - _LOCATOR.size - _END64.size
            end64 = _END64.unpack(file.bytes(end, end + _END64.size).tobytes())
            count, nbytes, begin = end64[7:]
            if end64[0] != b"PK\6\6" or end64[6] != count or locator[2] != end:
                raise _refused(file, "its directory contradicts itself")
    if count > MAX_RECORDS or nbytes > MAX_DIRECTORY_BYTES or begin + nbytes != end:
        raise _refused(
            file, f"{count} records in {nbytes} bytes of directory (limit {MAX_RECORDS})"
        )


def _refused(file: MappedFile, reason: str) -> FormatError:
    """Return the error for an archive that is not read."""
    return FormatError(f"{file.path}: not a ZIP archive that is read: {reason}")


def _check_records(file: MappedFile) -> None:
    """Refuse damage, what torch would inflate, or a pickle far larger than its tensors need."""
    _check_directory(file)
    try:
        archive = zipfile.ZipFile(file.path)
    except (zipfile.BadZipFile, ValueError, OSError, RuntimeError) as error:
        raise _refused(file, str(error)) from None
    with archive:
        records, end = archive.infolist(), 0
        for record in sorted(records, key=lambda record: record.header_offset):
            if record.header_offset < end:
                raise _refused(file, "records overlap")
            end = record.header_offset + record.compress_size
            whole = record.file_size == record.compress_size
            if record.compress_type != zipfile.ZIP_STORED or not whole:
                raise _refused(file, f"{record.filename!r:.80} is compressed")
        if len({record.filename.casefold() for record in records}) < len(records):
            raise _refused(file, "two records have one name")
        if end > file.nbytes:
            raise _refused(file, "a record reaches beyond the file")
        limit = _PICKLE_BYTES + _PICKLE_BYTES_PER_RECORD * len(records)
        for record in records:
            if not record.filename.endswith("data.pkl"):
                continue
            if record.file_size > limit:
                raise FormatError(
                    f"{file.path}: a pickle of {record.file_size} bytes; the limit is {limit}"
                )
            if b"bytearray" in archive.read(record):  # torch would make one of any size
                raise FormatError(f"{file.path}: the pickle asks for a bytearray")


def _view(torch: ModuleType, name: object, tensor: Any, path: Path) -> StoredArray:
    if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
        raise FormatError(
            f"{path}: {name!r:.80} is {type(tensor).__name__}, expected a dictionary of tensors "
            "alone (is it a training checkpoint?)"
        )
    where = f"{path}: tensor {checked_name(name, str(path))!r}"
    dtype = _READ_DTYPES.get(str(tensor.dtype).removeprefix("torch."))
    if dtype is None or tensor.layout != torch.strided or tensor.device.type != "cpu":
        raise UnsupportedModel(
            f"{where} is {tensor.dtype} ({tensor.layout}); known: {', '.join(_READ_DTYPES)}"
        )
    shape = checked_shape(list(tensor.shape), where)
    span = 1 + sum((dim - 1) * step for dim, step in zip(shape, tensor.stride(), strict=True))
    if tensor.numel() > span:
        raise FormatError(
            f"{where}: its elements share memory: {list(shape)} in {span * tensor.itemsize} bytes"
        )
    same_width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    array = tensor.detach().view(same_width[tensor.itemsize]).numpy().view(STORAGE[DTYPES[dtype]])
    array.flags.writeable = False
    return StoredArray(dtype, array, where)
