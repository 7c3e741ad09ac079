"""A draft model means the same by every id: what differs is said, and nothing else matters."""

import json
import shutil
from pathlib import Path

import pytest
from test_session import DATA

from clocher_kernels.errors import ModelError, UnsupportedModel, UsageError
from clocher_runtime.api import load
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.cli import main
from clocher_runtime.engine.load import load_model
from clocher_runtime.text.pairing import load_draft

LLAMA = DATA / "clocher-tiny-llama"
PROMPT = ["--prompt-ids", "5,6,7,8", "--max-new", "24", "--ignore-eos", "--json", "--threads", "2"]


def changed(folder: Path, change: object) -> Path:
    """Return a copy of the model whose tokenizer.json was changed."""
    shutil.copytree(LLAMA, folder)
    path = folder / "tokenizer.json"
    document = json.loads(path.read_text())
    assert callable(change)
    change(document)
    path.write_text(json.dumps(document, indent=1))
    return folder


def swap(document: dict) -> None:
    vocabulary = document["model"]["vocab"]
    one, two = (next(text for text, i in vocabulary.items() if i == n) for n in (300, 301))
    vocabulary[one], vocabulary[two] = 301, 300


def refusal(folder: Path) -> str:
    model = load_model(open_checkpoint(LLAMA))
    with pytest.raises(UnsupportedModel) as error:
        load_draft(folder, model)
    return str(error.value)


def test_how_a_tokenizer_is_written_does_not_matter(tmp_path: Path) -> None:
    folder = changed(tmp_path / "draft", lambda document: document.update(truncation=None))
    model = load_model(open_checkpoint(LLAMA))
    assert load_draft(folder, model).spec == model.spec


def test_the_first_id_that_differs_is_named(tmp_path: Path) -> None:
    told = refusal(changed(tmp_path / "draft", swap))
    assert "the first that differs is 300" in told and "leave the draft model out" in told


def test_added_tokens_count(tmp_path: Path) -> None:
    def add(document: dict) -> None:
        document["added_tokens"].append({**document["added_tokens"][0], "id": 4095, "content": "+"})

    assert "4095" in refusal(changed(tmp_path / "draft", add))


def test_a_model_without_a_tokenizer_is_not_taken_on_trust(tmp_path: Path) -> None:
    shutil.copytree(LLAMA, tmp_path / "draft")
    (tmp_path / "draft" / "tokenizer.json").unlink()
    assert "without both tokenizers" in refusal(tmp_path / "draft")


def line_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict]:
    code = main(["--model-dir", str(LLAMA), *PROMPT, *arguments])
    return code, json.loads(capsys.readouterr().out.splitlines()[-1])


def test_the_command_runs_with_a_draft_model(capsys: pytest.CaptureFixture[str]) -> None:
    _, alone = line_of(capsys, "--speculate", "off")
    code, line = line_of(capsys, "--draft-model", str(LLAMA), "--speculate", "draft")
    assert code == 0 and line["outputs"] == alone["outputs"]
    assert line["speculation"]["mode"] == "draft" and not line["hints_ignored"]
    assert line["speculation"]["draft_model"] == str(LLAMA)
    code, line = line_of(capsys, "--draft-model", str(LLAMA), "--speculate", "off")
    assert code == 0 and line["hints_ignored"] == [f"--draft-model={LLAMA}"]
    assert line["speculation"]["draft_model"] is None


def test_the_command_refuses_another_model_with_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = changed(tmp_path / "draft", swap)
    for named, message in ((str(other), "first that differs is 300"), ("no/where", "no/where")):
        code, line = line_of(capsys, "--draft-model", named)
        assert code == 3 and line["code"] == 3
        assert "draft" in line["message"] and message in line["message"]


def test_the_command_wants_a_draft_model_that_it_is_to_ask(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, line = line_of(capsys, "--speculate", "draft")
    assert code == 2 and "--draft-model" in line["message"]


def test_load_names_its_own_argument() -> None:
    with pytest.raises(UsageError, match="without a draft model; give draft_model to load"):
        load(LLAMA, device="cpu", speculate="draft")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_what_is_wrong_with_the_draft_model_is_said_of_it(tmp_path: Path, name: str) -> None:
    shutil.copytree(LLAMA, tmp_path / "draft")
    (tmp_path / "draft" / name).write_bytes(b"{")
    with pytest.raises(ModelError, match=r"^draft model: "):
        load_draft(tmp_path / "draft", load_model(open_checkpoint(LLAMA)))


def test_load_takes_one_too() -> None:
    with load(LLAMA, device="cpu", threads=2, speculate="off", draft_model=LLAMA) as model:
        expected = model.generate([5, 6, 7], 20)
    with load(LLAMA, device="cpu", threads=2, speculate="draft", draft_model=LLAMA) as model:
        assert model.generate([5, 6, 7], 20) == expected
        assert model.session._draft_model is not None
