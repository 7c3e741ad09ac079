"""How fast deduplicated planes are decoded on one thread, beside a copy of the same bytes.

    python -m bench.dedup [--model-dir DIR] [--mib N] [--rounds N] [--json FILE]

Without --model-dir: made-up weights, N MiB of each kind. GB/s are 10^9 decoded bytes a second.
"decode" is what the codec does, "checked" is decode and SHA-256, as a model is loaded; "hash" is
SHA-256 alone, "copy" a copy into memory in use.
"""

import hashlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import click
import numpy as np

from bench.measure import Rows, seconds
from bench.ops.experiment import FILE, Row, experiment, turns
from clocher_kernels.formats import parse_format
from clocher_kernels.quant_tensor import QuantTensor, encode
from clocher_runtime.checkpoints.dedup.reader import DedupFile, open_dedup
from clocher_runtime.checkpoints.iebin import IebinWriter
from clocher_runtime.convert.dedup.writer import describe, plan_dedup

_COLUMNS = 4096
_STUDENT = 5
_FORMATS = ("bf16", "mxfp4", "int4_sym_g128_f16", "ternary")


def make_model(directory: Path, mib: int) -> None:
    """Write weights of each kind, Student's t with 5 degrees of freedom; `mib` MiB in bf16."""
    rows = max(4, (mib << 20) // (2 * _COLUMNS) // 4 * 4)
    values = np.random.default_rng(0).standard_t(_STUDENT, (rows, _COLUMNS)).astype(np.float32)
    with IebinWriter(directory) as writer:
        for name in _FORMATS:
            writer.add(name, encoded(values * np.float32(0.02), name))
        writer.commit({}, {}, {}, None, {"container": "none"})


def encoded(values: np.ndarray, name: str) -> QuantTensor:
    """Return values in a format; ternary ones are those of absmean rounding."""
    if name == "ternary":
        values = np.clip(np.rint(values / np.abs(values).mean()), -1, 1)
    return encode(values, parse_format(name))


def measure(dedup: DedupFile, number: int, rounds: int) -> Rows:
    """Return a row for each way to go over a plane."""
    plane = dedup.index.planes[number]
    nbytes = plane.plane.nbytes
    data = dedup.plane(number).reshape(-1).view(np.uint8)
    target = np.zeros_like(data)

    def decode() -> None:
        for _ in dedup.pieces(number, 0, nbytes):
            pass

    def copy() -> None:
        target[:] = data

    ways: dict[str, Callable[[], object]] = {
        "decode": decode,
        "checked": lambda: dedup.plane(number),
        "hash": lambda: hashlib.sha256(data.data).digest(),
        "copy": copy,
    }

    found = turns(
        {name: lambda way=way: nbytes / seconds(way) / 1e9 for name, way in ways.items()}, rounds
    )
    stored = sum(part for _, part in plane.parts())
    return [
        {
            "op": name,
            "plane": f"{plane.tensor} {plane.key}",
            "nbytes": nbytes,
            "mib": nbytes / (1 << 20),
            "ratio": stored / nbytes,
            "how": describe(plane),
            "gbps": median(speeds),
            "samples": speeds,
        }
        for name, speeds in found.items()
    ]


def chosen(dedup: DedupFile) -> Iterator[int]:
    """Yield the largest decoded plane of each tensor type and way to store it."""
    largest: dict[tuple[object, ...], int] = {}
    for number, plane in enumerate(dedup.index.planes):
        if plane.mode in ("streams", "blocks") and not plane.xor:
            modes = tuple((stream.mode, stream.width) for stream in plane.streams)
            kind = (plane.plane.dtype, plane.split, modes)
            known = largest.setdefault(kind, number)
            if plane.plane.nbytes > dedup.index.planes[known].plane.nbytes:
                largest[kind] = number
    yield from sorted(largest.values())


@experiment(
    "dedup",
    __doc__,
    "plane | stored | how | MiB | way | GB/s",
    "{plane} | {ratio:.1%} | {how} | {mib:.1f} | {op} | {gbps:.2f}",
    title="deduplicated planes",
    rounds=9,
)
@click.option("--model-dir", type=FILE, help="A deduplicated model.")
@click.option("--mib", type=click.IntRange(1), default=32, show_default=True)
def main(model_dir: Path | None, mib: int, rounds: int) -> Iterator[Row]:
    """Yield the rows of the largest planes."""
    with tempfile.TemporaryDirectory() as root:
        if model_dir is None:
            make_model(Path(root), mib)
            plan_dedup(Path(root)).run()
        dedup = open_dedup(model_dir or Path(root))
        for number in chosen(dedup):
            yield from measure(dedup, number, rounds)


if __name__ == "__main__":
    main()
