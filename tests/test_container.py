"""The Containerfile, which no test builds: what must hold of it before somebody does."""

import json
import re
import shlex
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import pytest
from weight_files import ROOT

from clocher_runtime.config.commands import ALL, TABLE, ServeConfig, settle
from clocher_runtime.serve.command import clocher_serve
from clocher_runtime.subcommands.table import SUBCOMMANDS

FILE = ROOT / "Containerfile"
SERVING = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
FOREIGN = {"PATH", "PYTHONUNBUFFERED", "HF_HOME", "CLOCHER_CACHE_DIR"}
"""Variables of the image that are no setting of the server."""


class Step(NamedTuple):
    """An instruction: its name, what follows, and the stage that it is in."""

    name: str
    rest: str
    stage: int


def steps() -> list[Step]:
    """Return the instructions of the file, continued lines joined, comments left out."""
    text = re.sub(r"^#.*\n", "", FILE.read_text(encoding="utf-8"), flags=re.M)
    found: list[Step] = []
    stage = -1
    for line in re.sub(r"\\\n", " ", text).splitlines():
        if not line.strip():
            continue
        name, _, rest = line.strip().partition(" ")
        stage += name == "FROM"
        found.append(Step(name, re.sub(r" +", " ", rest).strip(), stage))
    return found


STEPS = steps()
LAST = [step for step in STEPS if step.stage == STEPS[-1].stage]


def only(name: str) -> str:
    (step,) = (step for step in LAST if step.name == name)
    return step.rest


def environment() -> dict[str, str]:
    return dict(word.split("=", 1) for word in shlex.split(only("ENV")))


def test_the_instructions_are_those_that_this_file_knows() -> None:
    known = "ARG FROM WORKDIR COPY RUN LABEL ENV USER EXPOSE STOPSIGNAL HEALTHCHECK ENTRYPOINT CMD"
    assert {step.name for step in STEPS} == set(known.split())  # so no ADD, and no VOLUME


def test_every_stage_is_of_one_pinned_image() -> None:
    (argument,) = (step.rest for step in STEPS if step.name == "ARG")
    name, _, image = argument.partition("=")
    assert re.fullmatch(r"docker\.io/library/python:3\.\d+\.\d+-slim-[a-z]+", image)
    bases = [step.rest.split()[0] for step in STEPS if step.name == "FROM"]
    assert bases == [f"${{{name}}}"] * 2


def test_what_runs_is_not_root_and_has_a_number() -> None:
    names = [step.name for step in LAST]
    user = only("USER")
    assert re.fullmatch(r"[1-9]\d{3,}:[1-9]\d{3,}", user)
    assert names.index("USER") < min(names.index("ENTRYPOINT"), names.index("CMD"))
    uid, gid = user.split(":")
    owned = [step.rest for step in LAST if step.name == "RUN"]
    assert owned == [
        f"install -d -m 0700 -o {uid} -g {gid} {environment()['CLOCHER_CACHE_DIR']} "
        f"{environment()['HF_HOME']}"
    ]
    assert names.index("RUN") < names.index("USER")


def test_commands_are_lists_and_none_is_a_line_for_a_shell() -> None:
    assert json.loads(only("ENTRYPOINT")) == ["clocher"]
    (subcommand,) = json.loads(only("CMD"))
    assert subcommand in SUBCOMMANDS
    options, _, check = only("HEALTHCHECK").partition(" CMD ")
    assert {option.split("=")[0] for option in options.split()} == {
        "--interval",
        "--timeout",
        "--start-period",
        "--retries",
    }
    python, flag, program = json.loads(check)
    assert (python, flag) == ("python", "-c")
    compile(program, "HEALTHCHECK", "exec")


def test_every_file_that_is_copied_is_there_and_not_ignored() -> None:
    kept = (ROOT / ".containerignore").read_text(encoding="utf-8").splitlines()
    for step in (step for step in STEPS if step.name == "COPY"):
        sources = step.rest.split()[:-1]
        if sources[0].startswith("--from="):
            assert sources[0] == "--from=build"
            continue
        for source in sources:
            assert (ROOT / source).exists(), source
            assert f"!{source}" in kept, source
    assert kept[1] == "*"


