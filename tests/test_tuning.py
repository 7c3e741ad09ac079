"""Tuned factors of rows: their gradients, what they gain, and where they are written."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from calibration import make_plan, sequences
from random_models import make
from weight_files import LLAMA, write_first_layers

from clocher_kernels.dtypes import to_f32
from clocher_kernels.formats import Float, Tcq
from clocher_kernels.quant_tensor import QuantTensor, encode
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.convert.q4_map import Q4Map, load_q4_map, parse_q4_map
from clocher_runtime.convert.rounding import NO_CLIP, round_tensor
from clocher_runtime.quantize import job, tuning
from clocher_runtime.quantize.calibration_text import make_text
from clocher_runtime.quantize.capture import Walk

PARTS = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj")


def rounded(checkpoint, bits: int) -> dict[str, QuantTensor]:
    """Return the matrices of the blocks, rounded to trellises."""
    return {
        name: round_tensor(checkpoint.tensor(name), Tcq(bits), NO_CLIP)
        for name in checkpoint.names
        if name.endswith("_proj.weight")
    }


def test_slopes_are_those_of_the_divergence() -> None:
    checkpoint = open_checkpoint(LLAMA)
    text = make_text(sequences(checkpoint, 2, 48)).judged()
    made = {n: encode(t.decode(), Float("f32")) for n, t in rounded(checkpoint, 2).items()}

    def divergence(note=None, **more: QuantTensor) -> float:
        tensors = {**checkpoint.tensors, **made, **more}
        walks = (Walk(each, text, 1) for each in (checkpoint, replace(checkpoint, tensors=tensors)))
        return tuning._divergence(*walks, note)

    found = {}
    at = divergence(lambda call, x, slope: found.update({call.args["w"]: (x, slope)}))
    assert at > 0
    for name in (f"model.layers.{layer}.{part}.weight" for layer in (0, 1) for part in PARTS):
        x, slope = found[name]
        values = made[name].decode()
        slopes = np.einsum("ij,ij->j", slope, x @ values.T)
        step = 0.01 * slopes / np.abs(slopes).max()
        ends = (encode(values * (1 + sign * step)[:, None], Float("f32")) for sign in (1, -1))
        up, down = (divergence(**{name: each}) for each in ends)
        assert (up - down) / 2 == pytest.approx(float(slopes @ step), rel=0.05), name


def test_it_lowers_the_divergence_of_sequences_that_it_has_not_seen() -> None:
    checkpoint = open_checkpoint(LLAMA)
    made, text = rounded(checkpoint, 2), sequences(checkpoint, 16, 128)
    told = []
    found = tuning.tune(checkpoint, made, text, progress=lambda *each: told.append(each[1:]))
    assert found.after < 0.97 * found.before
    assert found.rows.keys() == made.keys()
    assert told == [(n + 1, len(told)) for n in range(len(told))]
    for name, rows in found.rows.items():
        before = to_f32(made[name].planes["rows"], "bf16")
        assert rows.dtype == made[name].planes["rows"].dtype
        assert np.abs(to_f32(rows, "bf16") / before - 1).max() < tuning.STEPS * tuning.RATE
    again = tuning.tune(checkpoint, made, text)
    assert all(np.array_equal(again.rows[name], rows) for name, rows in found.rows.items())


def test_of_a_long_sequence_the_beginning_counts() -> None:
    part = tuning._part(make_text([range(700), range(700)]), 700, 1400)
    assert part.lengths == (512,)
    assert part.ids.tolist() == list(range(512)) and len(part.held) == 512


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_models_without_derivatives_have_none(family: str, tmp_path: Path) -> None:
    make(family, 0, tmp_path / "model")
    checkpoint = open_checkpoint(tmp_path / "model")
    assert tuning.tune(checkpoint, {}, [[1, 2, 3], [4, 5]]) is None


@pytest.fixture(scope="module")
def asked(tmp_path_factory) -> job.Job:
    """Return a job that makes trellises of two bits."""
    folder = tmp_path_factory.mktemp("job")
    checkpoint = open_checkpoint(write_first_layers(LLAMA, folder / "model", 2))
    rule = {"pattern": ".*_proj.weight", "dtype": "tcq2", "method": "gptq"}
    rules = parse_q4_map({"version": 1, "rules": [rule]}, folder / "rules.json")
    record = {"name": "t", "nbytes": 1, "sha256": "0" * 64, "sequences": 12, "seq_len": 64} | {
        "tokens": 768, "tokens_sha256": "0" * 64, "bos": False, "seed": 0
    }  # fmt: skip
    texts = tuple(map(tuple, sequences(checkpoint, 12, 64)))
    text = job.CalibrationText(texts, record)
    return job.Job(checkpoint, folder / "q4.json", rules, calibration=text)


def test_a_job_writes_the_factors_that_help(asked: job.Job, tmp_path: Path, monkeypatch) -> None:
    tuned = {}

    def made(name: str, found: bool, **after: float) -> Q4Map:
        def noted(*given, **more):
            tuned[name] = tuning.tune(*given, **more)._replace(**after) if found else None
            return tuned[name]

        monkeypatch.setattr(job, "tune", noted)
        own = replace(asked, out=tmp_path / f"{name}.json")
        notes: list[str] = []
        job.run_job(own, own.plan(), note=notes.append)
        assert any("rows are not tuned" in each for each in notes) != found
        return load_q4_map(own.out)

    plain, better, worse = made("plain", False), made("better", True), made("worse", True, after=9)
    assert "tuning" not in plain.document
    assert better.document["tuning"]["kld_after"] < better.document["tuning"]["kld_before"]
    assert worse.document["tuning"]["kld_after"] == 9
    assert better.document["tuning"]["taken"] and not worse.document["tuning"]["taken"]
    for name in plain.entries:
        source = asked.checkpoint.tensor(name)
        one, two, three = (each.stored(name, source).planes for each in (plain, better, worse))
        assert np.array_equal(two["rows"], tuned["better"].rows[name])
        assert not np.array_equal(one["rows"], two["rows"])
        assert np.array_equal(one["codes"], two["codes"])
        assert np.array_equal(one["rows"], three["rows"])


def test_a_job_killed_after_tuning_ends_as_if_it_had_not_been(
    asked: job.Job, tmp_path: Path, monkeypatch
) -> None:
    jobs = [replace(asked, out=tmp_path / f"{name}.json") for name in ("whole", "killed")]
    job.run_job(jobs[0], jobs[0].plan())
    with monkeypatch.context() as patch:
        patch.setattr(job, "measure", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            job.run_job(jobs[1], jobs[1].plan())
    said = []
    job.run_job(jobs[1], jobs[1].plan(), note=said.append)
    assert "goes on" in said[0]
    whole, again = (load_q4_map(each.out).entries for each in jobs)
    assert {n: e.hashes for n, e in whole.items()} == {n: e.hashes for n, e in again.items()}


def test_at_four_bits_nothing_is_tuned() -> None:
    checkpoint = open_checkpoint(LLAMA)
    for bits, method, is_tuned in ((3, "gptq", True), (4, "gptq", False), (3, "rtn", False)):
        rule = {"pattern": ".*_proj.weight", "dtype": f"tcq{bits}", "method": method}
        assert job.is_tuned(make_plan(checkpoint, rule)) == is_tuned
