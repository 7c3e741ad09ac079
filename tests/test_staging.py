"""The compiled writer of a step's inputs against NumPy, on chains, trees and prompts."""

import random
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
from kernel_run import kernel_cache

from clocher_kernels.dtypes import STORAGE
from clocher_kernels.errors import ShapeError
from clocher_kernels.plan import ROW_INPUTS, TOKEN_INPUTS
from cpu_fallback.ops.staging import Stager

pytestmark = pytest.mark.usefixtures(kernel_cache.__name__)
M, R = 800, 80


class Draft(NamedTuple):
    """A tree of tokens; of each node its parent, -1 for those that follow the text."""

    tokens: Sequence[int] = ()
    parents: Sequence[int] = ()

    @property
    def is_chain(self) -> bool:
        return list(self.parents) == list(range(-1, len(self.parents) - 1))

    def depths(self) -> list[int]:
        found: list[int] = []
        for parent in self.parents:
            found.append(1 if parent < 0 else found[parent] + 1)
        return found

    def ancestors(self) -> list[int]:
        found: list[int] = []
        for node, parent in enumerate(self.parents):
            found.append(1 << node | (0 if parent < 0 else found[parent]))
        return found


def arrays() -> dict[str, np.ndarray]:
    made = {name: np.full(M, 9, STORAGE[kind]) for name, kind in TOKEN_INPUTS.items()}
    return made | {name: np.full(R, 9, STORAGE[kind]) for name, kind in ROW_INPUTS.items()}


def expected(into: dict[str, np.ndarray], ids: list[int], draft: Draft, record: tuple) -> None:
    start, count, drafted, row, rows, slot, cells, made, mask, top_k, seed, heat, top_p = record
    stop, end = start + count, start + count + drafted
    into["ids"][start:end] = ids
    into["slots"][start:end] = slot
    into["positions"][start:end] = np.arange(cells, cells + end - start)
    into["ends"][start:end] = into["positions"][start:end] + 1
    into["ancestors"][start:end] = 0
    if not draft.is_chain:
        into["positions"][stop:end] = cells + count - 1 + np.array(draft.depths())
        into["ends"][stop:end] = cells + count
        into["ancestors"][stop:end] = draft.ancestors()
    out = slice(row, row + rows)
    into["rows"][out] = np.arange(end - rows, end)
    into["masked"][out] = mask + np.arange(rows) if mask else 0
    settings = {"temperature": heat, "top_k": top_k, "top_p": top_p, "seeds": seed, "draws": made}
    for name, value in settings.items():
        into[name][out] = value
    if drafted:
        into["draws"][row + 1 : row + rows] += draft.depths()


def drafts() -> list[Draft]:
    rng = random.Random(3)
    trees = [[rng.randrange(-1, node) for node in range(n)] for n in (1, 2, 5, 7, 20, 63, 64)]
    shapes = [[], [-1], range(-1, 6), [-1, -1], [-1, 0, -1, 2], *trees]
    return [Draft([rng.randrange(1 << 20) for _ in shape], shape) for shape in shapes]


@pytest.mark.parametrize("count", [1, 3, 300])
def test_equals_numpy(count: int) -> None:
    rng = random.Random(count)
    for draft in drafts():
        found, wanted = arrays(), arrays()
        stager = Stager(found)
        drafted = len(draft.tokens)
        for start, row in ((0, 0), (count + drafted, 5)):
            if row + 1 + drafted > R:
                continue
            ids = [rng.randrange(1 << 20) for _ in range(count)] + list(draft.tokens)
            rest = (rng.randrange(8), rng.randrange(5000), rng.randrange(99), rng.choice((0, 4)))
            settings = (rng.randrange(50), rng.randrange(1 << 64), rng.random(), rng.random())
            record = (start, count, drafted, row, 1 + drafted, *rest, *settings)
            stager.write(ids, draft.parents, *record)
            expected(wanted, ids, draft, record)
        for name in found:
            assert (found[name] == wanted[name]).all(), name


@pytest.mark.parametrize("rows", [0, 40])
def test_pieces_of_prompts_and_scored_ones(rows: int) -> None:
    found, wanted = arrays(), arrays()
    record = (6, 40, 0, 3, rows, 1, 64, 0, 0, 0, 7, 0.0, 1.0)
    Stager(found).write(list(range(40)), (), *record)
    expected(wanted, list(range(40)), Draft(), record)
    for name in found:
        assert (found[name] == wanted[name]).all(), name


@pytest.mark.parametrize(
    ("ids", "record"),
    [
        ([1], (M, 1, 0, 0, 1)),
        ([1], (0, 1, 0, R, 1)),
        ([1] * (M + 1), (0, M + 1, 0, 0, 1)),
        ([1, 2], (0, 1, 0, 0, 1)),
        ([1], (-1, 1, 0, 0, 1)),
        ([1], (0, 1, 0, -1, 1)),
        ([1], (0, 1, 0, 0, 2)),
    ],
)
def test_what_has_no_room_is_refused(ids: list[int], record: tuple[int, ...]) -> None:
    found = arrays()
    with pytest.raises(ShapeError, match="room"):
        Stager(found).write(ids, (), *record, 0, 0, 0, 0, 0, 0, 0.0, 1.0)
    assert all((array == 9).all() for array in found.values())


def test_parents_that_come_later_are_none() -> None:
    found = arrays()
    record = (0, 1, 2, 0, 3, 0, 10, 0, 0, 0, 0, 0.0, 1.0)
    Stager(found).write([1, 2, 3], [1, 5], *record)
    assert found["ancestors"][1:3].tolist() == [1, 3]


def test_arrays_of_another_type_are_refused() -> None:
    wrong = arrays() | {"seeds": np.zeros(R, np.int32)}
    with pytest.raises(ShapeError, match="seeds"):
        Stager(wrong)
