"""What a person meets first: `clocher` and its help, text on a terminal, pipes, completion."""

import importlib.util
import json
import os
import pkgutil
import subprocess
import sys

import pytest
from commands import clean_environment, clocher, here, only_line, python
from terminal import in_terminal
from weight_files import BITNET, ROOT

from clocher_runtime.command import SCRIPTS
from clocher_runtime.subcommands.table import SUBCOMMANDS, dispatch

DIM, BRIGHT = "\x1b[2m", "\x1b[22m"


# Text on a terminal


def test_a_terminal_shows_the_prompt_dim_the_text_and_no_json():
    code, shown = in_terminal("clocher-run", "--prompt", "import os", "--max-new", "8")
    assert code == 0
    assert shown.startswith(f"{DIM}import os{BRIGHT}")
    text = shown.removeprefix(f"{DIM}import os{BRIGHT}")
    generated, _, summary = text.rpartition("clocher-run: ")
    assert generated.strip()
    assert summary.startswith("8 tokens in ")
    assert '"schema"' not in shown
    assert "\x1b" not in text


def test_the_text_on_a_terminal_is_that_of_the_line():
    code, shown = in_terminal("clocher-run", "--prompt", "import os", "--max-new", "8", "--json")
    line = json.loads(shown[shown.index("{") :])
    assert (code, line["status"]) == (0, "ok")
    text = in_terminal("clocher-run", "--prompt", "import os", "--max-new", "8")[1]
    assert line["outputs"][0]["text"] in text


@pytest.mark.parametrize("env", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_no_escape_sequence_where_none_is_wanted(env):
    shown = in_terminal("clocher-run", "--prompt", "import os", "--max-new", "4", **env)[1]
    assert "\x1b" not in shown
    assert shown.startswith("import os")


def test_what_a_prompt_holds_is_not_obeyed_by_the_terminal():
    shown = in_terminal("clocher-run", "--prompt", "a\x1b[31mb\x07", "--max-new", "1")[1]
    assert "\x1b[31m" not in shown
    assert "\x07" not in shown


def test_an_error_on_a_terminal_is_told_once():
    code, shown = in_terminal("clocher-run", "--max-new", "ten")
    assert code == 2
    assert shown.count("--max-new: got 'ten'") == 1
    assert shown.startswith("clocher-run: error: ")
    assert len(shown.splitlines()) == 1


def test_a_variable_without_a_prefix_is_named_when_it_acts():
    code, out, err = here("run", "--max-new", "2", env={"PRECISION": "fp16", "BATCH": "7"})
    assert code == 0
    assert "clocher run: PRECISION=fp16 is read from the environment" in err
    assert "BATCH" not in err
    assert only_line(out)["environment"] == ["PRECISION=fp16"]
    assert only_line(out)["batch"] == 1


@pytest.mark.parametrize(
    ("given", "acted_on"),
    [("int8w", False), ("bf16", False), ("fp32", True), ("ternaryw", False)],
)
def test_a_precision_that_changes_nothing_is_told(given, acted_on, inside):
    _, line, err = inside(str(BITNET), "--max-new", "1", IE_PRECISION=given, IE_NT_RATIO="3")
    how = f"IE_PRECISION={given}"
    assert line["environment"] == ([how] if acted_on else [])
    assert line["hints_ignored"] == ["IE_NT_RATIO=3", *([] if acted_on else [how])]
    assert acted_on or f"not acted on: IE_NT_RATIO=3, {how}" in err


def test_a_full_context_is_told():
    code, out, err = here("run", "--context", "16", "--max-new", "40", "--ignore-eos")
    assert (code, only_line(out)["tokens_generated"]) == (0, 8)
    assert "the context of 16 tokens is full" in err and "give a larger --context" in err
    err = here("run", "--context", "16", "--max-new", "4")[2]
    assert "is full" not in err


def test_a_context_that_is_the_models_own_is_not_to_be_raised():
    ids = ",".join("9" * 4095)
    err = here("run", "--prompt-ids", ids, "--context", "4096", "--max-new", "4", "--ignore-eos")[2]
    assert "of 4096 tokens is full: 1 completion ended before --max-new\n" in err


def test_json_is_no_ignored_hint_of_the_stub():
    _, out, _ = here("run", "--stub", "--json", "--max-new", "1")
    assert only_line(out)["hints_ignored"] == []


# Pipes


def test_what_is_piped_in_is_the_prompt(tmp_path):
    def output(*words, text=None):
        given = {} if text is None else {"input": text}
        code, out, err = clocher("run", "--max-new", "4", *words, **given)
        assert code == 0, err
        return only_line(out)["outputs"][0]["token_ids"]

    piped, usual = output(text="class Stack:\n"), output()
    _, out, _ = here("run", "--max-new", "4", "--prompt", "class Stack:\n")
    assert piped == only_line(out)["outputs"][0]["token_ids"] != usual
    code, out, _ = clocher("run", input="")
    assert code == 2 and "standard input is empty; give a prompt" in only_line(out)["message"]
    assert output("--prompt", "class Stack:\n", text="import os") == piped


def test_a_pipe_that_says_nothing_does_not_stop_a_run():
    read, write = os.pipe()
    sooner = "from clocher_runtime.command import run; run._PIPE_WAIT_S /= 10; "
    run = f"{sooner}from clocher_runtime.cli import clocher; clocher(['run', '--max-new', '2'])"
    try:
        done = python("-c", run, stdin=read, env=clean_environment())
    finally:
        os.close(read)
        os.close(write)
    assert (done.returncode, only_line(done.stdout)["status"]) == (0, "ok")
    assert "nothing came in 0.5 s: the usual prompt is used; --prompt TEXT" in done.stderr


# One command


@pytest.mark.parametrize("words", [(), ("-h",), ("--help",), ("help",)])
def test_help_lists_the_commands_after_examples(words):
    code, out, err = here(*words)
    assert (code, err) == (0, "")
    assert out.index("Examples:") < out.index("Commands:")
    for name, about in SUBCOMMANDS.items():
        assert f"  {name} " in out
        assert about in out


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_every_command_has_a_help_that_begins_with_examples(name):
    code, out, err = here(name, "--help")
    assert (code, err) == (0, ""), err
    assert out.startswith(f"Usage: clocher {name} ")
    flags = out.index("-h, --help")
    assert out.index("Examples:") < flags
    assert f"\n  clocher {name}" in out[: out.index("\n\n", out.index("Examples:"))]
    assert here(name, "-h") == here("help", name) == (code, out, err)


def test_version_names_the_program():
    assert clocher("--version")[1].startswith("clocher 0.")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("chta", "'chta' is no command; did you mean chat?"),
        ("xyzzy", "'xyzzy' is no command; see clocher --help"),
        ("models/llama", "to use it as a model: clocher chat models/llama"),
        ("--port", "--port: no such flag; flags go after a command"),
    ],
)
def test_a_word_that_is_no_command_gets_one_line(word, message):
    code, out, err = here(word)
    assert (code, out) == (2, "")
    assert err.startswith("clocher: error: ")
    assert message in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--help",), 1),
        (("run", "--help"), 1),
        (("serve", "--help"), 1),
        (("chat", "--help"), 1),
        (("models",), 1),
        (("quantize", "--help"), 1),
    ],
)
def test_a_full_disk_behind_standard_output_is_told(words, code):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "clocher_runtime", *words],
            env=clean_environment(),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert done.returncode == code
    assert done.stderr.endswith("error: standard output: No space left on device\n")
    assert "Traceback" not in done.stderr


