"""The common interface of all weight containers."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from clocher_kernels.errors import FormatError, ModelError, UsageError
from clocher_kernels.formats import Float, Format, Ggml, Mxfp4
from clocher_kernels.quant_tensor import BlockRows, LatePlanes, QuantTensor
from clocher_runtime.disk.files import MappedFile
from clocher_runtime.disk.plane_index import DAMAGED, check_hashes
from clocher_runtime.disk.strict_json import checked_name, prefixed

JSON_NAME, BIN_NAME = "model.ie.json", "model.ie.bin"  # of `iebin`

CHECK_LIMIT_BYTES = 64 << 20
_INDICES = ("row_ptr", "col_idx")
Make = Callable[[], Mapping[str, np.ndarray]]
Find = Callable[[], BlockRows]


@dataclass(frozen=True, slots=True)
class MadeTokenizer:
    """A tokenizer.json of BPE, made of a vocabulary: keys are unique, and merges are pairs.

    `check` raises FormatError if a merge makes no token. `bytes` of it is the checked text.
    """

    document: Mapping[str, Any]
    check: Callable[[], None] = field(compare=False)

    def __bytes__(self) -> bytes:
        self.check()
        return msgspec.json.encode(self.document)


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """Weights and settings of one model, validated in full, nothing copied yet.

    `kind` is the container: Hugging Face (safetensors or pickled), IEBIN or GGUF. The configs are
    the contents of their files, {} without one; "chat_template" is that of chat_template.jinja
    where that file exists. `tensors` are views of mapped files, not necessarily aligned, or lazy.
    `notes` tells people what was left out. `hashes` are SHA-256 by tensor and plane, where the
    container has them. `pooling` of embeddings: "mean", "cls", "last", the name of another one,
    "" if nothing says it. `make_tokenizer` makes tokenizer.json where that is no file (GGUF).
    """

    path: Path
    kind: Literal["hf", "bin", "iebin", "gguf", "callable"]
    config: Mapping[str, Any]
    tensors: Mapping[str, QuantTensor]
    files: tuple[MappedFile, ...]
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    tokenizer_config: Mapping[str, Any] = field(default_factory=dict)
    tokenizer_json: Path = Path("tokenizer.json")
    notes: tuple[str, ...] = ()
    hashes: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    make_tokenizer: Callable[[], MadeTokenizer] | None = None
    pooling: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """Logical tensor names."""
        return tuple(self.tensors)

    @property
    def tokenizer_source(self) -> Path | MadeTokenizer:
        """What `Tokenizer` loads: the file, or what is made from metadata."""
        return self.make_tokenizer() if self.make_tokenizer else self.tokenizer_json

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the logical shape of a tensor."""
        return self._stored(name).shape

    def tensor(self, name: str, verify: bool = False) -> QuantTensor:
        """Return a tensor whose planes are aligned: views of the file where possible, else copies.

        Those of blocks of ggml are made and checked when they are first asked for; who packs the
        blocks as they are looks at the scales. Forbidden codes give wrong numbers but no fault;
        they are looked for in tensors of up to 64 MiB, in MXFP4 scales, and everywhere with
        `verify`, which also checks the SHA-256. Block-sparse indices could fault, so they are
        always copied and checked. Raises ModelError, FormatError.
        """
        stored = self._stored(name)
        find = rows_of(stored)
        if find is None or verify:
            return QuantTensor(stored.shape, stored.format, self._planes(name, stored, verify))
        planes = LatePlanes(
            tuple(stored.format.planes(stored.shape)),
            partial(self._planes, name, stored),
            lambda: find()._replace(where=f"{self.path}: tensor {name!r}"),
            is_lazy(stored),
        )
        return QuantTensor(stored.shape, stored.format, planes)

    def _planes(
        self, name: str, stored: QuantTensor, verify: bool = False
    ) -> Mapping[str, np.ndarray]:
        sparse = stored.format.is_sparse
        with prefixed(f"{self.path}: tensor {name!r}"):
            found = planes_of(stored).items()
            planes = {key: np.require(plane, requirements=["C", "A"]) for key, plane in found}
            if is_lazy(stored):
                self.release()
            if sparse:
                planes |= {key: planes[key].copy() for key in _INDICES}
            if verify:
                check_hashes(planes, self.hashes.get(name, {}), "", DAMAGED)
            always = sparse or isinstance(stored.format, Mxfp4)
            if verify or always or stored.nbytes <= CHECK_LIMIT_BYTES:
                QuantTensor(stored.shape, stored.format, planes).check()
        return planes

    def verify(self) -> None:
        """Read all weights: look for forbidden codes and check the container's hashes."""
        for name in self.tensors:
            self.tensor(name, verify=True)
            self.release()
        self.check_unchanged()

    def check_unchanged(self) -> None:
        """Check, without reading, that the weight files are still those that were opened."""
        for file in self.files:
            file.check_unchanged()

    def release(self) -> None:
        """Let the kernel drop the resident pages of the weight files."""
        for file in self.files:
            file.release()

    def _stored(self, name: str) -> QuantTensor:
        if name not in self.tensors:
            raise ModelError(
                f"{self.path}: the model has no tensor {name!r}; it has {len(self.tensors)} "
                f"tensors, such as {', '.join(self.names[:4])}"
            )
        return self.tensors[name]


