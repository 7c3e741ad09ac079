"""The table of tiles: what it may say, and that kernels follow it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_cases import meta, meta_device

from clocher_kernels.cuda import tiles
from clocher_kernels.cuda.launch import INTERPRETER, Launch
from clocher_kernels.cuda.linear import linear
from clocher_kernels.cuda.prepack import rearrange
from clocher_kernels.cuda.tensors import TORCH_DTYPES, DeviceTensor
from clocher_kernels.cuda.tiles import TOKENS, VARIABLE, parse, tuned
from clocher_kernels.errors import UsageError
from clocher_kernels.formats import parse_format

N, K = 512, 2048
INT4, INT8 = "int4_sym_g128_f16", "int8_row_f32"


def _entry(order: str, value: int, rows: str, *counts: int) -> dict[str, Any]:
    tiles = {str(m): {order: value, rows: r} for m, r in zip(TOKENS, counts, strict=True)}
    return {"tiles": tiles}


def _table(**changes: Any) -> dict[str, Any]:
    tiles = {
        f"{INT4}/{N}x{K}": _entry("vectors", 64, "rows_of_lane", 2, 2, 4, 1),
        f"ternary/{N}x{K}": _entry("vectors", 32, "rows_of_lane", 4, 4, 4, 2),
        f"{INT8}/{N}x{K}": _entry("warps", 2, "rows", 8, 4, 2, 1),
    }
    return {"schema": 1, "capability": 90, "tiles": tiles} | changes


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "own.json"
    path.write_text(json.dumps(_table()))
    monkeypatch.setenv(VARIABLE, str(path))
    yield path
    tiles._users.cache_clear()


def _launch(fmt: str, m: int, capability: int = 90, n: int = N) -> Launch:
    made = parse_format(fmt)
    shapes = {name: (p.shape, TORCH_DTYPES[p.dtype]) for name, p in made.planes((n, K)).items()}
    planes = {name: meta(*shape) for name, shape in shapes.items()}
    w: DeviceTensor = rearrange(made, (n, K), planes)
    y, device = meta((m, n), torch.float16), meta_device(capability)
    if fmt == "ternary":
        x, scale = meta((m, K), torch.int8), meta((m, 1), torch.float32)
        (launch,) = linear(x=x, x_scale=scale, w=w, y=y, device=device)
    else:
        (launch,) = linear(x=meta((m, K), torch.float16), w=w, y=y, device=device)
    return launch


@pytest.mark.parametrize("m", range(1, 9))
@pytest.mark.usefixtures("table")
def test_kernels_follow_the_table(m: int) -> None:
    nth = next(i for i, count in enumerate(TOKENS) if count >= m)
    int4 = _launch(INT4, m)
    assert (int4.constants["BV"], int4.constants["R"]) == (64, (2, 2, 4, 1)[nth])
    assert int4.num_warps == 2 and int4.constants["L"] == 64
    ternary = _launch("ternary", m)
    assert (ternary.constants["BV"], ternary.constants["R"]) == (32, (4, 4, 4, 2)[nth])
    int8 = _launch(INT8, m)
    assert (int8.num_warps, int8.constants["ROWS"]) == (2, (8, 4, 2, 1)[nth])
    assert int8.grid == (N // (8, 4, 2, 1)[nth],)


@pytest.mark.parametrize("fmt", [INT4, INT8, "ternary"])
@pytest.mark.usefixtures("table")
def test_other_shapes_keep_the_formula(fmt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tuned(f"{fmt}/{2 * N}x{K}", 1, 90) is None
    beside = _launch(fmt, 1, n=2 * N)
    monkeypatch.delenv(VARIABLE)
    assert beside.constants == _launch(fmt, 1, n=2 * N).constants


@pytest.mark.usefixtures("table")
def test_the_interpreter_has_no_table() -> None:
    assert tuned(f"{INT4}/{N}x{K}", 1, INTERPRETER.capability) is None


@pytest.mark.usefixtures("table")
def test_a_table_of_another_architecture_is_refused() -> None:
    with pytest.raises(UsageError, match=r"CLOCHER_TILE_TABLE: .*sm_90, this GPU is sm_80"):
        _launch(INT4, 1, capability=80)


def test_a_table_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "none.json"))
    with pytest.raises(UsageError, match=r"CLOCHER_TILE_TABLE: .*none\.json.*No such file"):
        _launch(INT4, 1)


KEY = f"{INT4}/{N}x{K}"
GOOD = _entry("vectors", 64, "rows_of_lane", 2, 2, 2, 1)


def _changed(m: str, **fields: Any) -> dict[str, Any]:
    return {"tiles": {**GOOD["tiles"], m: {**GOOD["tiles"][m], **fields}}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"schema": 2}, "schema is 2; expected 1", id="schema"),
        pytest.param({"capability": "90"}, "capability is '90'", id="capability"),
        pytest.param({"tiles": []}, "no object 'tiles'", id="no-tiles"),
        pytest.param({"tiles": {"int4_sym_g128_f16/0x8": GOOD}}, "FORMAT/NxK", id="key"),
        pytest.param({"tiles": {"int5/8x8": GOOD}}, "int5", id="format"),
        pytest.param({"tiles": {KEY: []}}, "'tiles' for 1, 2, 4, 8 tokens", id="entry"),
        pytest.param(
            {"tiles": {KEY: {"tiles": {"1": GOOD["tiles"]["1"]}}}}, "1, 2, 4, 8", id="tokens"
        ),
        pytest.param({"tiles": {f"{INT8}/8x8": GOOD}}, "fields warps and rows", id="kind"),
        pytest.param(
            {"tiles": {KEY: _changed("2", warps=1)}}, "2 tokens: expected the fields", id="more"
        ),
        pytest.param({"tiles": {KEY: _changed("4", rows_of_lane=3)}}, "is 3", id="not-a-power"),
        pytest.param({"tiles": {KEY: _changed("4", rows_of_lane=True)}}, "is True", id="bool"),
        pytest.param({"tiles": {KEY: _changed("8", rows_of_lane=4096)}}, "is 4096", id="huge"),
        pytest.param(
            {"tiles": {KEY: _changed("8", vectors=32)}}, "would depend on its batch", id="order"
        ),
    ],
)
def test_what_breaks_a_table_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse(json.dumps(_table(**changes)).encode(), "own.json")


@pytest.mark.parametrize("text", ["", "{", "[]", '"a"', "[" * 100_000])
def test_what_is_no_table_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"own\.json: "):
        parse(text.encode(), "own.json")


def test_a_sound_table_is_read() -> None:
    capability, tiles = parse(json.dumps(_table()).encode(), "own.json")
    assert capability == 90 and len(tiles) == 3
    assert tiles[KEY][4] == {"vectors": 64, "rows_of_lane": 4}
