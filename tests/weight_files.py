"""Small model files for the tests of weights: sound ones, and what is needed to break them."""

import copy
import json
import re
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from clocher_kernels.dtypes import STORAGE
from clocher_kernels.formats import parse_format
from clocher_kernels.quant_tensor import QuantTensor, encode
from clocher_runtime.checkpoints.hf.shards import DTYPES
from clocher_runtime.checkpoints.iebin import IebinWriter, Progress, quiet
from clocher_runtime.convert.to_iebin import Conversion
from clocher_runtime.disk.plane_index import seal

ROOT = Path(__file__).parents[1]
DATA = ROOT / "tests" / "data"
GPTOSS = ROOT / "clocher_runtime" / "assets" / "clocher-tiny-gptoss"
BITNET = DATA / "clocher-tiny-bitnet"
LLAMA = DATA / "clocher-tiny-llama"
TINY = (GPTOSS, BITNET, LLAMA)

Array = tuple[str, tuple[int, ...], bytes]
"""What a safetensors file says about a tensor: dtype, shape, data."""


def convert(
    source: Path, out: Path, q4_map: Path | None = None, progress: Progress = quiet
) -> Conversion:
    """Convert a checkpoint to IEBIN."""
    conversion = Conversion(source, out, q4_map)
    conversion.run(progress)
    return conversion


def rng(name: str) -> np.random.Generator:
    """Return a generator seeded by a name."""
    return np.random.default_rng(zlib.crc32(name.encode()))


def array(dtype: str, *shape: int, fill: int | None = None) -> Array:
    """Return a stored tensor of random (or constant) bytes."""
    nbytes = int(np.prod(shape, dtype=int)) * STORAGE[DTYPES[dtype]].itemsize
    if fill is not None:
        return dtype, shape, bytes([fill]) * nbytes
    # Below 0x40 every byte keeps every float small and finite.
    return dtype, shape, rng(f"{dtype}{shape}").integers(0, 0x40, nbytes, np.uint8).tobytes()


def header_of(arrays: dict[str, Array]) -> dict[str, Any]:
    """Return the header of a safetensors file with these tensors in this order."""
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape, data) in arrays.items():
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [end, end + len(data)],
        }
        end += len(data)
    return header


def safetensors_bytes(header: bytes, data: bytes) -> bytes:
    """Return a safetensors file with this header text."""
    return len(header).to_bytes(8, "little") + header + data


def safetensors_of(arrays: dict[str, Array], **metadata: str) -> bytes:
    """Return a sound safetensors file."""
    header = {"__metadata__": metadata} if metadata else {}
    data = b"".join(stored for _, _, stored in arrays.values())
    return safetensors_bytes(json.dumps(header | header_of(arrays)).encode(), data)


def read_with_the_library(path: Path) -> dict[str, Any]:
    """Return what the safetensors library finds: name -> {"dtype", "shape", "data"}."""
    found = safetensors.deserialize(path.read_bytes())  # type: ignore[no-untyped-call]
    return dict(found)


def write_safetensors(path: Path, arrays: dict[str, Array]) -> None:
    """Write a sound safetensors file."""
    path.write_bytes(safetensors_of(arrays))


def write_hf(
    directory: Path, arrays: dict[str, Array], config: dict[str, Any] | None = None
) -> Path:
    """Write a Hugging Face directory with one weight file."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config or {"model_type": "llama"}))
    write_safetensors(directory / "model.safetensors", arrays)
    return directory


def write_sharded(directory: Path, shards: dict[str, dict[str, Array]]) -> Path:
    """Write a Hugging Face directory with an index."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text('{"model_type": "llama"}')
    weight_map = {name: shard for shard, arrays in shards.items() for name in arrays}
    write_index(directory, weight_map)
    for shard, arrays in shards.items():
        write_safetensors(directory / shard, arrays)
    return directory


def write_index(directory: Path, weight_map: object) -> None:
    """Write model.safetensors.index.json."""
    text = json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map})
    (directory / "model.safetensors.index.json").write_text(text)


