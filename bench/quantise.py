r"""Quantisation of real weights: what each method loses at its bytes, beside llama-quantize.

\b
    python -m bench quantise --model-dir FLOAT.gguf --calib-text CALIB --text TEXT \
        [--turns JSONL] [--llama DIR] --keep PARTS --json OUT

Where floats cannot be had, FLOAT.gguf is --published dequantised; noise of up to half a step is
then added to a copy, for a grid that was there before would be found again. Each candidate
quantises the matrices of the layers of FLOAT.gguf; embeddings and head have 8 bits in all of them
(int8 g32 or Q8_0), so that sizes differ by the layers alone. `whole`: they have what the command
gives them, of --bits B or of llama-quantize. Clocher reads every result with fp32 activations and
an fp32 cache, and compares its logits with those of FLOAT.gguf, on text that was not calibrated
with. `over llama.cpp` is the KL divergence beside that of llama-quantize with an importance matrix
at equal bytes, between its next smaller and larger type; importance matrix and calibration read as
many tokens of CALIB. PARTS keeps what is done with these texts, a folder beside it what is begun,
for a run that was ended.
"""

import json
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from hashlib import sha256
from math import exp, log, prod
from pathlib import Path
from typing import Any

import click
import numpy as np

from bench import real
from bench.experiment import TEAM, NotMeasured, experiment, output_of
from bench.record import Row
from clocher_kernels.quant_tensor import QuantTensor
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.checkpoints.gguf.file import GgufFile
from clocher_runtime.checkpoints.locate import holds_model
from clocher_runtime.command.flags import option
from clocher_runtime.command.parameters import COUNT, PATH