# Completion


def offered(*words: str) -> list[str]:
    env = {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    code, out, err = here(env={**env, "_CLOCHER_COMPLETE": "bash_complete"})
    assert (code, err) == (0, "")
    return out.split()


def test_a_shell_is_offered_commands_flags_and_values():
    assert offered("clocher", "c") == ["plain,chat", "plain,convert"]
    assert "plain,--temperature" in offered("clocher", "chat", "--te")
    assert offered("clocher", "run", "--device", "c") == ["plain,cpu", "plain,cuda"]
    assert offered("clocher", "run", "--model-dir", "x") == ["file,x"]
    assert "plain,--port" in offered("clocher", "serve", "--po")
    assert offered("clocher", "chat", "mod") == ["file,mod"]
    assert offered("clocher", "ray", "gen") == ["plain,generate"]
    assert offered("clocher", "ray", "generate", "--task") == ["plain,--task-rows"]


def test_an_inner_command_is_named_or_refused(capsys):
    assert dispatch(["ray", "count"]) == 2
    assert "'count' is not one of 'generate', 'score'" in capsys.readouterr().err
    assert dispatch(["bench", "quality", "--help"]) == dispatch(["ray", "score", "--help"]) == 0
    out = capsys.readouterr().out
    assert out.index("Usage: clocher bench quality") < out.index("Usage: clocher ray")


def test_the_flags_of_every_command_can_be_completed():
    for name in SUBCOMMANDS:
        assert "plain,--help" in offered("clocher", name, "--he"), name


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell_asks_clocher(shell):
    code, out, _ = clocher(env={"_CLOCHER_COMPLETE": f"{shell}_source"})
    assert code == 0
    assert f"_CLOCHER_COMPLETE={shell}_complete" in out


# Scripts


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_a_name_for_something(name):
    file = ROOT / "scripts" / f"{name}.py"
    assert len(file.read_text(encoding="utf-8").splitlines()) <= 6
    module, is_module = SCRIPTS[name].removeprefix("-m "), SCRIPTS[name].startswith("-m ")
    module = module.split()[0]
    if is_module:
        assert importlib.util.find_spec(module) is not None
    else:
        assert callable(pkgutil.resolve_name(f"clocher_runtime.{module}"))
