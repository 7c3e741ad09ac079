"""Small sound files of every kind, a few kilobytes each, made by Clocher's own writers."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from gguf import GGUFWriter
from gguf_files import Kind, gguf_tensors, raw_blocks, write_gguf
from weight_files import convert, small_tensors, write_iebin

from clocher_kernels.formats import Float, parse_format
from clocher_kernels.formats.bsr import INNERS, Bsr
from clocher_kernels.quant_tensor import QuantTensor, encode
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.checkpoints.iebin import PlaneWriter
from clocher_runtime.checkpoints.q4 import (
    COMPAT_NAME,
    Q4_0,
    Q4_NAMES,
    write_overlay,
)
from clocher_runtime.convert.dedup_writer import Deduplication
from clocher_runtime.quality.verify import TopLogits, Trace, document
from fuzz import hf_seeds
from fuzz.text_seeds import Seed, json_bytes


def iebin() -> list[Seed]:
    """Return IEBIN models: formats of every family, and a whole Llama."""
    fp8 = encode(_values((3, 5)), parse_format("fp8_e4m3_b128_f32"))
    return [_iebin({**small_tensors(), "fp8": fp8}), _made(_convert_llama)]


def _convert_llama(folder: Path) -> None:
    with TemporaryDirectory() as source:
        convert(_put(Path(source), hf_seeds.llama()), folder)


def block_sparse() -> list[Seed]:
    """Return an IEBIN model of block-sparse matrices."""
    values = _values((9, 10)) * (np.arange(90).reshape(9, 10) % 4 > 1)
    return [
        _iebin({inner: encode(values, Bsr.for_values(values, (4, 3), inner)) for inner in INNERS})
    ]


def dedup() -> list[Seed]:
    """Return a deduplicated model: planes of few symbols, equal ones, others."""
    few = np.where(_values((64, 96)) > 0, np.float32(0.5), np.float32(-0.25))
    tensors = {
        "few": encode(few, Float("bf16")),
        "same": encode(few, Float("bf16")),
        "ternary": encode(_values((64, 96)), parse_format("ternary")),
        "int4": encode(_values((32, 64)), parse_format("int4_sym_g32_f16")),
        "plain": encode(_values((8, 16)), Float("f32")),
    }

    def make(folder: Path) -> None:
        Deduplication(write_iebin(folder, tensors)).run()
        (folder / "model.ie.bin").unlink()

    return [_made(make)]


def gguf() -> list[Seed]:
    """Return GGUF files: a whole Llama with a tokenizer, in bf16, with 8-bit and 5-bit matrices."""
    config = hf_seeds.CONFIG | {"rope_parameters": {"rope_theta": 1e4}}
    with TemporaryDirectory() as source:
        values = gguf_tensors(open_checkpoint(_put(Path(source), hf_seeds.llama())))
    seeds = []
    for matrix in (Kind.BF16, Kind.Q8_0, Kind.Q5_1):
        tensors = {
            name: raw_blocks(matrix if value.ndim == 2 else Kind.BF16, value)
            for name, value in values.items()
        }

        def make(folder: Path, tensors: Any = tensors) -> None:
            write_gguf(folder / "m.gguf", config, tensors, _add_tokenizer)

        seeds.append(_made(make))
    return seeds


def _add_tokenizer(writer: GGUFWriter) -> None:
    """Add a tokenizer and metadata of other types."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["a", "b", "ab", "Ġ", "Ã", "©", "Ċ", *(f"<{n}>" for n in range(9))])
    writer.add_token_types([1] * 7 + [3] * 9)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(7)
    writer.add_float64("seed.f64", 0.5)
    writer.add_bool("seed.flag", True)


