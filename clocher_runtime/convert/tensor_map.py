"""tensor_map.json: where each tensor of an IEBIN pair lies, for programs that do not read IEBIN.

It says nothing that model.ie.json does not say, and Clocher never reads it. It carries the checksum
of the model.ie.json that it was made from, so that a stale map can be told.
"""

import json
from pathlib import Path
from typing import Any

from clocher_runtime.checkpoints.iebin.checkpoint import BIN_NAME, JSON_NAME, read_index
from clocher_runtime.disk.output_file import write_file

MAP_NAME = "tensor_map.json"
FORMAT = "clocher.tensor_map"
VERSION = 1

_KEYS = ("offset", "nbytes", "dtype", "shape")


def write_tensor_map(model_dir: Path) -> int:
    """Write tensor_map.json beside model.ie.json.

    Returns:
        The number of tensors in it.

    Raises:
        ModelError: model.ie.json is missing or damaged.
        OSError: the map cannot be written.
    """
    document = read_index(model_dir / JSON_NAME).document
    tensors: dict[str, Any] = {}
    for tensor in document["tensors"]:
        planes = {
            key: {"file": BIN_NAME, **{field: plane[field] for field in _KEYS}}
            for key, plane in tensor["planes"].items()
        }
        tensors[tensor["name"]] = {
            "shape": tensor["shape"],
            "format": tensor["format"],
            "planes": planes,
        }
    head = {
        "format": FORMAT,
        "version": VERSION,
        "index": {"file": JSON_NAME, "sha256": document["sha256"]},
    }
    lines = "".join(f'"{key}": {json.dumps(value)},\n' for key, value in head.items())
    body = ",\n".join(
        f"{json.dumps(name, ensure_ascii=False)}: {json.dumps(value)}"
        for name, value in tensors.items()
    )
    write_file(model_dir / MAP_NAME, f'{{\n{lines}"tensors": {{\n{body}\n}}\n}}\n'.encode())
    return len(tensors)