def is_lazy(stored: QuantTensor) -> bool:
    """Return whether the planes of a tensor are made, not views of a file."""
    return isinstance(stored.planes, LatePlanes)


def planes_of(stored: QuantTensor) -> Mapping[str, np.ndarray]:
    """Return the planes of a tensor; those of a lazy one are made, and not kept."""
    return stored.planes.make() if isinstance(stored.planes, LatePlanes) else stored.planes


def rows_of(stored: QuantTensor) -> Find | None:
    """Return what tells where a file has the rows of a tensor, None if they are no blocks there."""
    if isinstance(stored.planes, LatePlanes):
        return stored.planes.rows
    if isinstance(stored.format, Ggml) and stored.planes["blocks"].flags.c_contiguous:
        return partial(BlockRows.of, stored.planes["blocks"], stored.shape[:-1])
    return None


def stored_tensor(
    shape: tuple[int, ...], fmt: Format, planes: Mapping[str, np.ndarray], where: str
) -> QuantTensor:
    """Return a tensor of planes found in a file; raises FormatError."""
    with prefixed(where):
        return QuantTensor(shape, fmt, planes)


def lazy_tensor(
    shape: tuple[int, ...], fmt: Format, make: Make, where: str, rows: Find | None = None
) -> QuantTensor:
    """Return a tensor whose planes `make` computes at every call, from already checked arrays."""
    with prefixed(where):
        return QuantTensor(shape, fmt, LatePlanes(tuple(fmt.planes(shape)), make, rows))


def open_arrays(arrays: object, where: str) -> Checkpoint:
    """Return a checkpoint of (name, array) pairs or a mapping.

    Arrays are floats [...] or `QuantTensor`s, which bf16 weights need. Raises UsageError.
    """
    if isinstance(arrays, Mapping):
        arrays = arrays.items()
    if not isinstance(arrays, Iterable):
        raise UsageError(
            f"{where} gave {type(arrays).__name__}; expected a dict of arrays, or (name, array) "
            "pairs"
        )
    tensors: dict[str, QuantTensor] = {}
    for pair in arrays:
        if not (isinstance(pair, tuple) and len(pair) == 2):
            raise UsageError(f"{where} gave {type(pair).__name__}; expected (name, array) pairs")
        try:
            name = checked_name(pair[0], where)
            if name in tensors:
                raise FormatError(f"{where}: array {name!r} is there twice")
            tensors[name] = _from_value(pair[1], f"{where}: array {name!r}")
        except ModelError as error:
            raise UsageError(str(error)) from None
    if not tensors:
        raise UsageError(f"{where} gave no arrays")
    return Checkpoint(Path(), "callable", {}, tensors, ())


def _from_value(value: object, where: str) -> QuantTensor:
    if isinstance(value, QuantTensor):
        return value
    if not isinstance(value, np.ndarray) or value.dtype.kind != "f" or value.dtype.itemsize > 8:
        got = f"{value.dtype} array" if isinstance(value, np.ndarray) else type(value).__name__
        raise FormatError(f"{where}: {got}; expected an array of floats, or a QuantTensor")
    dtype = np.float16 if value.dtype.itemsize == 2 else np.float32
    data = value.astype(dtype, copy=False)
    return stored_tensor(value.shape, Float(f"f{8 * data.itemsize}"), {"data": data}, where)
