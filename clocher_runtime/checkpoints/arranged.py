"""Arrange a family's stored tensors as the model reads them: renamed, cut or copied in order."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import numpy as np

from clocher_kernels.errors import FormatError, ModelError, UnsupportedModel
from clocher_kernels.formats import Format, Fp8, Int8, Ternary
from clocher_kernels.formats.floats import FP8_BLOCK as BLOCK
from clocher_kernels.formats.ternary import pack
from clocher_kernels.quant_tensor import BlockRows, QuantTensor
from clocher_runtime.checkpoints.checkpoint import (
    is_lazy,
    lazy_tensor,
    planes_of,
    rows_of,
    stored_tensor,
)
from clocher_runtime.models.families import (
    Family,
    Piece,
    Rows,
    family_of,
    names_of,
    pieces,
    text_config,
)
from clocher_runtime.models.inventory import EMBED, HEAD, Need, inventory
from clocher_runtime.models.spec import ModelSpec

Planes = Mapping[str, np.ndarray]

_TEXT = (
    ("model.language_model.lm_head.", "lm_head."),
    ("model.language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
_NOT_TEXT = (
    *("vision_tower.", "vision_model.", "visual.", "audio_tower."),
    *("multi_modal_projector.", "embed_vision."),
)


def arranged(
    tensors: Mapping[str, QuantTensor], config: Mapping[str, Any], where: str
) -> tuple[dict[str, QuantTensor], tuple[str, ...]]:
    """Return the tensors under the names of `inventory` (others keep theirs), and notes."""
    named, notes = _of_text(tensors)
    try:
        family = family_of(text_config(config))
        spec = family.read(text_config(config))
    except ModelError:
        return named, notes  # the loader raises this
    found: dict[str, QuantTensor] = {}
    used: set[str] = set()
    for source, need in inventory(spec).items():
        # Ends at the first that is not there: a config may promise more experts than fit anywhere.
        if not all(name in named for name, _ in names_of(family, source, need)):
            if source in named:  # of a family that some files fuse
                found[source] = named[source]
            continue
        found[source] = taken(family, spec, named, source, need, f"{where}: tensor {source!r}")
        used |= {name for name, _ in names_of(family, source, need)}
    rest = {name: tensor for name, tensor in named.items() if name not in used | set(found)}
    return {**found, **rest}, notes


def _of_text(tensors: Mapping[str, QuantTensor]) -> tuple[dict[str, QuantTensor], tuple[str, ...]]:
    """Return the text model's tensors, under the names of a text-only checkpoint."""
    named: dict[str, QuantTensor] = {}
    left_out = 0
    # A model that was saved without its head has no "model." before its names.
    bare = "embed_tokens.weight" in tensors and EMBED not in tensors
    for name, tensor in tensors.items():
        if name.removeprefix("model.").startswith(_NOT_TEXT):
            left_out += 1
            continue
        own = text_name(name)
        named[f"model.{own}" if bare and own != HEAD else own] = tensor
    note = f"{left_out} tensors of vision, audio or other non-text parts were left out"
    return named, (note,) if left_out else ()


def text_name(name: str) -> str:
    """Return a multimodal model's tensor name as text-only models have it."""
    return next((to + name[len(begin) :] for begin, to in _TEXT if name.startswith(begin)), name)


def taken(
    family: Family,
    spec: ModelSpec,
    named: Mapping[str, QuantTensor],
    source: str,
    need: Need,
    where: str,
    asked: str = "config.json asks for",
) -> QuantTensor:
    """Return a model's tensor from those of a family's file; `asked` is for messages on shapes."""
    names = dict(names_of(family, source, need))
    # No more rows than are there, as their order is an array; less is reported below.
    there = sum(prod(named[name].shape) for name in names)
    if any(names.values()) and 2 * there < need.elements:
        raise FormatError(
            f"{where}: {', '.join(sorted(names)[:3])} has {there} elements; {asked} "
            f"{need.elements}, {list(need.shape)}"
        )
    parts = tuple(pieces(family, spec, source, need))
    first = named[parts[0].name]
    if len(parts) == 1 and parts[0].rows is None and parts[0].expert is None:
        return first
    stored = [named[part.name] for part in parts]
    fmt: Format = first.format
    if len(need.shape) > 1 and len(parts) > 1:  # each part's scale is one for each of its rows
        if isinstance(fmt, Fp8) and fmt.scope == "tensor":
            fmt = replace(fmt, scope="row")
        elif isinstance(fmt, Int8) and fmt.group == "tensor":
            fmt = replace(fmt, group="row")
    if other := [part.name for part in parts if named[part.name].format != first.format]:
        raise UnsupportedModel(
            f"{where}: its parts are {parts[0].name} {first.format.name} and {other[0]} "
            f"{named[other[0]].format.name}; expected one format, as Clocher's experts of a layer "
            "are one matrix (in GGUF files llama-quantize --tensor-type makes them of one)"
        )
    if isinstance(fmt, Ternary) and len(parts) > 1:
        raise UnsupportedModel(
            f"{where}: parts of {fmt.name} have scales of their own, and are packed; take the "
            "model in another format"
        )
    if isinstance(fmt, Fp8) and fmt.scope == "b128" and not _whole_blocks(parts):
        fmt = replace(fmt, scope="g128")
    for part, one in zip(parts, stored, strict=True):
        _check_rows(part, one, need, f"{where}: {part.name}", asked)
    only = parts[0]
    axis = len(need.shape) - (1 if need.kind == "vector" else 2)
    if len(parts) == 1 and isinstance(only.rows, slice) and not is_lazy(first):
        planes = _picked(first.format, first.planes, first.shape, axis, only.rows, fmt)
        return stored_tensor(need.shape, fmt, planes, where)
    pairs = list(zip(parts, stored, strict=True))
    finds = [find for one in stored if (find := rows_of(one))]

    def rows() -> BlockRows:
        """Gather the addresses of rows, a plane of their own."""
        found = [find() for find in finds]
        at = {"at": np.empty(need.shape[:-1], np.int64)}
        _gather(pairs, [{"at": each.at} for each in found], fmt, at, axis)
        return BlockRows(at["at"], tuple(array for each in found for array in each.arrays))

    in_place = rows if len(finds) == len(stored) else None
    make = partial(_gathered, pairs, fmt, need.shape, axis)
    return lazy_tensor(need.shape, fmt, make, where, in_place)


