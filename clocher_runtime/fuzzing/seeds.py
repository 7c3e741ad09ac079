"""Small sound files of every kind, a few kilobytes each, made by Clocher's own writers."""

import hashlib
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from clocher_kernels.formats import Bsr, Float, Int8, parse_format
from clocher_kernels.quant_tensor import QuantTensor, encode
from clocher_runtime.checkpoints.iebin.checkpoint import JSON_NAME, open_iebin
from clocher_runtime.checkpoints.iebin.writer import IebinWriter
from clocher_runtime.checkpoints.q4.overlay import COMPAT_NAME, Q4_NAMES, write_overlay
from clocher_runtime.checkpoints.q4.planes import PLANES, Q4_0, Q4Entry, next_offsets, q4_document
from clocher_runtime.convert.dedup.writer import plan_dedup
from clocher_runtime.convert.gguf.export import plan_gguf
from clocher_runtime.convert.to_iebin import convert
from clocher_runtime.fuzzing.hf_seeds import (
    CONFIG,
    Seed,
    json_bytes,
    llama,
    llama_arrays,
    safetensors_bytes,
)
from clocher_runtime.quality.trace import TopLogits, Trace, write_trace

PART = "layer-00000.safetensors"


def iebin() -> list[Seed]:
    """Return IEBIN models: formats of every family, and a whole Llama."""
    shapes = {
        "norm": ("f32", (3,)),
        "head": ("bf16", (5, 3)),
        "proj": ("int4_asym_g32_f16", (3, 33)),
        "down": ("int8_row_f32", (2, 7)),
        "fp8": ("fp8_e4m3_b128_f32", (3, 5)),
        "ternary": ("ternary", (4, 5)),
        "experts": ("mxfp4", (2, 2, 32)),
    }
    tensors = {
        name: encode(_values(shape), parse_format(fmt)) for name, (fmt, shape) in shapes.items()
    }
    return [_iebin(tensors), _converted()]


def block_sparse() -> list[Seed]:
    """Return an IEBIN model of block-sparse matrices."""
    values = _values((9, 10)) * (np.arange(90).reshape(9, 10) % 4 > 1)
    tensors = {
        inner: encode(values, Bsr.for_values(values, (4, 3), inner))
        for inner in ("f32", "bf16", "int8", "int4")
    }
    return [_iebin(tensors)]


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
        _write_iebin(folder, tensors)
        plan_dedup(folder).run()
        (folder / "model.ie.bin").unlink()

    return [_made(make)]


def gguf() -> list[Seed]:
    """Return GGUF files: a whole Llama with a tokenizer, in bf16 and with 8-bit matrices."""
    seeds = []
    for group in (0, 32):

        def make(folder: Path, group: int = group) -> None:
            tensors = {
                name: encode(
                    _values(shape),
                    Int8(group, "f16") if group and len(shape) == 2 else Float("bf16"),
                )
                for name, (_, shape) in llama_arrays().items()
            }
            with TemporaryDirectory() as source:
                _write_iebin(Path(source), tensors)
                checkpoint = open_iebin(Path(source) / JSON_NAME)
                formats = {name: tensor.format for name, tensor in tensors.items()}
                plan = plan_gguf(CONFIG, formats, "seed")
                fields = {k: v for k, v in plan.fields.items() if not k.startswith("tokenizer.")}
                replace(plan, fields=fields).write(checkpoint, folder / "m.gguf")
            path = folder / "m.gguf"
            path.write_bytes(_with_tokenizer(path.read_bytes()))

        seeds.append(_made(make))
    return seeds


