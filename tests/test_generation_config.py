"""generation_config.json: with `do_sample` it is the default of runs, chats, servers and Python."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commands import here, only_line
from weight_files import LLAMA, copy_model

import clocher_runtime
from clocher_kernels.errors import FormatError, UsageError
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.command.completions import from_model
from clocher_runtime.config.commands import ChatConfig, settle
from clocher_runtime.engine.arguments import sampling_defaults, sampling_note, taken
from clocher_runtime.serve.requests import ChatRequest, CompletionRequest
from clocher_runtime.serve.responses import ResponsesRequest

DRAWN = {"do_sample": True, "temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.05}
DEFAULTS = {name: value for name, value in DRAWN.items() if name != "do_sample"}
PROMPT = "def read_lines(path):"


def write(folder: Path, **settings: Any) -> Path:
    copy_model(LLAMA, folder)
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return folder


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (DRAWN, DEFAULTS),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": True, "top_k": -1, "top_p": 1.0, "temperature": 0.6}, {"temperature": 0.6}),
        ({"do_sample": True, "temperature": 0.0, "top_k": 5}, {}),
        ({"do_sample": True, "temperature": None, "top_p": None}, {"temperature": 1.0}),
        (
            {"do_sample": True, "temperature": 0.7, "repetition_penalty": 1.05, "max_length": 9},
            {"temperature": 0.7, "repetition_penalty": 1.05},
        ),
        (DRAWN | {"do_sample": False}, {}),
        (DRAWN | {"do_sample": None}, {}),
        ({"temperature": 0.6, "top_p": 0.9}, {}),
    ],
)
def test_what_is_taken_from_the_file(
    settings: dict[str, Any], expected: dict[str, float], tmp_path: Path
) -> None:
    assert sampling_defaults(open_checkpoint(write(tmp_path / "m", **settings))) == expected


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": -1}, {"top_p": 0}, {"top_k": 1.5}, {"min_p": "x"}, {"repetition_penalty": 0}],
    ids=str,
)
def test_wrong_values_are_named_and_only_looked_at_if_they_count(
    wrong: dict[str, Any], tmp_path: Path
) -> None:
    folder = write(tmp_path / "m", do_sample=True, **wrong)
    with pytest.raises(FormatError, match=f"generation_config.json: {next(iter(wrong))} is"):
        sampling_defaults(open_checkpoint(folder))
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"do_sample": False}))
    assert sampling_defaults(open_checkpoint(folder)) == {}


def test_what_a_caller_says_is_stronger() -> None:
    assert taken(DEFAULTS, {}) == DEFAULTS
    assert taken(DEFAULTS, {"top_k": 3, "seed": 1}) == {
        name: value for name, value in DEFAULTS.items() if name != "top_k"
    }
    assert taken(DEFAULTS, {"temperature": 0}) == taken(DEFAULTS, {"temperature": 0.0}) == {}
    assert taken(DEFAULTS, {"temperature": None}) == DEFAULTS
    assert sampling_note({}) == "" and "temperature 1.3, top_k 40" in sampling_note(DEFAULTS)


def test_python_draws_as_the_file_says(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", **DRAWN)
    with clocher_runtime.load(folder, device="cpu", threads=2) as model:
        assert model.sampling_defaults == DEFAULTS
        drawn = model.complete(PROMPT, max_new=16).ids
        greedy = model.complete(PROMPT, max_new=16, temperature=0).ids
        other = model.complete(PROMPT, max_new=16, top_p=0.5).ids
    with clocher_runtime.load(folder, device="cpu", threads=2, generation_config="none") as model:
        assert model.complete(PROMPT, max_new=16).ids == greedy != drawn
        assert model.complete(PROMPT, max_new=16, **DEFAULTS).ids == drawn
        assert model.complete(PROMPT, max_new=16, **(DEFAULTS | {"top_p": 0.5})).ids == other
    with pytest.raises(
        UsageError, match="generation_config: got 'vllm', expected one of auto, none"
    ):
        clocher_runtime.load(folder, generation_config="vllm")


def test_a_run_says_what_it_took_from_the_file(tmp_path: Path) -> None:
    folder = str(write(tmp_path / "m", **DRAWN))

    def run(*flags: str) -> tuple[dict[str, Any], str]:
        code, out, err = here("run", folder, "--prompt", PROMPT, "--max-new", "12", *flags)
        assert code == 0, err
        return only_line(out), err

    line, err = run()
    assert line["generation_config"] == DEFAULTS
    assert err.count("generation_config.json of the model: temperature 1.3, top_k 40") == 1
    greedy, err = run("--generation-config", "none")
    assert greedy["generation_config"] == {} and "generation_config.json" not in err
    assert run("--temperature", "0")[0]["outputs"] == greedy["outputs"] != line["outputs"]
    some = run("--temperature", "1.3", "--top-k", "40")[0]
    assert some["generation_config"] == {"top_p": 0.9, "min_p": 0.05}
    assert some["outputs"] == line["outputs"]


def test_requests_of_a_server_get_the_defaults_where_they_say_nothing() -> None:
    chat = {"messages": [{"role": "user", "content": "?"}]}
    for schema, body in (
        (ChatRequest, chat),
        (CompletionRequest, {"prompt": "?"}),
        (ResponsesRequest, {"input": "?"}),
    ):

        def sampling(schema: Any = schema, body: Any = body, **fields: Any) -> dict[str, Any]:
            asked = schema.parse(json.dumps(body | fields).encode())
            found = asked.on_top_of(DEFAULTS).sampling()
            return {name: found.get(name) for name in DEFAULTS}

        assert sampling() == DEFAULTS
        assert sampling(top_p=0.5) == DEFAULTS | {"top_p": 0.5}
        zero = dict.fromkeys(DEFAULTS) | {"temperature": 0}
        assert sampling(temperature=0) == zero


def test_a_chat_has_the_defaults_of_the_model_and_its_flags_win() -> None:
    engine: Any = SimpleNamespace(loaded=SimpleNamespace(sampling_defaults=DEFAULTS))
    found = from_model(settle(ChatConfig, {"top_k": "3"}, {}), engine)
    assert found == {"temperature": 1.3, "top_p": DEFAULTS["top_p"], "min_p": 0.05}
    assert from_model(settle(ChatConfig, {"temperature": "0"}, {}), engine) == {}
    assert settle(ChatConfig, {}, {}).temperature == 0.7


def test_chat_says_what_it_took_from_the_file(tmp_path: Path) -> None:
    folder = str(write(tmp_path / "m", **DRAWN))
    code, _, err = here("chat", folder, "--max-new", "4", text="def f():")
    assert code == 0 and "generation_config.json of the model: temperature 1.3" in err, err


def test_nothing_changes_for_the_models_here() -> None:
    assert sampling_defaults(open_checkpoint(LLAMA)) == {}
