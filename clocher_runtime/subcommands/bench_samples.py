"""Result files of benches as `clocher bench compare` reads them: ours, and those of llama-bench."""

from pathlib import Path
from typing import Annotated

import msgspec

from clocher_kernels.errors import FormatError
from clocher_runtime.disk.files import read_bytes
from clocher_runtime.disk.schema import read_as
from clocher_runtime.disk.strict_json import parse_json
from clocher_runtime.quality.speed import Case

_MOST_BYTES = 16 << 20

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 24)]
_Rate = Annotated[float, msgspec.Meta(gt=0, le=1e12)]

Key = tuple[Case, int]
"""A test and its threads."""


class Samples(msgspec.Struct, frozen=True):
    """What is compared of a row; the keys are llama-bench's, but for n_seqs."""

    n_prompt: _Count
    n_gen: _Count
    n_threads: _Count
    samples_ts: Annotated[list[_Rate], msgspec.Meta(min_length=1, max_length=10_000)]
    n_depth: _Count = 0
    n_seqs: _Count = 1
    cpu_info: Annotated[str, msgspec.Meta(max_length=256)] = ""
    model_filename: Annotated[str, msgspec.Meta(max_length=4096)] = ""

    @property
    def case(self) -> Case:
        """Its test."""
        return Case(self.n_prompt, self.n_gen, self.n_depth, self.n_seqs)

    @property
    def name(self) -> str:
        """What its test is called."""
        return self.case.name


def read_samples(path: Path) -> dict[Key, Samples]:
    """Return the rows of a result file.

    Raises:
        FormatError: it is no result file, or has two rows of the same test, threads and batch.
        ModelNotFound: there is no such file.
    """
    data = read_bytes(path, _MOST_BYTES)
    where = str(path)
    if data.lstrip()[:1] == b"[":
        values = read_as(parse_json(data, where), list[Samples], where)
    else:
        lines = [line for line in data.splitlines() if line.strip()]
        values = [
            read_as(parse_json(line, f"{where}:{number}"), Samples, f"{where}:{number}")
            for number, line in enumerate(lines, 1)
        ]
    found: dict[Key, Samples] = {}
    for row in values:
        key = row.case, row.n_threads
        if key in found:
            raise FormatError(
                f"{where}: two rows of {row.name} with {row.n_threads} threads; expected one"
            )
        found[key] = row
    if not found:
        raise FormatError(f"{where}: no rows; expected what clocher bench -o json writes")
    return found
