"""Prepacking: which weights, in which memory, and what happens to the pages they came from."""

import gc
import mmap
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from sessions import make_session

from clocher_kernels.errors import UsageError
from clocher_kernels.formats import Float, parse_format
from clocher_kernels.ops.contract import has_codes
from clocher_kernels.quant_tensor import QuantTensor, encode
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.checkpoints.locate import embedded_model
from clocher_runtime.command.loading import without_effect
from clocher_runtime.config.commands import resolve
from clocher_runtime.engine.load import Model, load_model
from clocher_runtime.engine.session import Session
from clocher_runtime.models.inventory import EMBED, HEAD, SCOPES, in_scope
from cpu_fallback import executor
from cpu_fallback.executor import in_large_pages
from cpu_fallback.team.large_pages import allocate, give_back, is_mapped

DATA = Path(__file__).parent / "data"
LLAMA, BITNET = DATA / "clocher-tiny-llama", DATA / "clocher-tiny-bitnet"
MIB = 1 << 20


@cache
def model_of(path: Path, precision: str | None = None) -> Model:
    return load_model(open_checkpoint(path), precision)


def session_of(model: Model, **more) -> Session:
    return make_session(model, context=32, chunk=8, **more)


def integer_weights(session: Session) -> set[str]:
    calls = session.executor.plan.calls
    return {call.args["w"] for call in calls if has_codes(call)}


@pytest.mark.parametrize("scope", [None, *SCOPES])
def test_which_products_become_integer_ones(scope: str | None) -> None:
    model = model_of(embedded_model())
    session = session_of(model, pretranspose=scope)
    experts = {name for name in model.formats if ".experts." in name}
    assert experts and integer_weights(session) == (set() if scope in ("none", "woh") else experts)
    assert session.act_prec == ("fp32" if scope in ("none", "woh") else "int8")
    assert "pretranspose" in session.acted_on
    session.close()


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("tied", [False, True])
def test_what_a_scope_holds(scope: str, tied: bool) -> None:
    spec = replace(model_of(embedded_model()).spec, tied=tied)
    names, blocks = in_scope(spec, scope), in_scope(spec, "wxh")
    assert (
        names
        == {
            "none": set(),
            "woh": {EMBED if tied else HEAD},
            "wxh": blocks,
            "all": {EMBED if tied else HEAD} | blocks,
        }[scope]
    )
    layers = {name.split(".")[2] for name in blocks}
    assert len(layers) == spec.num_layers and all(name.startswith("model.l") for name in blocks)
    assert "model.layers.0.mlp.router.weight" in blocks
    assert "model.layers.0.input_layernorm.weight" not in blocks


def test_a_head_that_is_the_embedding_too() -> None:
    """The table is read in place, the head from tiles, and both are the same weight."""
    model = model_of(LLAMA)
    spec, table = replace(model.spec, tied=True), model.weights[EMBED]
    assert isinstance(table, QuantTensor)
    weights = {name: w for name, w in model.weights.items() if name != HEAD}
    weights[EMBED] = encode(table.decode(), parse_format("int8_row_f32"))
    model = replace(model, spec=spec, weights=weights)
    logits = []
    for scope in ("woh", "none"):
        session = session_of(model, pretranspose=scope, all_logits=True)
        assert integer_weights(session) == ({EMBED} if scope == "woh" else set())
        logits.append(session.logits([1, 2, 3]))
        session.close()
    assert 0 < np.abs(logits[0] - logits[1]).max() < 0.05 * np.abs(logits[1]).max()


def test_ternary_weights_are_packed_in_any_case() -> None:
    model = model_of(BITNET)
    session = session_of(model, pretranspose="none")
    assert session.act_prec == "int8" and "pretranspose" not in session.acted_on
    config = resolve({"pretranspose": "none"}, {})
    assert config.unmet(without_effect(session.acted_on)) == ("--pretranspose=none",)
    assert config.unmet(without_effect({"pretranspose"})) == ()
    session.close()


def test_a_scope_that_is_none() -> None:
    with pytest.raises(UsageError, match="pretranspose: got 'yes', expected one of none, woh"):
        session_of(model_of(LLAMA), pretranspose="yes")