def _with_tokenizer(data: bytes) -> bytes:
    """Return a GGUF file with the metadata of a tokenizer in front of its own."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value.encode())) + value.encode()

    def entry(key: str, kind: int, value: bytes) -> bytes:
        return text(key) + struct.pack("<I", kind) + value

    def texts(values: list[str]) -> bytes:
        return struct.pack("<IQ", 8, len(values)) + b"".join(map(text, values))

    tokens = ["a", "b", "ab", "Ġ", "Ã", "©", "Ċ", *(f"<{n}>" for n in range(9))]
    types = struct.pack("<IQ16i", 5, 16, *([1] * 7 + [3] * 9))
    entries = [
        entry("tokenizer.ggml.model", 8, text("gpt2")),
        entry("tokenizer.ggml.pre", 8, text("gpt-2")),
        entry("tokenizer.ggml.tokens", 9, texts(tokens)),
        entry("tokenizer.ggml.token_type", 9, types),
        entry("tokenizer.ggml.merges", 9, texts(["a b"])),
        entry("tokenizer.ggml.bos_token_id", 4, struct.pack("<I", 7)),
        entry("seed.u32", 4, struct.pack("<I", 2)),
        entry("seed.f64", 12, struct.pack("<d", 0.5)),
        entry("seed.flag", 7, b"\1"),
    ]
    more = b"".join(entries)
    # What follows stays aligned if as many bytes as it is aligned to are put in front of it.
    more += entry("seed.pad", 8, text("p" * (-(len(more) + 28) % 32)))
    count = int.from_bytes(data[16:24], "little") + len(entries) + 1
    return data[:16] + struct.pack("<Q", count) + more + data[24:]


def q4_maps() -> list[Seed]:
    """Return manifests with rules."""
    rules = [
        {"pattern": ".*attn.*(q_proj|k_proj).*", "dtype": "int4w", "group": 64},
        {"pattern": r".*mlp\..*", "dtype": "int8w", "scale": "per-tensor", "zero": "per-tensor"},
        {"pattern": ".*", "dtype": "int4", "group": 32, "zero": "per-group"},
    ]
    return [{"q4.json": json_bytes({"version": 1, "rules": rules})}]


def q4_manifests() -> list[Seed]:
    """Return an expanded manifest with the planes of one tensor in a part, and one without."""
    tensor = encode(_values((4, 64)), Q4_0)
    planes = {f"w/{key}": plane.tobytes() for key, plane in tensor.planes.items()}
    names = {"codes": "U8", "scales": "F16"}
    arrays = {f"w/{key}": (names[key], plane.shape) for key, plane in tensor.planes.items()}
    part = safetensors_bytes(arrays, planes)
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
    parts = [{"file": PART, "nbytes": len(part), "sha256": _sha256(part)}]
    in_part = entry | {"method": "gptq", "part": PART, "tokens_seen": [5, 5]}
    return [
        {
            "q4.json": json_bytes(document | {"tensors": [in_part], "parts": parts}),
            f"q4.parts/{PART}": part,
        },
        {"q4.json": json_bytes(document | {"tensors": [entry | {"method": "rtn"}]})},
    ]


def q4_planes() -> list[Seed]:
    """Return Q4_0 plane files with their manifest, and the same over an IEBIN pair."""

    def make(folder: Path) -> None:
        tensors = {name: encode(_values((4, 64)), Float("f32")) for name in ("a", "b", "c")}
        _write_iebin(folder, tensors)
        entries: list[Q4Entry] = []
        files = dict.fromkeys(PLANES, b"")
        for name in ("a", "b"):
            tensor = encode(_values((4, 64)), Q4_0)
            offsets = next_offsets(entries[-1] if entries else None)
            hashes = {key: _sha256(tensor.planes[key].tobytes()) for key in PLANES}
            entries.append(Q4Entry(name, (4, 64), "0" * 64, offsets, hashes))
            for key in PLANES:
                files[key] = files[key].ljust(offsets[key], b"\0") + tensor.planes[key].tobytes()
        for key in PLANES:
            (folder / Q4_NAMES[key]).write_bytes(files[key])
        write_overlay(folder / COMPAT_NAME, entries)
        document = q4_document(Q4_NAMES, entries, {"c": "a vector"})
        (folder / "planes.json").write_bytes(json_bytes(document))

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
        write_trace(folder / "t.jsonl", [one, one])

    return [_made(make)]


def _converted() -> Seed:
    def make(folder: Path) -> None:
        with TemporaryDirectory() as source:
            _put(Path(source), llama())
            convert(Path(source), folder)

    return _made(make)


def _iebin(tensors: dict[str, QuantTensor]) -> Seed:
    return _made(lambda folder: _write_iebin(folder, tensors))


def _write_iebin(folder: Path, tensors: dict[str, QuantTensor]) -> None:
    with IebinWriter(folder) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
        writer.commit({"model_type": "llama"}, {}, {"bos": "<s>"}, b"{}\n", {})
    open_iebin(folder / JSON_NAME, verify=True)


def _made(make: Callable[[Path], None]) -> Seed:
    """Return the files that something writes into an empty directory."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        make(folder)
        return {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }


def _put(folder: Path, files: Seed) -> None:
    for name, data in files.items():
        (folder / name).write_bytes(data)


def _values(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape, np.float32)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