OURS: Mapping[str, Mapping[str, Any]] = {
    "int4 g128": {"dtype": "int4", "group": 128, "zero": "per-group"},
    "int4 symmetric g32": {"dtype": "int4", "group": 32},
    "int4 g32": {"dtype": "int4", "group": 32, "zero": "per-group"},
    "mxfp4": {"dtype": "mxfp4"},
    "fp8": {"dtype": "fp8"},
    "int8": {"dtype": "int8"},
}
"""Formats of `clocher quantize`, as its rules name them."""
ALLOCATED = "int4 and int8 in the bytes of int4 g32"
METHODS = {"int4 g128": ("rtn", "gptq"), "int4 g32": ("rtn", "mse", "imx", "gptq")} | {
    "int4 symmetric g32": ("rtn", "gptq"),
    "mxfp4": ("rtn", "imx"),
    "fp8": ("rtn",),
    "int8": ("rtn",),
    ALLOCATED: ("gptq",),
}
THEIRS = ("Q3_K_M", "IQ3_S", "Q4_0", "IQ4_XS", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0")
PLAIN, WEIGHED = "llama-quantize", "llama-quantize, importance"
THEIRS_WHOLE = ("IQ3_XXS", "IQ3_S", "IQ3_M", "IQ4_XS", "Q4_K_M", "Q5_K_M")
BITS = ("3", "3.4", "4.1", "4.9")
"""Of `clocher quantize --bits`: trellises."""
WHOLE, WEIGHED_WHOLE = "gptq, whole", f"{WEIGHED}, whole"
_UNWEIGHED = ("Q3_K_M", "Q4_0", "Q4_K_M")
_ENDS = r".*(embed|lm_head).*"
_LENGTH, _AT_ONCE = 512, 1 << 22
_INNER, _OUTER = 4.75, 8.5
"""Bits of a weight of int4 g32, and of embeddings and head."""
_GROUPS = {"q6_k": 16, "q3_k": 16, "q2_k": 16}
"""Weights that share a scale in a type of ggml; 32 in the others."""


def candidates(llama: bool) -> Iterator[tuple[str, str]]:
    """Yield the candidates: the format and the method, those of llama-quantize first."""
    if llama:
        yield from ((name, WEIGHED) for name in THEIRS)
        yield from ((name, PLAIN) for name in _UNWEIGHED)
        yield from ((name, WEIGHED_WHOLE) for name in THEIRS_WHOLE)
    yield from ((name, method) for name, methods in METHODS.items() for method in methods)
    yield from ((f"--bits {bits}", WHOLE) for bits in BITS)


def dither(source: Path, published: Path, out: Path) -> None:
    """Copy a GGUF file of f16, adding to each weight noise of up to half a step of `published`.

    `source` is `published` dequantised; its weights lie on a grid that another quantisation would
    find again. With the noise they are as dense as weights that were never quantised.
    """
    rng = np.random.default_rng(0)
    stored = GgufFile(published).tensors
    shutil.copyfile(source, out)
    for name, info in GgufFile(source).tensors.items():
        if info.kind.name != "f16":
            continue
        if name not in stored:
            raise NotMeasured(f"{published} has no {name}: {source} is no copy of it")
        group = _GROUPS.get(stored[name].kind.name, 32)
        weights = np.memmap(out, np.float16, "r+", info.offset, (info.nbytes // 2,))
        for start in range(0, weights.size, _AT_ONCE):
            values = weights[start : start + _AT_ONCE].astype(np.float32).reshape(-1, group)
            gaps = np.diff(np.sort(values, axis=1))
            step = np.where(gaps > 0, gaps, np.inf).min(axis=1, keepdims=True)
            noise = rng.uniform(-0.5, 0.5, values.shape) * np.where(np.isfinite(step), step, 0)
            weights[start : start + _AT_ONCE] = (values + noise).astype(np.float16).reshape(-1)
        weights.flush()


def make(asked: Any, name: str, method: str, folder: Path) -> Path:
    """Write a candidate into a folder, and return its path."""
    if method in (PLAIN, WEIGHED, WEIGHED_WHOLE):
        return _theirs(asked, name, method, folder)
    rules, out = folder / "rules.json", folder / "out"
    command = [sys.executable, "-m", "clocher_runtime", "quantize", asked.source, out]
    command += ["--threads", asked.threads]
    if method == WHOLE:
        command += name.split()
    else:
        ends = {"pattern": _ENDS, "dtype": "int8", "group": 32, "scale_dtype": "f16"}
        own = {"pattern": ".*", **OURS["int4 g32" if name == ALLOCATED else name]}
        own |= {"clip": "mse", "method": "rtn"} if method == "mse" else {"method": method}
        rules.write_text(json.dumps({"version": 1, "rules": [ends | {"method": "rtn"}, own]}))
        command += ["--rules", rules]
    if method in ("imx", "gptq", WHOLE):
        command += ["--calib-text", asked.calib, "--samples", asked.samples]
        command += ["--seq-len", _LENGTH]
    if name == ALLOCATED:
        inner, outer = map(_params, _matrices(asked.source))
        command += ["--target-bpw", (_INNER * inner + _OUTER * outer) / (inner + outer)]
    if not holds_model(out):  # else it was ended while it was scored
        output_of(command)
    return out


def _theirs(asked: Any, name: str, method: str, folder: Path) -> Path:
    programs, out = asked.llama or Path(), folder / "out.gguf"
    command: list[object] = [programs / "llama-quantize"]
    if method != PLAIN:
        weights = asked.keep.with_name(f"{asked.source.stem}.{asked.samples}.imatrix.gguf")
        if not weights.exists():
            part = weights.with_suffix(".part.gguf")
            first = [programs / "llama-imatrix", "-m", asked.source, "-f", asked.calib, "-t"]
            output_of([*first, asked.threads, "-c", _LENGTH, "--chunks", asked.samples, "-o", part])
            part.rename(weights)
        command += ["--imatrix", weights]
    if method != WEIGHED_WHOLE:
        command += ["--token-embedding-type", "q8_0", "--output-tensor-type", "q8_0"]
    output_of([*command, asked.source, out, name, asked.threads])
    return out


def _matrices(model: Path) -> tuple[list[QuantTensor], list[QuantTensor]]:
    """Return the matrices of a model's layers, and its embeddings and head."""
    found: tuple[list[QuantTensor], list[QuantTensor]] = [], []
    for name, stored in open_checkpoint(model).tensors.items():
        if len(stored.shape) > 1:
            found[re.fullmatch(_ENDS, name) is not None].append(stored)
    return found


def _params(matrices: Sequence[QuantTensor]) -> int:
    return sum(prod(stored.shape) for stored in matrices)


def sizes(model: Path) -> real.Sums:
    """Return the MiB of a model's tensors; bits of a weight of its layers' matrices, and of all."""
    (inner, outer), nbytes = _matrices(model), open_checkpoint(model).nbytes
    layers = 8 * sum(stored.nbytes for stored in inner) / _params(inner)
    return {
        "mib": nbytes / (1 << 20),
        "bits": layers,
        "all_bits": 8 * nbytes / _params([*inner, *outer]),
    }


def over_theirs(row: Row, rows: Sequence[Row], key: str) -> float | None:
    """Return a row's divergence over llama-quantize's at equal bytes; None outside its range.

    Types that lose more than a smaller one are left out.
    """
    peer = WEIGHED_WHOLE if row["method"] in (WHOLE, WEIGHED_WHOLE) else WEIGHED
    known: list[tuple[float, float]] = []
    for each in sorted((r for r in rows if r["method"] == peer), key=lambda r: r["mib"]):
        if not known or log(each[key]) < known[-1][1]:
            known.append((each["mib"], log(each[key])))
    sizes = [mib for mib, _ in known]
    if not known or not sizes[0] <= row["mib"] <= sizes[-1]:
        return None
    return float(row[key] / exp(np.interp(row["mib"], sizes, [value for _, value in known])))


def _score(asked: Any, key: str, name: str, method: str, texts: real.Texts) -> real.Sums:
    folder = asked.keep.with_name(re.sub(r"[^\w.]+", "-", key))
    folder.mkdir(exist_ok=True)  # What was begun there goes on.
    made = make(asked, name, method, folder)
    found = sizes(made) | texts.sums(real.logits_of(made, asked.threads))
    shutil.rmtree(folder)
    return found


@experiment(
    "quantise",
    __doc__,
    option("--model-dir", PATH, "GGUF file of floats", name="source", required=True),
    option("--published", PATH, "the file that FLOAT.gguf is a dequantised copy of"),
    option("--calib-text", PATH, name="calib", required=True),
    option("--samples", click.IntRange(2), default=24),
    option("--text", PATH, required=True),
    option("--turns", PATH),
    option("--tokens", COUNT, default=2040),
    option("--llama", PATH, "where llama-quantize is"),
    option("--only", str, "regular expression for format and method", default=""),
    option("--keep", PATH, required=True),
    option("--seconds", COUNT, "begin no part after that"),
    TEAM,
    title="{model}",
)
def main(asked: Any) -> Iterator[Row]:
    """Measure the candidates that are missing, and yield the rows of all of them."""
    if asked.published:
        out = asked.keep.with_name(f"{asked.source.stem}.dithered.gguf")
        if not out.exists():
            part = out.with_suffix(".part")
            dither(asked.source, asked.published, part)
            part.rename(out)
        asked.source = out
    read = [path and path.read_bytes() for path in (asked.calib, asked.text, asked.turns)]
    inputs = sha256(repr([asked.tokens, *read]).encode()).hexdigest()[:16]
    parts = real.Parts(asked.keep, asked.seconds, inputs=inputs)
    asked.keep = asked.keep.with_name(f"{asked.keep.name}.{inputs}") / "parts"
    asked.keep.parent.mkdir(exist_ok=True)  # what lies beside PARTS is of these texts, too
    source, model = asked.source, asked.source.stem
    exact = partial(real.logits_of, source, asked.threads)
    texts = real.Texts(asked, parts, -(-asked.tokens // real.SCORED), exact)
    rows: list[Row] = []
    for name, method in candidates(asked.llama is not None):
        key = f"{model} {asked.samples} {name} {method}"
        if re.search(asked.only, f"{name} {method}"):
            parts.do(key, partial(_score, asked, key, name, method, texts))
        if found := parts.get(key):
            row: Row = {"model": model, "format": name, "method": method, "samples": asked.samples}
            row |= {key: found[key] for key in ("mib", "bits", "all_bits")}
            rows.append(row | texts.fields(found))
    for row in sorted(rows, key=lambda row: row["mib"]):
        over = {f"over_{kind}": over_theirs(row, rows, f"kld_{kind}") for kind in texts.kinds}
        yield row | over