def test_the_wheel_has_the_name_that_is_looked_for() -> None:
    (install,) = (step.rest for step in STEPS if "clocher-*.whl" in step.rest)
    assert 'wheel="$(echo /wheel/clocher-*.whl)"' in install
    assert install.endswith('"${wheel}[serve]"')
    assert "-c constraints.txt" in install
    (build,) = (step.rest for step in STEPS if "pip wheel" in step.rest)
    assert "--wheel-dir /wheel " in build
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    made = f"{project['name']}-{project['version']}-py3-none-any.whl"  # test_wheel builds it
    assert fnmatch(made, "clocher-*.whl")
    assert "serve" in project["optional-dependencies"]


def test_the_variables_are_settings_and_the_server_wants_a_key() -> None:
    given = environment()
    settings = {variable for setting in TABLE.values() for variable in setting.env}
    assert set(given) - FOREIGN <= settings
    assert not any("KEY" in name or "TOKEN" in name for name in given)
    with pytest.raises(Exception, match="CLOCHER_API_KEY"):
        settle(ServeConfig, {}, given)
    decided = settle(ServeConfig, {}, given | {"CLOCHER_API_KEY": "secret"})
    assert decided.host == "0.0.0.0"
    assert str(decided.port) == only("EXPOSE") == given["CLOCHER_PORT"]
    assert only("STOPSIGNAL") == "SIGTERM"


def lines_of_the_page() -> list[str]:
    section = SERVING[SERVING.index("## In a container") :].split("\n## ")[0]
    (block,) = re.findall(r"^```\n(.*?)^```$", section, re.M | re.S)
    return re.sub(r"\\\n", " ", block).splitlines()


def test_the_page_runs_the_image_as_it_is() -> None:
    lines = lines_of_the_page()
    assert any(line.startswith("podman build ") and "--format docker" in line for line in lines)
    served = [shlex.split(line, comments=True) for line in lines if " run " in line]
    assert len(served) >= 2
    uses = set()
    for words in served:
        image = words.index("clocher", words.index("run"))
        subcommand, *rest = words[image + 1 :] or json.loads(only("CMD"))
        uses.add(subcommand)
        assert subcommand in SUBCOMMANDS
        mounts = [words[i + 1] for i, word in enumerate(words) if word == "-v"]
        if subcommand == "serve":
            flags = clocher_serve.texts(rest)
            assert settle(ServeConfig, flags, environment() | {"CLOCHER_API_KEY": "secret"})
            assert "CLOCHER_API_KEY" in words
            assert f"127.0.0.1:8000:{only('EXPOSE')}" in words
            assert all(m.endswith(":ro") for m in mounts if not m.startswith("clocher-"))
        caches = {environment()["CLOCHER_CACHE_DIR"], environment()["HF_HOME"]}
        assert {m.split(":")[1] for m in mounts if m.startswith("clocher-")} <= caches
        variables = [words[i + 1].split("=")[0] for i, word in enumerate(words) if word == "-e"]
        known = {v for setting in (*TABLE.values(), *ALL.values()) for v in setting.env}
        assert set(variables) <= known
    assert {"serve", "pull"} <= uses


def test_the_health_check_asks_the_server(tmp_path: Path) -> None:
    program = json.loads(only("HEALTHCHECK").partition(" CMD ")[2])[2]
    server = (
        "import http.server as h, os, threading\n"
        "class Health(h.BaseHTTPRequestHandler):\n"
        "    def do_GET(self): self.send_response(int(os.environ['STATUS'])); self.end_headers()\n"
        "    def log_message(self, *a): pass\n"
        "s = h.HTTPServer(('127.0.0.1', 0), Health)\n"
        "threading.Thread(target=s.serve_forever, daemon=True).start()\n"
        "os.environ['CLOCHER_PORT'] = str(s.server_port)\n"
    )
    for status, wanted in (("200", 0), ("503", 1)):
        done = subprocess.run(
            [sys.executable, "-c", server + program],
            env={"STATUS": status, "PATH": "/usr/bin:/bin"},
            capture_output=True,
            timeout=60,
        )
        assert done.returncode == wanted, done.stderr
