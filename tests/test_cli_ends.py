"""`clocher-run` where it is hard to run: signals, streams, paths, places, two runs at once."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import test_cli
from commands import clean_environment, only_line
from test_cli import ROOT, command, outside, start

from clocher_runtime import cli
from clocher_runtime.command import loading as engine
from clocher_runtime.exit_codes import listen, restore

bitnet = test_cli.bitnet

ENDINGS = [("SIGINT", 130, "KeyboardInterrupt"), ("SIGTERM", 143, "Terminated")]


@pytest.mark.parametrize(("name", "code", "kind"), ENDINGS)
def test_signals_leave_one_line_and_their_code(tmp_path, name, code, kind):
    process = start(tmp_path, "--stub", "--max-new", "16000000")
    assert process.stderr.read(10)
    process.send_signal(getattr(signal, name))
    out, err = process.communicate(timeout=60)
    line = only_line(out)
    assert process.returncode == code
    assert (line["status"], line["code"], line["type"]) == ("error", code, kind)
    assert line["message"] == name
    assert err.endswith(": interrupted\n" if name == "SIGINT" else ": ended by SIGTERM\n")
    assert "Traceback" not in err


def test_a_run_within_a_process_gives_its_signals_back(capfd):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert cli.main(["--stub", "--max-new", "2"]) == 0
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_an_interrupted_run_tells_what_it_has_generated(tmp_path):
    process = start(tmp_path, "--stub", "--max-new", "16000000")
    assert process.stderr.read(4000)
    process.send_signal(signal.SIGINT)
    line = only_line(process.communicate(timeout=60)[0])
    (output,) = line["outputs"]
    assert (process.returncode, output["error"]) == (130, "interrupted")
    ids = output["token_ids"]
    assert len(ids) > 10 and output["text"] == "".join(f"<{token}>" for token in ids)


@pytest.mark.slow
def test_the_tests_of_a_run_in_the_background_can_interrupt_too():
    name = "test_signals_leave_one_line_and_their_code[SIGINT-130-KeyboardInterrupt]"
    flags = ["-q", "-p", "no:cacheprovider", f"{Path(__file__)}::{name}"]
    done = subprocess.run(
        ["sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, "-m", "pytest", *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout[-1000:]


@pytest.mark.parametrize(("name", "code", "kind"), ENDINGS)
@pytest.mark.parametrize(
    "early",
    [
        "import os; os.kill(os.getpid(), NUMBER)",
        # A class that is made meanwhile, and C code that turns it into an error of its own.
        "exec('import os; os.kill(os.getpid(), NUMBER)')",
        "try:\n    import os; os.kill(os.getpid(), NUMBER)\nexcept BaseException:\n    1 / 0",
    ],
    ids=["import", "class", "swallowed"],
)
def test_signal_during_the_imports_leaves_one_line_too(tmp_path, early, name, code, kind):
    (tmp_path / "click.py").write_text(early.replace("NUMBER", str(int(getattr(signal, name)))))
    process = start(tmp_path, env={"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"})
    out, err = process.communicate(timeout=60)
    line = only_line(out)
    assert (process.returncode, line["code"], line["type"]) == (code, code, kind)
    assert "Traceback" not in err


def test_a_signal_in_a_finaliser_is_not_lost(tmp_path):
    (tmp_path / "click.py").write_text(
        "import os, time\nclass Last:\n    def __del__(self):\n        os.kill(os.getpid(), 15)\n"
        "        time.sleep(0.01)\nLast()\ntime.sleep(30)"
    )
    process = start(tmp_path, env={"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"})
    out, err = process.communicate(timeout=20)
    assert (process.returncode, only_line(out)["type"], err) == (143, "Terminated", "")


def test_second_signal_ends_a_run_that_does_not_end(tmp_path):
    (tmp_path / "click.py").write_text(
        "import os, time\ntry:\n    os.kill(os.getpid(), 15)\nexcept BaseException:\n"
        "    os.kill(os.getpid(), 15)\n    time.sleep(60)"
    )
    process = start(tmp_path, env={"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"})
    assert process.communicate(timeout=30)[0] == ""
    assert process.returncode == -signal.SIGTERM


def test_ignored_signals_stay_ignored(tmp_path):
    process = start(
        tmp_path,
        *("--stub", "--max-new", "20000"),
        preexec_fn=lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
    )
    assert process.stderr.read(10)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, only_line(out)["status"]) == (0, "ok")


def shell(cwd, redirection, *flags):
    """Run the command with a redirection: its exit code and what is left of its output."""
    line = f'exec "$@" {redirection}'
    done = subprocess.run(
        ["sh", "-c", line, "sh", *command(*flags)],
        cwd=cwd,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout, done.stderr


def test_stderr_that_is_closed_from_the_start_does_not_stop_the_run(tmp_path):
    code, out, _ = shell(tmp_path, "2>&-", "--stub", "--max-new", "2", "--outputs", "o.jsonl")
    assert (code, only_line(out)["tokens_generated"]) == (0, 2)
    assert len((tmp_path / "o.jsonl").read_text().splitlines()) == 1


def test_stdout_that_is_closed_from_the_start_is_code_1(tmp_path):
    code, out, err = shell(tmp_path, ">&-", "--stub", "--max-new", "2", "--outputs", "o.jsonl")
    assert (code, out) == (1, "")
    assert "Traceback" not in err
    assert json.loads((tmp_path / "o.jsonl").read_text())["error"] is None


@pytest.mark.parametrize("flag", ["--help", "--version", "--stub"])
def test_full_disk_behind_stdout_is_code_1(tmp_path, flag):
    code, _, err = shell(tmp_path, ">/dev/full", flag)
    assert code == 1
    assert err.endswith("clocher-run: error: standard output: No space left on device\n")
    assert "Traceback" not in err


def test_closed_stdin_is_code_2_where_it_is_read(tmp_path):
    assert shell(tmp_path, "<&-", "--stub", "--max-new", "2")[0] == 0
    code, out, err = shell(tmp_path, "<&-", "--stub", "--prompt", "-")
    assert (code, only_line(out)["type"]) == (2, "UsageError")
    assert "standard input is closed" in only_line(out)["message"]
    assert "Traceback" not in err


# Places that a run may be started in


def test_signals_of_a_program_around_a_run_stay_its_own(inside):
    """Those of the run before were ignored ever after."""
    hook = sys.unraisablehook
    assert inside("--max-new", "1")[0] == 0
    handlers = {number: lambda *_: None for number in (signal.SIGINT, signal.SIGTERM)}
    before = {number: signal.signal(number, handlers[number]) for number in handlers}
    try:
        assert inside("--max-new", "1")[0] == 0
        assert {number: signal.getsignal(number) for number in handlers} == handlers
        assert sys.unraisablehook is hook
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_run_within_a_command_leaves_it_its_signals(inside):
    taken = listen()
    try:
        handlers = [signal.getsignal(number) for number, _ in taken]
        assert len(handlers) == 2
        assert inside("--max-new", "1")[0] == 0
        assert [signal.getsignal(number) for number, _ in taken] == handlers
    finally:
        restore(taken)


def test_an_error_in_a_thread_is_not_the_signal_of_a_run_before(inside, monkeypatch):
    def fail(*_):
        raise ValueError("wrong")

    def interrupt(*_):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("clocher_runtime.command.run.run", interrupt)
    assert inside("--max-new", "1")[0] == 130
    monkeypatch.setattr("clocher_runtime.command.run.run", fail)
    found = []
    thread = threading.Thread(target=lambda: found.append(inside("--max-new", "1")))
    thread.start()
    thread.join()
    code, line, _ = found[0]
    assert (code, line["type"]) == (1, "ValueError")


def test_a_disk_that_fails_is_not_standard_output(inside, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("clocher_runtime.command.run.run", fail)
    code, line, err = inside("--max-new", "1")
    assert (code, line["type"]) == (5, "DeviceError") and "standard output" not in err


def test_deleted_current_directory_is_no_matter(tmp_path):
    (tmp_path / "gone").mkdir()
    line = f'rmdir "{tmp_path}/gone"; exec "$@"'
    for flags, code in (
        (["--max-new", "1"], 0),
        (["--model-dir", "m"], 3),
        (["--device", "ze"], 5),
    ):
        (tmp_path / "gone").mkdir(exist_ok=True)
        done = subprocess.run(
            ["sh", "-c", line, "sh", *command(*flags)],
            cwd=tmp_path / "gone",
            env=clean_environment(),
            capture_output=True,
            text=True,
            timeout=250,
        )
        assert (done.returncode, only_line(done.stdout)["status"]) == (
            code,
            "error" if code else "ok",
        )
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("flag", "code"),
    [
        ("--model-dir", 3),
        ("--model-json", 3),
        ("--model-bin", 3),
        ("--prompts-file", 2),
        ("--outputs", 2),
        ("--trace-ids", 2),
        ("--config", 2),
    ],
)
@pytest.mark.parametrize("path", ["a" * 5000, "d/" * 2500 + "f"], ids=["name", "path"])
def test_path_that_is_too_long_is_no_defect(inside, flag, code, path):
    got, line, err = inside(flag, path)
    assert (got, line["code"]) == (code, code)
    assert "Traceback" not in err


@pytest.fixture
def closed(tmp_path, monkeypatch):
    """Return a function that denies access to a directory, as the system does unless root asks."""
    real = {name: getattr(os, name) for name in ("stat", "open", "scandir")}

    def deny(directory, *names):
        def denied(path, name):
            inner = name != "scandir"
            text = os.path.abspath(os.fspath(path)) if not isinstance(path, int) else ""
            return text.startswith(f"{directory}/") if inner else text == str(directory)

        for name in names:

            def refuse(path, *args, _name=name, **options):
                if denied(path, _name):
                    raise PermissionError(13, "Permission denied", str(path))
                return real[_name](path, *args, **options)

            monkeypatch.setattr(os, name, refuse)

    return deny


def test_directory_that_may_not_be_searched_is_no_defect(inside, bitnet, closed):
    closed(bitnet.parent / "bitnet", "stat", "open")
    for flags, code in (
        (["--model-dir", "bitnet"], 3),
        (["--model-dir", "bitnet/sub"], 3),
        (["--model-json", "bitnet/model.ie.json"], 3),
        (["--outputs", "bitnet/o.jsonl"], 2),
        (["--trace-ids", "bitnet/o.jsonl"], 2),
    ):
        got, line, err = inside(*flags, "--max-new", "1")
        assert (got, line["code"]) == (code, code), flags
        assert "Traceback" not in err


def test_directory_that_may_not_be_listed_is_code_3(inside, tmp_path, closed):
    (tmp_path / "m").mkdir()
    closed(tmp_path / "m", "scandir")
    code, line, _ = inside("--model-dir", "m")
    assert (code, line["type"]) == (3, "ModelNotFound")
    assert "m: cannot be listed: Permission denied" in line["message"]


def test_current_directory_that_may_not_be_searched_has_no_model(inside, tmp_path, closed):
    closed(tmp_path, "stat")
    assert inside("--max-new", "1")[1]["model_source"] == "embedded"
    assert inside("--max-new", "1", IE_REQUIRE_MODEL="1")[0] == 3


def test_system_that_refuses_threads_is_code_5(inside, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("threading.Thread.start", refuse)
    monkeypatch.setattr(engine, "choose", lambda device: ("cpu", "test"))
    code, line, err = inside("--max-new", "1", "--threads", "2")
    assert (code, line["type"]) == (5, "DeviceError")
    assert "lower --threads" in line["message"]
    assert "Traceback" not in err


# Two runs, one file


@pytest.mark.parametrize("flag", ["--outputs", "--trace-ids"])
def test_file_that_another_run_is_writing_is_refused(tmp_path, flag):
    first = start(tmp_path, "--stub", "--max-new", "16000000", flag, "o.jsonl")
    assert first.stderr.read(10)
    first.send_signal(signal.SIGSTOP)  # it must not end before the other one begins
    code, line, _ = outside(tmp_path, "--stub", "--max-new", "2", flag, "o.jsonl")
    assert (code, line["type"]) == (2, "UsageError")
    assert line["message"].startswith(f"{flag}: o.jsonl is being written by another run")
    first.send_signal(signal.SIGCONT)
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=60)
    assert first.returncode == 130
    assert outside(tmp_path, "--stub", "--max-new", "2", flag, "o.jsonl")[0] == 0
    assert len((tmp_path / "o.jsonl").read_text().splitlines()) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["o.jsonl"]


def test_one_file_for_two_flags_is_refused(inside):
    code, line, _ = inside("--stub", "--outputs", "o.jsonl", "--trace-ids", "o.jsonl")
    assert (code, line["type"]) == (2, "UsageError")
    assert "for another flag" in line["message"]


@pytest.mark.parametrize("flag", ["--outputs", "--trace-ids"])
def test_an_output_never_replaces_an_input_or_a_link(tmp_path, flag):
    (tmp_path / "p.txt").write_text("import \n")
    (tmp_path / "link").symlink_to("p.txt")
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"weights")
    given = [
        (["--stub", "--prompts-file", "p.txt", flag, "p.txt"], "reads"),
        (["--stub", "--prompts-file", "p.txt", flag, "./p.txt"], "reads"),
        (["--stub", flag, "link"], "is a link"),
        (["--model-dir", "model", flag, "model/model.safetensors"], "reads"),
    ]
    for flags, message in given:
        code, line, _ = outside(tmp_path, *flags, "--max-new", "1")
        assert (code, line["type"]) == (2, "UsageError") and message in line["message"]
    assert (tmp_path / "p.txt").read_text() == "import \n"
    assert (model / "model.safetensors").read_bytes() == b"weights"


def test_an_error_stream_that_nobody_reads_leaves_the_code(tmp_path):
    run = start(tmp_path, "--stub", "--max-new", "3")
    run.stderr.close()
    out = run.stdout.read()
    assert (run.wait(60), json.loads(out)["status"]) == (0, "ok")
