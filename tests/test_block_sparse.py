"""Block-sparse matrices: products, files, hostile files, and the converter."""

import json
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from commands import run_script
from hypothesis import given, settings
from hypothesis import strategies as st
from one_op import run
from op_cases import error
from sessions import make_session
from weight_files import LLAMA, mutants, resealed

from clocher_kernels.errors import FormatError, ModelError, UsageError
from clocher_kernels.formats import parse_format
from clocher_kernels.formats.bsr import INNERS, Bsr
from clocher_kernels.quant_tensor import QuantTensor, encode
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.checkpoints.iebin import IebinWriter
from clocher_runtime.convert.block_sparse import Sparsifying, prune, sparsify
from clocher_runtime.engine.load import load_model

script = partial(run_script, "convert_to_block_sparse")
NAME = "model.layers.0.self_attn.q_proj.weight"


def sparse(
    rng: np.random.Generator,
    shape: tuple[int, int],
    block: tuple[int, int],
    inner: str,
    density: float,
) -> QuantTensor:
    grid = -(-shape[0] // block[0]), -(-shape[1] // block[1])
    keep = np.kron(rng.random(grid) < density, np.ones(block, bool))[: shape[0], : shape[1]]
    values = rng.standard_normal(shape, dtype=np.float32) * keep
    return encode(values, Bsr.for_values(values, block, inner))


@settings(max_examples=80)
@given(
    st.tuples(st.integers(1, 70), st.integers(1, 150)),
    st.tuples(st.integers(1, 40), st.integers(1, 70)),
    st.sampled_from(INNERS),
    st.sampled_from([0.0, 0.1, 0.6, 1.0]),
    st.integers(1, 40),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_products_of_any_shape(
    shape: tuple[int, int],
    block: tuple[int, int],
    inner: str,
    density: float,
    tokens: int,
    tail: bool,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    w, (n, k) = sparse(rng, shape, block, inner, density), shape
    values = {"x": rng.standard_normal((tokens, k), dtype=np.float32), "w": w}
    if tail:
        values["bias"] = rng.standard_normal(n, dtype=np.float32)
        values["residual"] = rng.standard_normal((tokens, n), dtype=np.float32)
    sizes = {"M": tokens, "N": n, "K": k}
    got = {threads: run("bsr_linear", sizes, {}, values, threads)["y"] for threads in (0, 1, 3)}
    rms, largest = error(got[1], got[0])
    assert rms <= 2e-6 and largest <= 2e-5
    assert got[1].tobytes() == got[3].tobytes()
    last = {name: x[-1:] if name in ("x", "residual") else x for name, x in values.items()}
    alone = run("bsr_linear", {**sizes, "M": 1}, {}, last, 2)["y"]
    assert alone.tobytes() == got[1][-1:].tobytes()


def test_one_row_of_blocks_may_hold_all_of_them() -> None:
    rng = np.random.default_rng(4)
    values = np.zeros((200, 640), np.float32)
    values[64:128] = rng.standard_normal((64, 640))
    w = encode(values, Bsr.for_values(values, (64, 32)))
    given_values = {"x": rng.standard_normal((2, 640), dtype=np.float32), "w": w}
    got, expected = (
        run("bsr_linear", {"M": 2, "N": 200, "K": 640}, {}, given_values, threads)["y"]
        for threads in (4, 0)
    )
    assert error(got, expected)[0] <= 2e-6
    assert not got[:, :64].any() and not got[:, 128:].any()


def test_pruning_drops_the_weakest_blocks() -> None:
    values = np.array([[1, 1, 9, 0, 3], [1, 1, 0, 0, 3], [5, 0, 2, 2, 0]], np.float32)
    # Of the clipped blocks only what lies inside the matrix counts: RMS 1, 4.5, 3 / 3.5, 2, 0.
    got = prune(values, (2, 2), 0.5)
    np.testing.assert_array_equal(got, [[0, 0, 9, 0, 3], [0, 0, 0, 0, 3], [5, 0, 0, 0, 0]])
    np.testing.assert_array_equal(prune(values, (2, 2), 0.0), values)


def write_sparse(directory: Path, inner: str = "bf16") -> Path:
    """Write a small IEBIN model with block-sparse matrices."""
    directory.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(6)
    with IebinWriter(directory) as writer:
        writer.add("sparse", sparse(rng, (11, 13), (4, 3), inner, 0.5))
        writer.add("norm", encode(rng.standard_normal(3, np.float32), parse_format("f32")))
        writer.add("other", sparse(rng, (3, 64), (1, 16), "int4", 0.5))
        writer.commit({"model_type": "llama"}, {}, {}, None, {})
    return directory


@pytest.mark.parametrize("inner", INNERS)
def test_files_keep_every_bit(inner: str, tmp_path: Path) -> None:
    write_sparse(tmp_path, inner)
    checkpoint = open_checkpoint(tmp_path, verify=True)
    rng = np.random.default_rng(6)
    expected, got = sparse(rng, (11, 13), (4, 3), inner, 0.5), checkpoint.tensor("sparse")
    assert got.format == expected.format
    for name, plane in expected.planes.items():
        np.testing.assert_array_equal(got.planes[name], plane)


def test_mutants_of_the_json_are_refused_or_usable(tmp_path: Path) -> None:
    path = write_sparse(tmp_path) / "model.ie.json"
    document = json.loads(path.read_bytes())
    count = accepted = 0
    for mutant in islice(mutants({"tensors": document["tensors"]}), 0, None, 2):
        if not isinstance(mutant, dict):
            continue
        path.write_bytes(resealed({**document, "tensors": None} | mutant))
        count += 1
        try:
            checkpoint = open_checkpoint(tmp_path, verify=True)
        except ModelError:
            continue
        for name in checkpoint.names:
            checkpoint.tensor(name).decode()
        accepted += 1
    assert count > 500 and accepted < count / 10


@pytest.mark.parametrize(
    ("plane", "word", "value"),
    [
        ("row_ptr", 0, 1),
        ("row_ptr", 1, 2**31 - 1),
        ("row_ptr", 2, -1),
        ("row_ptr", 3, 10**6),
        ("col_idx", 0, -1),
        ("col_idx", 0, 5),
        ("col_idx", 1, 2**31 - 1),
    ],
)
def test_a_damaged_index_is_refused_before_it_is_used(
    plane: str, word: int, value: int, tmp_path: Path
) -> None:
    write_sparse(tmp_path)
    entry = json.loads((tmp_path / "model.ie.json").read_bytes())["tensors"][0]
    data = bytearray((tmp_path / "model.ie.bin").read_bytes())
    at = entry["planes"][plane]["offset"] + 4 * word
    data[at : at + 4] = value.to_bytes(4, "little", signed=True)
    (tmp_path / "model.ie.bin").write_bytes(data)
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(FormatError, match=r"tensor 'sparse': bsr_4x3_bf16: .*damaged"):
        checkpoint.tensor("sparse")


def test_a_small_file_cannot_stand_for_a_huge_matrix(tmp_path: Path) -> None:
    path = write_sparse(tmp_path) / "model.ie.json"
    document = json.loads(path.read_bytes())
    document["tensors"][0]["shape"][1] = 2**30
    path.write_bytes(resealed(document))
    with pytest.raises(FormatError, match="elements for each byte"):
        open_checkpoint(tmp_path)


def test_a_converted_model_computes_what_the_pruned_one_would(tmp_path: Path) -> None:
    how = Sparsifying(block=(16, 32), inner="f32", sparsity=0.7)
    outcomes = sparsify(LLAMA, tmp_path / "out", how)
    assert all(o.density == pytest.approx(0.3, abs=0.02) and not o.note for o in outcomes)
    checkpoint, dense = open_checkpoint(tmp_path / "out", verify=True), open_checkpoint(LLAMA)
    assert set(checkpoint.names) == set(dense.names)
    for outcome in outcomes:
        expected = prune(dense.tensor(outcome.name).decode(), (16, 32), 0.7)
        np.testing.assert_array_equal(checkpoint.tensor(outcome.name).decode(), expected)
    model = load_model(checkpoint)
    assert "bsr_16x32_f32" in model.precision
    ids = [1, 5, 900, 33, 78, 2000, 4, 17]
    logits = []
    for backend in ("cpu", "reference"):
        session = make_session(model, backend=backend, threads=2, chunk=5, all_logits=True)
        logits.append(session.logits(ids))
        session.close()
    assert error(*logits)[0] <= 2e-5


def test_what_would_grow_stays_dense_unless_forced(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="none of the 42 matrices would become smaller"):
        sparsify(LLAMA, tmp_path / "out", Sparsifying())
    assert list((tmp_path / "out").iterdir()) == []
    outcomes = sparsify(LLAMA, tmp_path / "out", Sparsifying(force=True))
    assert all(o.after > o.before and o.density == 1 and not o.note for o in outcomes)
    checkpoint = open_checkpoint(tmp_path / "out", verify=True)
    assert checkpoint.tensor(NAME).format.name == "bsr_32x32_bf16"


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"sparsity": 1.0}, "sparsity is 1.0"),
        ({"sparsity": float("nan")}, "sparsity is nan"),
        ({"inner": "f64"}, "f64"),
        ({"block": (0, 4)}, "expected 1 to 1024"),
        ({"pattern": "("}, "pattern"),
    ],
)
def test_settings_are_checked(settings_: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        how = Sparsifying(**settings_)  # type: ignore[arg-type]
        sparsify(LLAMA, Path("nowhere"), how)


def test_an_input_is_never_its_own_output(tmp_path: Path) -> None:
    write_sparse(tmp_path)
    with pytest.raises(UsageError, match="is the input"):
        sparsify(tmp_path, tmp_path, Sparsifying(pattern="norm"))
    with pytest.raises(UsageError, match="no float matrix"):
        sparsify(tmp_path, tmp_path / "out", Sparsifying())
    with pytest.raises(UsageError, match=r"config\.json"):
        sparsify(LLAMA, LLAMA, Sparsifying())


def test_the_script_reports_and_exits(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = script(
        "--model-dir", LLAMA, "--out-dir", out, "--sparsity", 0.5, "--inner", "int8", "--verify"
    )
    assert done.returncode == 0, done.stderr
    assert "bsr_32x32_int8" in done.stdout and "42 of 42 matrices" in done.stderr
    assert script("--model-dir", LLAMA, "--out-dir", out).returncode == 2
    assert script("--model-dir", tmp_path / "none", "--out-dir", out).returncode == 3
    assert script("--model-dir", LLAMA, "--out-dir", out, "--block", "3").returncode == 2
    open_checkpoint(out, verify=True)
