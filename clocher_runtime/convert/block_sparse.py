"""Dense checkpoint -> IEBIN with block-sparse matrices: zero, or the weakest, blocks left out."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from clocher_kernels.errors import FormatError, UsageError
from clocher_kernels.formats import Float
from clocher_kernels.formats.bsr import Bsr
from clocher_kernels.quant_tensor import QuantTensor, encode
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.checkpoints.checkpoint import BIN_NAME, Checkpoint
from clocher_runtime.checkpoints.iebin import IebinWriter
from clocher_runtime.convert import LINEARS
from clocher_runtime.convert.q4_map import name_pattern
from clocher_runtime.convert.to_iebin import finish, refuse_hf_folder, refuse_input, vocabulary
from clocher_runtime.disk.output_file import check_free
from clocher_runtime.disk.strict_json import prefixed

_EXTRA_BYTES_PER_TENSOR = 4096


class Sparsifying(NamedTuple):
    """How matrices become block-sparse."""

    block: tuple[int, int] = (32, 32)  # rows and columns of a block
    inner: str = ""  # format of the blocks, of `formats.bsr.INNERS`; "" keeps the matrix's own
    sparsity: float = 0.0  # least share of zero blocks at the end; 0 only drops those that are zero
    pattern: str = LINEARS  # regular expression for the whole names that are converted
    force: bool = False  # convert matrices that become larger too


class Outcome(NamedTuple):
    """The result for a matrix that the pattern names."""

    name: str
    density: float  # share of its blocks that are not zero
    before: int  # bytes it had
    after: int  # bytes it has as block-sparse rows, or would have
    format: str  # name of the format it is stored in
    note: str  # why it stayed dense; "" if it did not


def prune(values: np.ndarray, block: tuple[int, int], sparsity: float) -> np.ndarray:
    """Return values fp32 [N, K] with the share `sparsity` of the blocks, the weakest, made zero."""
    (n, k), (height, width) = values.shape, block
    rows, columns = np.arange(0, n, height), np.arange(0, k, width)
    squares = np.add.reduceat(np.square(values, dtype=np.float64), columns, axis=1)
    energy = np.add.reduceat(squares, rows, axis=0)
    room = np.diff(rows, append=n)[:, None] * np.diff(columns, append=k)
    strength = (energy / room).reshape(-1)
    weakest = np.argsort(strength, kind="stable")[: int(sparsity * strength.size)]
    kept = np.ones(strength.size, bool)
    kept[weakest] = False
    mask = kept.reshape(energy.shape).repeat(height, 0)[:n].repeat(width, 1)[:, :k]
    return np.where(mask, values, np.float32(0))


def sparsify(model_dir: Path, out_dir: Path, how: Sparsifying) -> list[Outcome]:
    """Write a model with block-sparse matrices; return the result of each.

    Raises UsageError, also if no matrix becomes smaller, ModelError, OSError.
    """
    source, names = _opened(model_dir, out_dir, how)
    vocab = vocabulary(source)
    out_dir.mkdir(parents=True, exist_ok=True)
    outcomes: list[Outcome] = []
    with IebinWriter(out_dir) as writer:
        for name in source.names:
            tensor = source.tensor(name, verify=True)
            if name in names:
                tensor, outcome = _converted(name, tensor, how)
                outcomes.append(outcome)
            writer.add(name, tensor)
            source.release()
        if all(outcome.note for outcome in outcomes):
            best = min(outcomes, key=lambda outcome: outcome.after / outcome.before)
            raise UsageError(
                f"none of the {len(outcomes)} matrices would become smaller; the sparsest, "
                f"{best.name}, has {best.density:.0%} of its blocks: {best.before} -> "
                f"{best.after} bytes; ask for a sparsity, other blocks, or force it"
            )
        done = {o.name: source.tensors[o.name].format.name for o in outcomes if not o.note}
        record = how._asdict() | {"block": list(how.block)}
        del record["force"]
        finish(writer, source, vocab, q4_map=None, quantised=done, block_sparse=record)
    return outcomes


def _opened(model_dir: Path, out_dir: Path, how: Sparsifying) -> tuple[Checkpoint, list[str]]:
    """Return the input and the matrices to convert, checked before anything is written."""
    if not 0 <= how.sparsity < 1:
        raise UsageError(f"sparsity is {how.sparsity}; expected 0 up to, not including, 1")
    try:
        Bsr(how.block, how.inner or "f32")
    except FormatError as error:
        raise UsageError(str(error)) from None
    refuse_hf_folder(out_dir)
    source = open_checkpoint(model_dir)
    refuse_input(source, out_dir)
    pattern = name_pattern(how.pattern)
    names = [
        name
        for name, tensor in source.tensors.items()
        if pattern.fullmatch(name) and isinstance(tensor.format, Float) and len(tensor.shape) == 2
    ]
    if not names:
        raise UsageError(
            f"{model_dir}: no float matrix has a name that matches {how.pattern!r}; it has "
            f"{', '.join(source.names[:4])}, ..."
        )
    nbytes = len(vocabulary(source) or b"")
    for name, tensor in source.tensors.items():
        most = tensor.nbytes
        if how.force and name in names:
            blocks = _blocks(tensor.shape, how.block)
            fmt = Bsr(how.block, how.inner or tensor.format.name, blocks)
            most = max(most, fmt.nbytes(tensor.shape))
        nbytes += most + _EXTRA_BYTES_PER_TENSOR
    check_free(out_dir / BIN_NAME, nbytes)
    return source, names


def _converted(name: str, tensor: QuantTensor, how: Sparsifying) -> tuple[QuantTensor, Outcome]:
    values = tensor.decode()
    if how.sparsity:
        values = prune(values, how.block, how.sparsity)
    with prefixed(f"tensor {name!r}"):
        fmt = Bsr.for_values(values, how.block, how.inner or tensor.format.name)
        sparse = encode(values, fmt)
    density = fmt.nnzb / _blocks(tensor.shape, how.block)
    note = ""
    if not fmt.nnzb:
        note = "all zero"
    elif sparse.nbytes >= tensor.nbytes and not how.force:
        note = "would grow"
    stored = tensor if note else sparse
    found = Outcome(name, density, tensor.nbytes, sparse.nbytes, stored.format.name, note)
    return stored, found


def _blocks(shape: tuple[int, ...], block: tuple[int, int]) -> int:
    return -(-shape[0] // block[0]) * -(-shape[1] // block[1])
