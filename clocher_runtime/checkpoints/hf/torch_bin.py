"""Pickled PyTorch weights (`pytorch_model*.bin`), read without running what is in them.

A pickle is a program. torch's `weights_only` unpickler runs only the few calls that rebuild
tensors; before torch 2.6 it could be tricked into running others (CVE-2025-32434), so older ones
are refused. Even so it can be made to compute for ever or to ask for any memory, so `pickle_scan`
looks through the pickle first. torch only says where each tensor lies: the file, a ZIP archive of
uncompressed arrays, is mapped a second time by us, and no weight is read before it is asked for.
This is the one module that calls torch.load, and torch is imported only when it is needed.
"""

import math
import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from clocher_kernels.dtypes import STORAGE
from clocher_kernels.errors import FormatError, ModelNotFound, UnsupportedModel, UsageError
from clocher_runtime.checkpoints.checkpoint import Checkpoint
from clocher_runtime.checkpoints.hf.arrays import StoredArray
from clocher_runtime.checkpoints.hf.checkpoint import (
    CONFIG,
    HfFolder,
    Weights,
    find_hf,
    read_folder,
)
from clocher_runtime.checkpoints.hf.pickle_scan import scan_pickle
from clocher_runtime.disk.files import MappedFile
from clocher_runtime.disk.safetensors_file import DTYPES
from clocher_runtime.disk.strict_json import checked_name, checked_shape
from clocher_runtime.disk.zip_directory import stored_records

SINGLE = "pytorch_model.bin"
INDEX = "pytorch_model.bin.index.json"
SAFE_TORCH = (2, 6)

_SHARD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,240}\.bin")
_PICKLE = "data.pkl"
_PICKLE_BYTES = 1 << 20
_PICKLE_BYTES_PER_RECORD = 1 << 10
_TORCH_DTYPES = {
    "torch.float32": "F32",
    "torch.float16": "F16",
    "torch.bfloat16": "BF16",
    "torch.float8_e4m3fn": "F8_E4M3",
    "torch.float8_e5m2": "F8_E5M2",
    "torch.int64": "I64",
    "torch.int32": "I32",
    "torch.int8": "I8",
    "torch.uint8": "U8",
    "torch.bool": "BOOL",
}
_WAY_OUT = (
    "; convert the model to safetensors (transformers: model.save_pretrained), or get a "
    "safetensors revision of it"
)


def open_torch_bin(path: Path) -> Checkpoint:
    """Open a Hugging Face directory with pickled weights; its kind is "bin".

    Args:
        path: directory with config.json and pytorch_model.bin, or pytorch_model.bin.index.json and
            its shards; or one with these in `hf` or `hf/original`.

    Raises:
        UsageError: torch is missing, or too old to be safe.
        ModelNotFound: a file is missing.
        FormatError: a file is damaged, holds something other than tensors, or asks for code.
        UnsupportedModel: the files are sound but of a kind that is not read.
        WindowError: a timed window is open.
    """
    directory = find_hf(path)
    if directory is None:
        raise ModelNotFound(f"{path}: no {CONFIG} there, nor in hf or hf/original below it")
    require_safe_torch()
    return read_torch_bin(directory)


def read_torch_bin(directory: Path) -> Checkpoint:
    """Open a directory as `open_torch_bin`, with a torch that is known to be safe."""
    return read_folder(directory, "bin", _read_weights)


def has_safe_torch() -> bool:
    """Return whether `require_safe_torch` raises nothing."""
    try:
        require_safe_torch()
    except UsageError:
        return False
    return True


def require_safe_torch() -> None:
    """Raise UsageError unless the torch that is installed has a restricted unpickler that holds."""
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        raise UsageError(
            f"reading pytorch_model*.bin needs torch 2.6 or newer, which is not installed{_WAY_OUT}"
        ) from None
    numbers = tuple(int(part) for part in re.findall("[0-9]+", version)[:2])
    if numbers < SAFE_TORCH:
        raise UsageError(
            f"torch {version}: its weights_only unpickler can be made to run code "
            f"(CVE-2025-32434); install torch 2.6 or newer{_WAY_OUT}"
        )


def _read_weights(folder: HfFolder) -> Weights:
    if folder.has(SINGLE):
        arrays, file = _read_file(folder.member(SINGLE))
        return arrays, (file,)
    if not folder.has(INDEX):
        raise ModelNotFound(f"{folder.directory}: neither {SINGLE} nor {INDEX} is there")
    weight_map = folder.weight_map(INDEX, _SHARD, ".bin")
    everything: dict[str, StoredArray] = {}
    files = []
    for name in sorted(set(weight_map.values())):
        arrays, file = _read_file(folder.member(name))
        listed = {tensor for tensor, shard in weight_map.items() if shard == name}
        if differing := sorted(listed ^ set(arrays)):
            state = "is not in it" if differing[0] in listed else "is not listed for it"
            raise FormatError(
                f"{folder.directory / name}: {INDEX} and the shard disagree: tensor "
                f"{differing[0]!r} {state} ({len(differing)} in all); download the model again"
            )
        everything |= arrays
        files.append(file)
    return everything, tuple(files)