def small_tensors() -> dict[str, QuantTensor]:
    """Return tensors of many formats and odd sizes, a few hundred bytes in all."""
    shapes = {
        "norm": ("f32", (3,)),
        "head": ("bf16", (5, 3)),
        "proj": ("int4_asym_g32_f16", (3, 33)),
        "down": ("int8_row_f32", (2, 7)),
        "ternary": ("ternary", (4, 5)),
        "experts": ("mxfp4", (2, 2, 32)),
    }
    return {
        name: encode(rng(name).standard_normal(shape, np.float32), parse_format(fmt))
        for name, (fmt, shape) in shapes.items()
    }


def write_iebin(directory: Path, tensors: dict[str, QuantTensor] | None = None) -> Path:
    """Write a small IEBIN model: these tensors, or `small_tensors`."""
    directory.mkdir(parents=True, exist_ok=True)
    with IebinWriter(directory) as writer:
        for name, tensor in (tensors or small_tensors()).items():
            writer.add(name, tensor)
        writer.commit({"model_type": "llama", "eps": 1e-05}, {}, {"bos": "<s>"}, b"{}\n", {})
    return directory


def copy_model(source: Path, target: Path) -> Path:
    """Copy the files of a model."""
    shutil.copytree(source, target)
    return target


def write_first_layers(source: Path, target: Path, count: int) -> Path:
    """Write a Hugging Face model that is the first layers of another: trained, and small."""
    copy_model(source, target)
    config = json.loads((source / "config.json").read_text())
    kept = {"num_hidden_layers": count, "layer_types": config.get("layer_types", [])[:count]}
    (target / "config.json").write_text(json.dumps(config | {k: v for k, v in kept.items() if v}))
    layer = re.compile(r"model\.layers\.(\d+)\.")
    arrays = {
        name: (found["dtype"], tuple(found["shape"]), bytes(found["data"]))
        for name, found in read_with_the_library(source / "model.safetensors").items()
        if not (match := layer.match(name)) or int(match[1]) < count
    }
    write_safetensors(target / "model.safetensors", arrays)
    return target


def resealed(document: dict[str, Any]) -> bytes:
    """Return the text of model.ie.json with a correct checksum."""
    body = {key: value for key, value in document.items() if key != "sha256"}
    return seal(json.dumps(body)[:-1].encode("utf-8", "surrogatepass") + b",\n")


HOSTILE: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    63,
    2**31,
    2**32 + 1,
    2**63,
    2**64 - 1,
    10**30,
    1.0,
    -0.0,
    1e300,
    "",
    "\x00",
    "../../etc/passwd",
    "/etc/passwd",
    "f32",
    "mxfp4",
    "int4_sym_g999998_f32",
    "bsr_1x1_f32",
    "a" * 5000,
    [],
    [0],
    [-1],
    [2**62, 2**62],
    [1] * 100,
    [[[[]]]],
    {},
    {"": ""},
    {"a": {"b": {}}},
)
"""Values that a hostile file may have in place of any other."""


def mutants(document: Any) -> Iterator[Any]:
    """Yield copies of a JSON document with one node replaced, removed, added or doubled."""
    for path in list(_paths(document)):
        for value in HOSTILE:
            yield _edited(document, path, lambda parent, key, value=value: _put(parent, key, value))
        yield _edited(document, path, lambda parent, key: parent.pop(key))
        yield _edited(document, path, _double)
        yield _edited(document, path, _nudge)


def _paths(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    keys = node.keys() if isinstance(node, dict) else range(len(node))
    for key in keys:
        yield (*path, key)
        if isinstance(node[key], dict | list):
            yield from _paths(node[key], (*path, key))


def _edited(document: Any, path: tuple[Any, ...], edit: Any) -> Any:
    result = copy.deepcopy(document)
    parent = result
    for key in path[:-1]:
        parent = parent[key]
    edit(parent, path[-1])
    return result


def _put(parent: Any, key: Any, value: Any) -> None:
    parent[key] = value


def _double(parent: Any, key: Any) -> None:
    if isinstance(parent, list):
        parent.insert(key, copy.deepcopy(parent[key]))
    else:
        parent[f"{key}2"] = copy.deepcopy(parent[key])


def _nudge(parent: Any, key: Any) -> None:
    if isinstance(parent[key], int):
        parent[key] += 1
    elif isinstance(parent[key], str):
        parent[key] += "x"
    elif isinstance(parent[key], list):
        parent[key].reverse()
