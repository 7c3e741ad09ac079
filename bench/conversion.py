"""How fast a checkpoint is converted, beside what the disk and the codec allow.

    python -m bench.conversion [--megabytes N] [--rounds N] [--dir DIR] [--json FILE]

A synthetic bf16 checkpoint of matrices of 32 MiB is converted as it is ("copy") and to int4
("int4_sym_g64_f16"). The input is dropped from the page cache before each run and the output is
flushed to the disk within it. In the same minute, in turns: "disk" reads the input and then writes
and flushes as many bytes as the output has, in pieces of 4 MiB; "codec" encodes the matrices in
memory on all CPUs; "hash" is SHA-256 of the output twice, as IEBIN asks, on two threads. What is
allowed is the slower of disk and codec, because the two can overlap; the last column is its time
over the converter's. GB/s are 10^9 bytes of input a second.
"""

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import click
import numpy as np

from bench.measure import Rows, ratio
from bench.ops.experiment import FILE, Row, experiment, turns
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.convert.rounding import round_tensor
from clocher_runtime.convert.to_iebin import convert
from clocher_runtime.disk.safetensors_file import safetensors_head
from clocher_runtime.engine.topology import usable_cpus

ROWS, COLUMNS = 4096, 4096
MATRIX_BYTES = 2 * ROWS * COLUMNS
_STEP = 1 << 22
_MANIFEST = {"version": 1, "rules": [{"pattern": ".*", "dtype": "int4w", "group": 64}]}


def write_checkpoint(folder: Path, matrices: int) -> Path:
    """Write a safetensors file with random matrices in bf16."""
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    names = [f"model.layers.{index}.mlp.up_proj.weight" for index in range(matrices)]
    head, _ = safetensors_head(dict.fromkeys(names, ("BF16", (ROWS, COLUMNS))))
    rng = np.random.default_rng(0)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(head)
        for _ in names:
            values = rng.standard_normal(ROWS * COLUMNS, np.float32)
            file.write((values.view(np.uint32) >> 16).astype(np.uint16).data)
        file.flush()
        os.fsync(file.fileno())
    return folder


def forget(path: Path) -> None:
    """Drop a file from the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def read_and_write(source: Path, target: Path, nbytes: int) -> None:
    """Read a file that is not cached, then write and flush so many bytes."""
    with source.open("rb", buffering=0) as file:
        while file.read(_STEP):
            pass
    piece = np.random.default_rng(1).bytes(_STEP)
    with target.open("wb", buffering=0) as file:
        for start in range(0, nbytes, _STEP):
            file.write(piece[: nbytes - start])
        os.fsync(file.fileno())


def hash_twice(data: np.ndarray, pool: ThreadPoolExecutor) -> None:
    """Hash bytes on two threads."""
    for digest in list(pool.map(lambda _: hashlib.sha256(data.data).digest(), range(2))):
        if len(digest) != hashlib.sha256().digest_size:
            raise RuntimeError("a hash of the wrong size")


def measure(folder: Path, matrices: int, quantise: bool, rounds: int) -> Rows:
    """Return a row for each contestant of one kind of conversion."""
    model = folder / "hf"
    source, out, scratch = model / "model.safetensors", folder / "out", folder / "scratch"
    manifest = folder / "q4.json"
    manifest.write_text(json.dumps(_MANIFEST), encoding="utf-8")
    conversion = convert(model, out, manifest if quantise else None)
    written = (out / "model.ie.bin").stat().st_size
    name, fmt = next(iter(conversion.formats.items()))
    tensor = open_checkpoint(model).tensor(name)
    resident = np.random.default_rng(2).integers(0, 256, min(written, 1 << 28), np.uint8)
    pool = ThreadPoolExecutor(2)

    def converter() -> None:
        convert(model, out, manifest if quantise else None)

    ways: dict[str, tuple[Callable[[], object], float]] = {
        "converter": (converter, 1.0),
        "disk": (lambda: read_and_write(source, scratch, written), 1.0),
        "hash": (lambda: hash_twice(resident, pool), written / resident.nbytes),
    }
    if quantise:
        threads = len(usable_cpus())
        ways["codec"] = (lambda: round_tensor(tensor, fmt, threads=threads), float(matrices))

    def timed(way: str) -> float:
        call, times = ways[way]
        scratch.unlink(missing_ok=True)
        shutil.rmtree(out)
        forget(source)
        start = time.perf_counter()
        call()
        seconds = (time.perf_counter() - start) * times
        out.mkdir(exist_ok=True)
        return seconds

    found = turns({way: lambda way=way: timed(way) for way in ways}, rounds)
    limits = zip(found["disk"], found.get("codec", found["disk"]), strict=True)
    found["allowed"] = [max(pair) for pair in limits]
    rows: Rows = []
    for way, seconds in found.items():
        reached = ratio(seconds, found["converter"])
        rows.append(
            {
                "op": way,
                "conversion": fmt.name if quantise else "copy",
                "bytes_in": matrices * MATRIX_BYTES,
                "bytes_out": written,
                "seconds": median(seconds),
                "gbps": matrices * MATRIX_BYTES / median(seconds) / 1e9,
                "samples": seconds,
                "over_converter": reached.value,
                "over_converter_95": [reached.low, reached.high],
            }
        )
    return rows


@experiment(
    "conversion",
    __doc__,
    "conversion | what | s | GB/s in | time over the converter's",
    "{conversion} | {op} | {seconds:.2f} | {gbps:.2f} | "
    "{over_converter:.2f}x [{over_converter_95[0]:.2f}, {over_converter_95[1]:.2f}]",
    title="{bytes_in} bytes of bf16",
    rounds=5,
)
@click.option("--megabytes", type=click.IntRange(64), default=1024, show_default=True)
@click.option("--dir", "folder", type=FILE, help="Which disk to measure.")
def main(megabytes: int, folder: Path | None, rounds: int) -> Iterator[Row]:
    """Yield the rows of a copy and of a quantisation."""
    matrices = max(2, megabytes * 10**6 // MATRIX_BYTES)
    try:
        with tempfile.TemporaryDirectory(dir=folder) as place:
            write_checkpoint(Path(place) / "hf", matrices)
            for quantise in (False, True):
                yield from measure(Path(place), matrices, quantise, rounds)
    except OSError as error:
        raise click.ClickException(str(error)) from None


if __name__ == "__main__":
    main()