def _whole_blocks(parts: Sequence[Piece]) -> bool:
    """Return whether 128 x 128 blocks keep their rows."""
    rows = parts[0].rows
    if len(parts) == 1 and isinstance(rows, slice):
        return not (rows.start | rows.stop) % BLOCK
    return all(part.rows is None and part.places is None for part in parts)


def _check_rows(part: Piece, source: QuantTensor, need: Need, where: str, asked: str) -> None:
    axis = -1 if need.kind == "vector" else -2
    shape = source.shape
    stack = need.shape[:axis] if part.expert is None else need.shape[1:axis]
    rest = need.shape[len(need.shape) + axis + 1 :]
    count = shape[axis] if len(shape) >= -axis else 0
    places = len(range(need.shape[axis])[part.places or slice(None)])
    if part.rows is None:
        fits, rows = count == places, places
    elif isinstance(part.rows, slice):
        fits = part.rows.stop <= count and part.rows.stop - part.rows.start == places
        rows = part.rows.stop
    else:
        rows = int(part.rows.max()) + 1
        fits = rows <= count and len(part.rows) == places
    if not fits or shape[:axis] != stack or (rest and shape[-1] != rest[-1]):
        raise FormatError(
            f"{where} has shape {list(shape)}; {asked} {[*stack, rows, *rest]}, or more rows"
        )


def _gathered(
    pairs: Sequence[tuple[Piece, QuantTensor]], fmt: Format, shape: tuple[int, ...], axis: int
) -> Planes:
    if isinstance(fmt, Ternary):
        part, stored = pairs[0]
        return _picked(fmt, planes_of(stored), stored.shape, axis, part.rows, fmt)
    planes = {key: np.empty(p.shape, p.storage) for key, p in fmt.planes(shape).items()}
    _gather(pairs, (planes_of(stored) for _, stored in pairs), fmt, planes, axis)
    return planes


def _gather(
    pairs: Sequence[tuple[Piece, QuantTensor]],
    sources: Iterable[Planes],
    fmt: Format,
    to: Planes,
    axis: int,
) -> None:
    """Fill planes with rows of those of each part."""
    for (part, stored), source in zip(pairs, sources, strict=True):
        lead = axis - (part.expert is not None)
        picked = _picked(stored.format, source, stored.shape, lead, part.rows, fmt)
        for key, plane in to.items():
            target = plane if part.expert is None else plane[part.expert]
            place = (slice(None),) * lead + (part.places or slice(None),)
            if target.shape[lead : lead + 1] == (1,) and picked[key].shape == target.shape:
                target[...] = picked[key]
            else:
                target[place] = picked[key]


def _picked(
    fmt: Format, planes: Planes, shape: tuple[int, ...], lead: int, rows: Rows, target: Format
) -> dict[str, np.ndarray]:
    """Return the planes of some rows (of dimension `lead`) of a tensor, as `target` stores them."""
    count = shape[lead]
    chosen = slice(None) if rows is None else rows
    if isinstance(fmt, Ternary):
        return {**planes, "codes": pack(fmt.codes(planes, shape)[chosen] + np.int8(1))}
    found = {}
    blocks = isinstance(fmt, Fp8) and fmt.scope == "b128"
    for key, plane in planes.items():
        if key == "scales" and target != fmt:  # one for each row now
            if blocks:
                plane = np.repeat(plane, BLOCK, axis=lead)[(slice(None),) * lead + (slice(count),)]
            else:
                plane = np.broadcast_to(plane, (*shape[:lead], count))
        elif key == "scales" and blocks and isinstance(rows, slice):
            place = slice(rows.start // BLOCK, rows.stop // BLOCK)
            found[key] = plane[(slice(None),) * lead + (place,)]
            continue
        if plane.shape[: lead + 1] == (*shape[:lead], count):
            found[key] = plane[(slice(None),) * lead + (chosen,)]
        else:  # of the whole matrix, or of whole blocks
            found[key] = plane
    return found
