"""The tables of tiles: what they may say, that kernels follow them, and how they are made."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda_cases import meta, meta_device

from clocher_kernels.cuda import tile_tables, tune
from clocher_kernels.cuda.launch import INTERPRETER, Launch
from clocher_kernels.cuda.linear import linear
from clocher_kernels.cuda.prepack import rearrange
from clocher_kernels.cuda.tensors import TORCH_DTYPES, DeviceTensor
from clocher_kernels.cuda.tile_tables import TOKENS, VARIABLE, key_of, load, parse, tuned
from clocher_kernels.cuda.workbench import Workbench, random_copies
from clocher_kernels.errors import UsageError
from clocher_kernels.formats import parse_format
from clocher_runtime import cli
from clocher_runtime.engine import backends

N, K = 512, 2048
INT4, INT8 = "int4_sym_g128_f16", "int8_row_f32"


def _entry(order: str, value: int, rows: str, *counts: int) -> dict[str, Any]:
    tiles = {str(m): {order: value, rows: r} for m, r in zip(TOKENS, counts, strict=True)}
    return {"tiles": tiles, "gain": 1.2}


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
    tile_tables._users.cache_clear()


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
    assert tuned(key_of(fmt, 2 * N, K), 1, 90) is None
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


def test_the_shipped_tables_are_sound() -> None:
    folder = Path(tile_tables.__file__).parent
    paths = sorted(folder.glob("*.json"))
    assert [path.name for path in paths] == ["sm_90.json"]
    for path in paths:
        assert path.name == f"sm_{tile_tables.load(path).capability}.json"
        note = json.loads(path.read_text())["note"]
        assert tile_tables.load(path).tiles or "never" in note or "No tile was ever timed" in note


KEY = f"{INT4}/{N}x{K}"
GOOD = _entry("vectors", 64, "rows_of_lane", 2, 2, 2, 1)


def _changed(m: str, **fields: Any) -> dict[str, Any]:
    return {"tiles": {**GOOD["tiles"], m: {**GOOD["tiles"][m], **fields}}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"schema": 2}, "schema is 2; expected 1", id="schema"),
        pytest.param({"capability": "90"}, "capability is '90'", id="capability"),
        pytest.param({"dry": True}, "dry run", id="dry"),
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
        parse(json.dumps(_table(**changes)), "own.json")


@pytest.mark.parametrize("text", ["", "{", "[]", '"a"', "[" * 100_000])
def test_what_is_no_table_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"own\.json: "):
        parse(text, "own.json")


def test_a_sound_table_is_read() -> None:
    read = parse(json.dumps(_table()), "own.json")
    assert read.capability == 90 and len(read.tiles) == 3
    assert read.tiles[KEY][4] == {"vectors": 64, "rows_of_lane": 4}


@pytest.mark.parametrize(("fmt", "order"), [(INT4, 64), (INT8, 2)])
def test_what_the_tuner_finds_is_a_table(
    fmt: str, order: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Workbench(INTERPRETER, SimpleNamespace(dry=False), 1, torch.Generator())

    def race(bench: Workbench, weight: tune.Weight, m: int, kind: tune.Kind, choices: Any) -> Any:
        """Say that each further row makes a tile faster, up to four."""
        times = {(first, rows): 9.0 - min(rows, 4) + (first != order) for first, rows in choices}
        return {None: 8.0, **times}

    monkeypatch.setattr(tune, "race", race)
    table: dict[str, Any] = {"schema": 1, "capability": 90, "tiles": {}}
    found = tune.add(table, bench, (fmt, N, K))
    read = parse(json.dumps(table), "made").tiles[key_of(fmt, N, K)]
    assert {tile[tile_tables.fields_of(fmt)[0]] for tile in read.values()} == {order}
    assert found["gain"] == 1.6


def test_a_weight_whose_tile_fails_for_more_tokens_gets_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Workbench(INTERPRETER, SimpleNamespace(dry=False), 1, torch.Generator())
    monkeypatch.setattr(
        tune, "race", lambda b, w, m, kind, choices: {None: 2.0} | ({(64, 2): 1.0} if m < 8 else {})
    )
    assert tune.tune(bench, INT4, N, K) == {}


@pytest.mark.usefixtures("table")
def test_the_tuner_does_not_follow_the_table_that_it_makes() -> None:
    key = f"{INT4}/{N}x{K}"
    with tile_tables.users_table_aside():
        assert tuned(key, 1, 90) is None
    assert tuned(key, 1, 90) is not None


def test_a_run_that_tunes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, int, int]] = []

    def tune_tiles(weights: Any, progress: Any) -> dict[str, Any]:
        asked.extend(weights)
        progress(1, 1)
        return _table()

    path = tmp_path / "made.json"
    monkeypatch.setenv(VARIABLE, str(path))
    monkeypatch.setattr(backends, "require_gpu", lambda purpose: None)
    monkeypatch.setattr(backends, "gpu", lambda: {"name": "none"})
    monkeypatch.setattr(backends, "tune_tiles", tune_tiles)
    assert cli.main(["--tune"]) == 0
    line = json.loads(capsys.readouterr().out)
    assert line["status"] == "tuned" and line["table"] == str(path)
    assert line["faster"] == 3 and line["weights"] == len(asked) == len(set(asked)) > 0
    assert all(fmt == "bf16" for fmt, _, _ in asked)
    assert load(path).capability == 90
    assert [file.name for file in tmp_path.iterdir()] == ["made.json"]


def test_weights_are_complete_before_a_kernel_may_read_them() -> None:
    """Kernels that start early do not wait for what wrote the weights."""
    waited: list[int] = []
    timer = SimpleNamespace(dry=True, synchronize=lambda: waited.append(1))
    bench = Workbench(INTERPRETER, timer, 1, torch.Generator())
    made = random_copies(parse_format(INT4), (4, 128), bench)
    assert len(made) == len(waited) == 1