def _read_file(path: Path) -> tuple[dict[str, StoredArray], MappedFile]:
    """Return views of the tensors of one file."""
    file = MappedFile(path)
    try:
        used = _checked_storages(file)
    except FormatError as error:
        raise FormatError(f"{error}{_WAY_OUT}") from None
    tensors = _unpickled(path)
    base = _base(tensors, used, path)
    arrays = {}
    for name, tensor in tensors.items():
        where = f"{path}: tensor {checked_name(name, str(path))!r}"
        arrays[name] = _view(tensor, file, base, where)
    return arrays, file


def _checked_storages(file: MappedFile) -> dict[int, int]:
    """Return offset -> size of the arrays that the pickle uses, which has been looked through."""
    records = stored_records(file)
    folder, _, _ = next(iter(records), "").partition("/")
    if f"{folder}/{_PICKLE}" not in records:
        raise FormatError(f"{file.path}: holds no {_PICKLE}, as torch 1.6 and later write it")
    order = records.get(f"{folder}/byteorder")
    if order and file.bytes(order.start, order.end).tobytes() != b"little":
        raise UnsupportedModel(f"{file.path}: written on a big-endian machine{_WAY_OUT}")
    place = records[f"{folder}/{_PICKLE}"]
    limit = _PICKLE_BYTES + _PICKLE_BYTES_PER_RECORD * len(records)
    if place.nbytes > limit:
        raise FormatError(f"{file.path}: a pickle of {place.nbytes} bytes; the limit is {limit}")
    keys = scan_pickle(file.bytes(place.start, place.end).tobytes(), str(file.path))
    names = [f"{folder}/data/{key}" for key in keys]
    if missing := [name for name in names if name not in records]:
        raise FormatError(f"{file.path}: has no {missing[0]}, which its pickle names")
    return {records[name].start: records[name].nbytes for name in names if records[name].nbytes}


def _unpickled(path: Path) -> dict[str, Any]:
    """Return the dictionary of tensors that the restricted unpickler builds."""
    import torch

    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises what its archive reader and unpickler happen to raise
        # Not torch's own text: it advises to switch the protection off.
        raise FormatError(
            f"{path}: torch's restricted unpickler refuses it ({type(error).__name__}){_WAY_OUT}"
        ) from None
    if not isinstance(loaded, dict) or not loaded:
        raise FormatError(
            f"{path}: holds {type(loaded).__name__}, expected a dictionary of tensors"
        )
    tensors = dict(dict.items(loaded))  # attributes, which a file may set, could hide its own items
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise FormatError(
                f"{path}: {name!r:.80} is {type(tensor).__name__}, expected a dictionary of "
                f"tensors alone (is it a training checkpoint?){_WAY_OUT}"
            )
        plain = tensor.layout == torch.strided and tensor.device.type == "cpu"
        if not plain or str(tensor.dtype) not in _TORCH_DTYPES:
            raise UnsupportedModel(
                f"{path}: tensor {name!r:.80} is {tensor.layout} {tensor.dtype} on "
                f"{tensor.device}; known: plain {', '.join(_TORCH_DTYPES)}"
            )
    return {name: tensor.detach() for name, tensor in tensors.items()}


def _base(tensors: Mapping[str, Any], used: Mapping[int, int], path: Path) -> int:
    """Return the address at which torch has mapped the file."""
    storages = {}
    for tensor in tensors.values():
        storage = tensor.untyped_storage()
        if storage.nbytes():
            storages[storage.data_ptr()] = storage.nbytes()
    base = min(storages, default=0) - min(used, default=0)
    if {address - base: nbytes for address, nbytes in storages.items()} != used:
        raise UnsupportedModel(f"{path}: its arrays are not those that torch reads in it{_WAY_OUT}")
    return base


def _view(tensor: Any, file: MappedFile, base: int, where: str) -> StoredArray:
    dtype = _TORCH_DTYPES[str(tensor.dtype)]
    shape = checked_shape(list(tensor.shape), where)
    kind = STORAGE[DTYPES[dtype]]
    if 0 in shape:
        return StoredArray(dtype, np.zeros(shape, kind), where)
    storage = tensor.untyped_storage()
    strides = tuple(int(stride) * kind.itemsize for stride in tensor.stride())
    begin = int(tensor.storage_offset()) * kind.itemsize
    end = begin + kind.itemsize
    end += sum((dim - 1) * stride for dim, stride in zip(shape, strides, strict=True))
    if math.prod(shape) * kind.itemsize > end - begin:
        raise FormatError(
            f"{where}: its elements share memory: {list(shape)} in {end - begin} bytes{_WAY_OUT}"
        )
    if min(strides, default=0) < 0 or begin < 0 or end > storage.nbytes():
        raise FormatError(f"{where}: reaches beyond its array")
    start = storage.data_ptr() - base + begin
    data = file.bytes(start, start + end - begin)
    seen = tensor[(0,) * len(shape)].reshape(1).view(_bytes_dtype()).numpy()
    if not np.array_equal(seen, data[: kind.itemsize]):
        raise FormatError(f"{where}: does not lie where torch reads it; this is a bug of Clocher")
    view = np.lib.stride_tricks.as_strided(data.view(kind), shape, strides, writeable=False)
    return StoredArray(dtype, view, where)


def _bytes_dtype() -> Any:
    import torch

    return torch.uint8
