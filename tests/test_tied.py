"""Embeddings and head that a file holds as two roundings of one matrix."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch import from_numpy
from weight_files import DATA, LLAMA, convert

from clocher_kernels.formats import Float, Int4
from clocher_kernels.quant_tensor import encode
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.checkpoints.checkpoint import open_arrays
from clocher_runtime.convert.certificate import check_certificate
from clocher_runtime.convert.tied import tied
from clocher_runtime.engine.load import load_model
from clocher_runtime.models.spec import EMBED, HEAD
from clocher_runtime.quality.evaluate import weight_errors
from clocher_runtime.quality.tensor_error import same
from clocher_runtime.quantize.job import MANIFEST
from clocher_runtime.subcommands.quantize import quantize


@pytest.fixture(scope="module")
def twice(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model whose embeddings are its head, rounded to 4 bits."""
    model = tmp_path_factory.mktemp("twice") / "model"
    shutil.copytree(LLAMA, model)
    (path,) = model.glob("*.safetensors")
    tensors = load_file(path)
    head = tensors[HEAD]
    rounded = encode(head.float().numpy(), Int4(False, 32, "f16")).decode()
    save_file(tensors | {EMBED: from_numpy(rounded).to(head.dtype)}, path)
    return model


def run(*args: object) -> str:
    result = CliRunner().invoke(quantize, [str(arg) for arg in args])
    assert result.exit_code == 0, result.output
    return result.output


def test_two_roundings_become_the_finer_one(twice: Path) -> None:
    checkpoint = open_checkpoint(twice)
    one = tied(checkpoint)
    assert set(checkpoint.names) - set(one.names) == {HEAD}
    assert load_model(one).spec.tied
    assert same(one.tensor(EMBED), checkpoint.tensor(HEAD))
    assert "one matrix, stored twice (bf16, " in one.notes[-1]
    saved = checkpoint.nbytes - one.nbytes
    assert one.notes[-1].endswith(f"becomes both, {saved / 1e6:.1f} MB less")
    coarse = encode(checkpoint.tensor(HEAD).decode(), Int4(False, 32, "f16"))
    finer = {**checkpoint.tensors, EMBED: checkpoint.tensors[HEAD], HEAD: coarse}
    assert same(tied(open_arrays(finer, "here")).tensor(EMBED), checkpoint.tensor(HEAD))


@pytest.mark.parametrize("what", ["other", "scaled", "nan", "shorter", "alone"])
def test_other_matrices_stay(what: str) -> None:
    checkpoint = open_checkpoint(LLAMA)
    tensors = {name: checkpoint.tensor(name) for name in (EMBED, HEAD)}
    head = tensors[HEAD].decode()
    if what == "scaled":
        tensors[EMBED] = encode(head * np.float32(1.2), Float("f32"))
    elif what == "nan":
        tensors[EMBED] = encode(np.full_like(head, np.nan), Float("f32"))
    elif what == "shorter":
        tensors[EMBED] = encode(head[1:], Float("f32"))
    elif what == "alone":
        del tensors[HEAD]
    given = open_arrays(tensors, "here")
    assert tied(given) is given


def test_the_command_stores_one_and_its_manifest_says_so(twice: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert "one matrix, stored twice" in run(twice, out, "--bits", 5)
    made = open_checkpoint(out)
    assert HEAD not in made.names and made.tensors[EMBED].format.name == "tcq5"
    assert load_model(made).spec.tied
    assert json.loads((out / MANIFEST).read_text())["tied"] is True
    convert(twice, tmp_path / "again", out / MANIFEST)
    again = open_checkpoint(tmp_path / "again")
    assert again.names == made.names
    assert all(same(made.tensor(name), again.tensor(name)) for name in made.names)


def test_a_certificate_of_one_matrix_holds(twice: Path, tmp_path: Path) -> None:
    run(twice, tmp_path / "out", "--bits", 5, "--verify")
    checked = check_certificate(tmp_path / "out")
    assert checked.source == twice and not checked.problems


def test_matrices_that_stay_stay_two(twice: Path, tmp_path: Path) -> None:
    assert "one matrix" not in run(twice, tmp_path / "out")
    assert {HEAD, EMBED} <= set(open_checkpoint(tmp_path / "out").names)


def test_one_matrix_is_like_the_nearer_of_two(twice: Path) -> None:
    two = open_checkpoint(twice)
    models = load_model(two), load_model(tied(two))
    assert not weight_errors(*models)
    (error,) = weight_errors(*reversed(models))
    assert error.name == EMBED and error.rms_rel > 0.01


def test_the_gate_judges_by_the_file_as_it_is(
    twice: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clocher_runtime.quality.compare.DOCUMENT_TOKENS", 64)
    once = tmp_path / "once"
    shutil.copytree(twice, once)
    (path,) = once.glob("*.safetensors")
    tensors = load_file(path)
    save_file(tensors | {EMBED: tensors[HEAD].clone()}, path)
    text = tmp_path / "text.txt"
    text.write_text((DATA / "valid.txt").read_text()[:4000])
    gate = ("--gate", text, "--gate-window", 32, "--min-tokens", 100, "--min-documents", 1)
    loose = ("--max-ppl-ratio", 9, "--max-kld", 9, "--min-same-top", 0, "--max-rms-dp", 9)
    found = []
    for model in (once, twice):
        run(model, tmp_path / "out", "--bits", 5, "--force", *gate, *loose)
        gates = json.loads((tmp_path / "out" / MANIFEST).read_text())["gates"]
        found += [check["value"] for check in gates if check["name"] == "kld"]
    assert found[1] > 3 * found[0] > 0


def test_own_rules_name_the_tensors_of_the_file(twice: Path, tmp_path: Path) -> None:
    rules = [{"pattern": pattern, "dtype": "int8"} for pattern in (HEAD, EMBED)]
    (tmp_path / "rules.json").write_text(json.dumps({"version": 1, "rules": rules}))
    run(twice, tmp_path / "out", "--rules", tmp_path / "rules.json")
    assert {HEAD, EMBED} <= set(open_checkpoint(tmp_path / "out").names)


def test_own_rules_may_say_that_there_is_one_matrix(twice: Path, tmp_path: Path) -> None:
    rules, out = tmp_path / "rules.json", tmp_path / "out"
    rule = {"pattern": EMBED, "dtype": "tcq4"}
    rules.write_text(json.dumps({"version": 1, "tied": True, "rules": [rule]}))
    assert "one matrix, stored twice" in run(twice, out, "--rules", rules)
    assert HEAD not in open_checkpoint(out).names
    assert json.loads((out / MANIFEST).read_text())["tied"] is True
    given = [str(each) for each in (LLAMA, tmp_path / "other", "--rules", rules)]
    refused = CliRunner().invoke(quantize, given)
    assert refused.exit_code == 2 and "of this model are two matrices" in refused.output
