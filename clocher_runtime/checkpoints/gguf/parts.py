"""Find a GGUF model: one file, or the parts that llama-gguf-split makes of one.

Parts are named `NAME-00001-of-00003.gguf`. Source: llama.cpp's gguf-split.cpp and
llama-model-loader.cpp.
"""

import os
import re
from pathlib import Path

from clocher_kernels.errors import FormatError, ModelNotFound
from clocher_runtime.checkpoints.gguf.file import MAX_TENSORS, GgufFile, Value

SUFFIX = ".gguf"
MAX_PARTS = 1024
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE | re.DOTALL)
_NO, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"
_SHOWN = 3


def find_gguf(path: Path) -> Path | None:
    """Return the path of a GGUF file (its first part), or of the only model in a directory."""
    if not os.path.isdir(path):
        return path if path.suffix.lower() == SUFFIX else None
    try:
        found = sorted(name for name in os.listdir(path) if name.lower().endswith(SUFFIX))
    except OSError as error:
        raise ModelNotFound(f"{path}: cannot be listed: {error.strerror}") from None
    if len({_set_of(name) for name in found}) > 1:
        raise ModelNotFound(
            f"{path}: {len(found)} GGUF files ({', '.join(found[:_SHOWN])}); name one of them"
        )
    return path / found[0] if found else None


def open_file(path: Path) -> GgufFile:
    """Open a file, and all other parts if it is one of several."""
    named = GgufFile(path)
    count = named.integer(_COUNT, 1)
    if count <= 1:
        return named
    match = _PART.fullmatch(path.name)
    if match is None or int(match[3]) != count or count > MAX_PARTS:
        raise FormatError(
            f"{path}: {_COUNT} says that it is one of {count} parts; expected at most {MAX_PARTS} "
            f"and a name like NAME-00001-of-{count:05}{SUFFIX}, which the others follow from"
        )
    paths = [
        path.with_name(f"{match[1]}-{no:05}-of-{match[3]}{match[4]}") for no in range(1, count + 1)
    ]
    if missing := [part.name for part in paths if not os.path.isfile(part)]:
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        raise ModelNotFound(
            f"{path}: {len(missing)} of {count} parts are missing: "
            f"{', '.join(missing[:_SHOWN])}{more}; put all of them in {path.parent}"
        )
    return _joined([named if part == path else GgufFile(part) for part in paths])


def _set_of(name: str) -> tuple[str, ...]:
    match = _PART.fullmatch(name)
    return (match[1], match[3], match[4]) if match else (name,)


def _joined(parts: list[GgufFile]) -> GgufFile:
    first = parts[0]
    total = first.integer(_TENSORS)
    for no, part in enumerate(parts):
        for key, expected in ((_NO, no), (_COUNT, len(parts))):
            if (got := part.integer(key)) != expected:
                raise FormatError(
                    f"{part.file.path}: {key} is {got}; expected {expected}, as its name says"
                )
        for key in part.keys:
            if key != _NO and not _agree(first.value(key), part.value(key)):
                raise FormatError(
                    f"{part.file.path}: metadata {key!r} is {part.value(key)!r:.60}, in "
                    f"{first.file.path.name} {first.value(key)!r:.60}: parts of two models?"
                )
        if no:
            first.attach(part)
    if len(first.tensors) != total or total > MAX_TENSORS:
        raise FormatError(
            f"{first.file.path}: {len(first.tensors)} tensors in {len(parts)} parts; {_TENSORS} "
            f"says {total}, and the limit is {MAX_TENSORS}"
        )
    return first


def _agree(ours: Value | None, theirs: Value | None) -> bool:
    """Return whether two values agree; arrays, and what the first part lacks, count as equal."""
    return not isinstance(ours, str | int | float) or ours == theirs
