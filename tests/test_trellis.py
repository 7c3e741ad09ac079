"""Rounding to trellises: against the format's reference, with GPTQ, and from the command line."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from calibration import make_plan, sequences
from test_quantize import VALID, error_of, run
from weight_files import LLAMA, write_first_layers
from weight_files import rng as rng_of

from clocher_kernels.errors import FormatError, UsageError
from clocher_kernels.formats import Float, Tcq
from clocher_kernels.quant_tensor import QuantTensor, encode
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.checkpoints.checkpoint import open_arrays
from clocher_runtime.convert import trellis
from clocher_runtime.convert.q4_map import parse_q4_map
from clocher_runtime.convert.rounding import look_up, round_tensor, row_pieces
from clocher_runtime.disk.kept import Kept
from clocher_runtime.quantize import calibrate
from clocher_runtime.quantize.alloc import TRELLISES, allocate
from clocher_runtime.quantize.calibration_text import make_text
from clocher_runtime.quantize.capture import Walk
from clocher_runtime.quantize.gptq import DAMP, InputStats, make_inputs, solve_matrix
from clocher_runtime.subcommands.quantize import quantize

N, K = 80, 256
FEW = ("--calib-text", VALID, "--samples", 4, "--seq-len", 64)


def normal(name: str, *shape: int) -> np.ndarray:
    return rng_of(name).standard_normal(shape).astype(np.float32)


def lost(values: np.ndarray, tensor: QuantTensor) -> float:
    return float(np.square(values - tensor.stored()).mean())


def same(one: QuantTensor, other: QuantTensor) -> bool:
    return all((plane == other.planes[key]).all() for key, plane in one.planes.items())


@pytest.mark.parametrize("bits", range(2, 6))
def test_it_is_as_good_as_the_reference(bits: int) -> None:
    values, fmt = normal("plain", N, K), Tcq(bits)
    reference = QuantTensor(values.shape, fmt, fmt.encode(values))
    order, upper = trellis.order_of(np.ones(K)), np.eye(K, dtype=np.float32)
    with_its_scales = trellis.solve(values, reference, order, upper)
    assert lost(values, with_its_scales) == pytest.approx(lost(values, reference), rel=0.03)
    assert 0.55 < lost(values, trellis.search(values, fmt)) / lost(values, reference) < 0.99


def test_strips_do_not_depend_on_others() -> None:
    values = normal("rows", N, K)
    values[3] = 0
    whole = trellis.search(values, Tcq(3))
    assert same(whole, trellis.search(values, Tcq(3), threads=3))
    assert not whole.stored()[3].any()
    for start, stop in ((0, 16), (32, 80), (64, 70)):
        part = trellis.search(values[start:stop], Tcq(3))
        strips = (stop - start) // 16 * 16
        assert (part.stored()[:strips] == whole.stored()[start : start + strips]).all()
        assert lost(values[start:stop], part) < 0.03
    values[1, 2] = np.nan
    with pytest.raises(FormatError, match=r"tcq3 cannot hold nan \(element \[1, 2\]\)"):
        trellis.search(values, Tcq(3))


def test_tensors_are_rounded_and_decoded_in_blocks() -> None:
    values, fmt = normal("stack", 2, 40, K), Tcq(3)
    stack = round_tensor(encode(values, Float("f32")), fmt, threads=2, rows=16)
    for expert in range(2):
        whole = round_tensor(encode(values[expert], Float("f32")), fmt)
        assert (look_up(stack, expert) == whole.decode()).all()
        assert np.square(whole.decode() - values[expert]).mean() < 0.03
    even = round_tensor(encode(normal("even", 96, K), Float("f32")), fmt)
    pieces = [piece.decode() for (piece,) in row_pieces(even, elements=20 * K)]
    assert len(pieces) == 3 and (np.concatenate(pieces) == even.decode()).all()


def make_stats(name: str) -> InputStats:
    """Return statistics of inputs of which few directions are large."""
    stats, mix = InputStats(K, hessian=True), normal(name, K, K) * np.arange(1, K + 1) ** -0.7
    for part in range(4):
        stats.add(normal(f"{name}{part}", 512, K) @ mix.T.astype(np.float32), np.arange(512) < 64)
    return stats


def test_gptq_lowers_the_error_of_outputs() -> None:
    values, stats, fmt = normal("gptq", N, K), make_stats("inputs"), Tcq(3)
    inputs = make_inputs(stats, None, hessian=True, turned=fmt.turned)
    assert inputs.factor is not None
    outcome = solve_matrix(values, fmt, "gptq", inputs, threads=2)
    assert outcome.fallback is None and outcome.nmse < 0.5 * outcome.nmse_rtn
    wrong = stats.held @ (values - outcome.tensor.decode()).T
    power = np.square(stats.held @ values.T).sum()
    assert np.square(wrong).sum() / power == pytest.approx(outcome.nmse, rel=1e-3)
    assert same(outcome.tensor, solve_matrix(values, fmt, "gptq", inputs).tensor)
    plain = solve_matrix(values, fmt, "gptq", inputs._replace(factor=None))
    assert plain.fallback == "rtn:no_hessian"
    assert same(plain.tensor, round_tensor(encode(values, Float("f32")), fmt))


def test_the_summed_errors_are_the_loss() -> None:
    values, stats = normal("loss", N, K), make_stats("inputs")
    inputs = make_inputs(stats, None, hessian=True, turned=64)
    hessian = np.empty((K, K))  # what the factor says
    order, upper, damp = inputs.factor
    assert damp == DAMP and sorted(order) == list(range(K))
    inverse = upper.T.astype(np.float64) @ upper
    hessian[np.ix_(order, order)] = np.linalg.inv(inverse)
    grid = trellis.search(values, Tcq(4))
    work = trellis._Work(values, grid, order, 1)
    errors = work.rounded(grid.planes["scales"], upper)[1][:, :N]
    wrong = values - trellis.solve(values, grid, order, upper).stored()
    loss = np.einsum("ij,jk,ik->", wrong, hessian, wrong)
    assert np.square(errors, dtype=np.float64).sum() == pytest.approx(loss, rel=1e-3)


def test_calibration_in_blocks_of_rows_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, name = open_checkpoint(LLAMA), "model.layers.0.mlp.up_proj.weight"
    rule = {"pattern": name.replace(".", r"\."), "dtype": "tcq3", "method": "gptq"}
    wanted = {name: make_plan(checkpoint, rule).tensors[name]}
    found = []
    for elements in (1 << 25, 1 << 13):
        monkeypatch.setattr(calibrate, "_BLOCK_ELEMENTS", elements)
        walk = Walk(checkpoint, make_text(sequences(checkpoint, 4, 64)), 1)
        job = calibrate.LayerJob(walk, wanted, 1, 0)
        walk.layer(0, job)
        found.append(job.finish()[name])
    assert same(*found)


BAD_FLAGS = [
    (("--bits", 6), "--bits 6: expected 4 or 8 (integers), 2, 3 or 5 (trellises), or a fraction"),
    (("--bits", 2.1), "--bits 2.1: expected 4 or 8"),
    (("--bits", 3.4), "give --calib-text FILE, or a whole number such as 3"),
    (("--bits", 3.4, "--target-bpw", 3), "--bits 3.4 is a target already: leave --target-bpw out"),
    (("--bits", 3, "--target-bpw", 4.5), "--bits 3 is a target already: leave --target-bpw out"),
    (("--bits", 3, "--format", "tcq4"), "--format tcq4 and --bits 3 contradict each other"),
    (("--format", "tcq3", "--group", 32), "tcq3 has no groups to choose"),
    (("--format", "tcq3", "--affine"), "tcq3 is symmetric"),
    (("--format", "tcq3", "--scale-dtype", "f16"), "the scales of tcq3 are bytes"),
    (("--format", "tcq3", "--mse"), "clip is for int4 and int8, not for tcq3"),
    (("--format", "tcq3", "--method", "imx"), "give it the method gptq or rtn"),
]


@pytest.mark.parametrize(("flags", "message"), BAD_FLAGS)
def test_flags_that_contradict(
    flags: tuple[object, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(quantize, LLAMA, tmp_path / "out", *flags) == 2
    assert message in error_of(capsys, "quantize")


def test_other_numbers_of_columns_stay() -> None:
    arrays = {"a.weight": np.ones((4, 96), np.float32), "b.weight": np.ones((4, 64), np.float32)}
    plan = make_plan(open_arrays(arrays, "arrays"), {"pattern": ".*", "dtype": "tcq2"})
    assert list(plan.tensors) == ["b.weight"]
    assert plan.kept == {"a.weight": "columns are no multiple of 64"}
    assert "kept matrices: 1, such as a.weight [4, 96]: tcq2 needs" in plan.notes[0]
    with pytest.raises(UsageError, match="give it the method gptq or rtn"):
        rules = [{"pattern": ".*", "dtype": "tcq2", "method": "imx"}]
        parse_q4_map({"version": 1, "rules": rules}, Path("q4.json"))


def test_from_a_checkpoint_to_a_model_that_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = write_first_layers(LLAMA, tmp_path / "m", 2), tmp_path / "out"
    assert run(quantize, source, out, "--bits", 3, *FEW, "--verify") == 0
    tensors = json.loads((out / "q4_manifest.json").read_bytes())["tensors"]
    formats = {tensor["name"]: tensor["format"] for tensor in tensors}
    assert formats.pop("model.embed_tokens.weight") == "tcq4"
    assert set(formats.values()) <= {"tcq3", "tcq4"} and len(formats) >= 14
    found = open_checkpoint(out, verify=True)
    walks = [Walk(open_checkpoint(path), make_text([range(64)] * 2)) for path in (source, out)]
    for walk in walks:
        for layer in range(walk.spec.num_layers):
            walk.layer(layer)
            walk.advance()
    states = [walk.state[slice(0, 64)] for walk in walks]
    assert np.corrcoef(*(state.reshape(-1) for state in states))[0, 1] > 0.9
    assert found.nbytes < open_checkpoint(source).nbytes / 4


def test_a_fraction_spreads_bits() -> None:
    checkpoint = open_checkpoint(LLAMA)
    rule = {"pattern": r".*layers\.5\..*_proj.*", "dtype": "tcq3", "method": "gptq"}
    text = sequences(checkpoint, 4, 64)
    plan, record = allocate(
        checkpoint,
        make_plan(checkpoint, rule),
        text,
        target_bpw=3.4,
        kept=Kept(None, {}),
        threads=2,
    )
    assert 3.2 < plan.size["quantised_bpw"] <= 3.4
    assert {tensor.format.name for tensor in plan.tensors.values()} > {"tcq3"}
    harms = [list(unit["candidates"].values()) for unit in record["units"]]
    assert all(len(row) == len(TRELLISES) for row in harms)
    assert all(a["harm"] > 2 * b["harm"] for row in harms for a, b in pairwise(row))