def q4_maps() -> list[Seed]:
    """Return manifests with rules."""
    rules = [
        {"pattern": ".*attn.*(q_proj|k_proj).*", "dtype": "int4w", "group": 64},
        {"pattern": r".*mlp\..*", "dtype": "int8w", "scale": "per-tensor", "zero": "per-tensor"},
        {"pattern": ".*", "dtype": "int4", "group": 32, "zero": "per-group"},
    ]
    return [{"q4.json": json_bytes({"version": 1, "rules": rules})}]


def q4_manifests() -> list[Seed]:
    """Return an expanded manifest with the planes of one tensor in a file, and one without."""
    tensor = encode(_values((4, 64)), Q4_0)
    codes, scales = (tensor.planes[key].tobytes() for key in ("codes", "scales"))
    planes = codes + bytes(-len(codes) % 64) + scales
    entry = {
        "name": "w",
        "shape": [4, 64],
        "format": tensor.format.name,
        "rule": 0,
        "nbytes": tensor.nbytes,
        "bpw": 4.5,
        "sha256": {key: _sha256(plane.tobytes()) for key, plane in tensor.planes.items()},
        "err": {"rmse": 0.1},
    }
    document = {
        "version": 1,
        "rules": [{"pattern": ".*", "dtype": "int4w", "group": 32, "method": "gptq"}],
        "tool": {"name": "seed", "version": "0"},
        "source": {
            "kind": "hf",
            "files": [{"name": "model.safetensors", "nbytes": 9, "sha256": "0" * 64}],
        },
        "requantize": False,
        "options": {"bits": 4},
        "calibration": {"tokens": 5},
        "kept": [{"name": "norm", "reason": "a vector"}],
        "size": {"params": 256, "nbytes": tensor.nbytes, "bpw": 4.5, "by_format": {}},
        "gates": [],
    }
    file = {"file": "q4.planes.bin", "nbytes": len(planes), "sha256": _sha256(planes)}
    offsets = {"codes": 0, "scales": len(planes) - len(scales)}
    in_file = entry | {"method": "gptq", "offsets": offsets, "tokens_seen": [5, 5]}
    return [
        {
            "q4.json": json_bytes(document | {"tensors": [in_file], "planes": file}),
            "q4.planes.bin": planes,
        },
        {"q4.json": json_bytes(document | {"tensors": [entry | {"method": "rtn"}]})},
    ]


def q4_planes() -> list[Seed]:
    """Return Q4_0 plane files over an IEBIN pair."""

    def make(folder: Path) -> None:
        tensors = {name: encode(_values((4, 64)), Float("f32")) for name in ("a", "b", "c")}
        write_iebin(folder, tensors)
        paths = {key: folder / name for key, name in Q4_NAMES.items()}
        with PlaneWriter(paths) as pair:
            for name in ("a", "b"):
                pair.add(name, encode(_values((4, 64)), Q4_0))
            pair.sync()
            pair.publish()
        write_overlay(folder / COMPAT_NAME, pair.entries)

    return [_made(make)]


def traces() -> list[Seed]:
    """Return a trace with and without logits."""

    def make(folder: Path) -> None:
        step = TopLogits((3, 1), (2.5, -0.25))
        one = Trace(
            version="0",
            model="m",
            fingerprint="00" * 32,
            precision="f32",
            act_prec="fp32",
            kv_dtype="f32",
            device="cpu",
            sampling={"temperature": 0.0, "top_k": 0, "top_p": 1.0, "seed": 0},
            prompt="héllo\n",
            prompt_ids=(1, 2),
            generated_ids=(3, 4, 5),
            topk=(step, step, step),
        )
        line = json.dumps(document(one))
        (folder / "t.jsonl").write_text(f"{line}\n{line}\n")

    return [_made(make)]


def _iebin(tensors: dict[str, QuantTensor]) -> Seed:
    return _made(lambda folder: write_iebin(folder, tensors))


def _made(make: Callable[[Path], object]) -> Seed:
    """Return the files that something writes into an empty directory."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        make(folder)
        return {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }


def _put(folder: Path, files: Seed) -> Path:
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def _values(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape, np.float32)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