@pytest.fixture
def mapped(tmp_path: Path) -> Callable[[int], np.ndarray]:
    """Return a function that returns a mapped file of that many random bytes."""

    def make(nbytes: int, access: int = mmap.ACCESS_READ) -> np.ndarray:
        path = tmp_path / "weights"
        path.write_bytes(np.random.default_rng(nbytes).bytes(nbytes))
        with open(path, "r+b") as file:
            return np.frombuffer(mmap.mmap(file.fileno(), nbytes, access=access), np.uint8)

    return make


def resident(array: np.ndarray) -> int:
    """Return the resident bytes of the mapping of an array."""
    address, inside = array.ctypes.data, False
    for line in Path("/proc/self/smaps").read_text(encoding="ascii").splitlines():
        first = line.split()[0]
        if not first.endswith(":"):
            start, _, end = first.partition("-")
            inside = int(start, 16) <= address < int(end, 16)
        elif inside and first == "Rss:":
            return int(line.split()[1]) << 10
    raise AssertionError("no such mapping")


@pytest.mark.parametrize("start", [0, 1, mmap.PAGESIZE, mmap.PAGESIZE + 64])
def test_only_whole_pages_are_given_back(mapped, start: int) -> None:
    whole = mapped(4 * MIB)
    expected = whole.tobytes()
    view = whole[start : 3 * MIB + 100]
    assert resident(whole) == 4 * MIB
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    assert give_back(view) == 3 * MIB - first
    assert resident(whole) <= MIB + first
    assert whole.tobytes() == expected
    assert give_back(whole[start : start + 100]) == 0


def test_views_of_views_are_known() -> None:
    with open(__file__, "rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    whole = np.frombuffer(memory, np.uint8)
    assert is_mapped(whole[8:4096].view(np.uint16).reshape(4, -1)[1:])
    assert not is_mapped(whole[::2])
    assert not is_mapped(whole.copy())


@pytest.mark.parametrize("access", [mmap.ACCESS_COPY, mmap.ACCESS_WRITE])
def test_pages_that_hold_the_only_copy_are_kept(mapped, access: int) -> None:
    private = mapped(2 * MIB, access)
    private[:] = 7
    assert give_back(private) == 0 and (private == 7).all()
    anonymous = allocate(4 * MIB)
    anonymous[:] = 9
    assert give_back(anonymous) == 0 and (anonymous == 9).all()


def test_float_weights_are_copied_once(mapped) -> None:
    whole = mapped(6 * MIB)
    data = whole.view(np.uint16).reshape(1024, 3072)
    tensor = QuantTensor((1024, 3072), Float("bf16"), {"data": data})
    copy = in_large_pages(tensor).planes["data"]
    assert resident(whole) < MIB
    assert not is_mapped(copy) and copy.ctypes.data % (2 * MIB) == 0
    np.testing.assert_array_equal(copy, data)
    again = QuantTensor((1024, 3072), Float("bf16"), {"data": data})
    assert in_large_pages(again).planes["data"] is copy
    before = len(executor._copies)
    del tensor, again, data
    gc.collect()
    assert len(executor._copies) == before - 1


def test_small_weights_and_those_in_memory_stay(mapped) -> None:
    tiny = QuantTensor((1, 64), Float("bf16"), {"data": mapped(128).view(np.uint16).reshape(1, 64)})
    assert in_large_pages(tiny).planes["data"] is tiny.planes["data"]
    held = QuantTensor((1, MIB), Float("f32"), {"data": np.zeros((1, MIB), np.float32)})
    assert in_large_pages(held).planes["data"] is held.planes["data"]


@pytest.mark.parametrize("scope", SCOPES)
def test_copies_change_no_bit(scope: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "_is_worth_it", is_mapped)  # tiny weights too
    logits = []
    for pretranspose in (None, scope):
        session = session_of(model_of(LLAMA), all_logits=True, pretranspose=pretranspose)
        logits.append(session.logits([1, 2, 3, 4, 5]))
        session.close()
    np.testing.assert_array_equal(*logits)


def test_packing_shows_its_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "_MANY_BYTES", 1)
    told: list[tuple[int, int]] = []
    model = load_model(open_checkpoint(embedded_model()))
    for _ in range(2):
        session = session_of(model, packing=lambda done, total: told.append((done, total)))
        session.close()
        first = len(told)
    assert told and told == sorted(told) and told[-1][0] == told[-1][1]
    assert len(told) == first  # the second session found all of them packed
