"""The documentation is true: commands run, links resolve, generated pages are current."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from contextlib import chdir, redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
from click.testing import CliRunner
from commands import VARIABLES, here, plain
from test_jsonline import RUN_KEYS

from clocher_runtime.exit_codes import ExitCode
from clocher_runtime.models.families import FAMILIES

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
RENDER = runpy.run_path(str(ROOT / "scripts" / "render_docs.py"))["main"]
USING = ROOT / "docs" / "using.md"
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("tests/**/*.md"),
        *ROOT.glob("clocher_runtime/assets/**/*.md"),
    ]
)
RUN_BY_NAME = {"bash", "python"}
NOT_COMMANDS = {"", "json", "text"}

# Blocks that test_block does not execute, by their first line, each with the reason.
ELSEWHERE = {
    "make run": "needs a package index: test_the_first_screen_in_a_fresh_copy, marked slow",
    "clocher pull Qwen/Qwen3-0.6B": "needs the network: test_pull runs it with a hub of its own",
    "clocher serve MODEL": "serves until it is ended: test_serve does it",
    "make test": "is what runs this test",
    "python -m pip install -e '.[cuda]'": "needs a package index and a GPU",
    "python -m bench.gpu_suite --out results --dry-run": "runs a minute: test_gpu_suite runs it",
    "from openai import OpenAI": "needs a server: test_serve runs it",
    "import ray": "needs the extra ray, and half a minute: test_ray_cluster runs one",
    "from langchain_openai import ChatOpenAI": "needs a server: test_serve_clients runs it",
    "import langchain_openai": "needs a server: test_embeddings runs it",
    "import anthropic": "needs a server: test_serve_messages runs it where the package is",
}

SMALLER = {
    "--chars 60000": "--chars 6000",
    "--chars 40000 --min-tokens 8000": "--chars 8000 --min-tokens 1000",
    "[:20_000]": "[:6_000]",
}
"""What is run with less text than a page says, for a test takes seconds."""


class Block(NamedTuple):
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT).as_posix()}-{self.line}"

    @property
    def first(self) -> str:
        return self.text.splitlines()[0]


def blocks() -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S):
            line = text.count("\n", 0, match.start()) + 1
            found.append(Block(page, line, match[1], match[2]))
    return found


BLOCKS = blocks()
COMMANDS = [b for b in BLOCKS if b.language in RUN_BY_NAME]


Done = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Block], Done]:
    """Run a block where it may write, in what looks like the repository; each only once."""

    @cache
    def run_block(block: Block) -> Done:
        for much, less in SMALLER.items():
            block = block._replace(text=block.text.replace(much, less))
        with TemporaryDirectory(dir=tmp_path_factory.getbasetemp()) as name:
            checkout = Path(name)
            for entry in ROOT.iterdir():
                if not entry.name.startswith(".") and entry.name != "build":
                    (checkout / entry.name).symlink_to(entry)
            if block.language == "python":
                return run_here(block, checkout)
            lines = block.text.replace("\\\n", " ").splitlines()
            words = [plain(line) for line in lines if line.startswith("clocher ")]
            if len(words) == len(lines) and None not in words:
                return here_in_turn(words, checkout)
            return run(["bash", "-euo", "pipefail", "-c", block.text], checkout)

    return run_block


def run_here(block: Block, cwd: Path) -> Done:
    """Run a block of Python in this process, which has most of what it imports."""
    out = StringIO()
    with chdir(cwd), redirect_stdout(out):
        exec(compile(block.text, block.where, "exec"), {"__name__": "__main__"})
    return Done(block.where, 0, out.getvalue(), "")


def here_in_turn(lines: list[Any], cwd: Path) -> Done:
    """Run lines of `clocher` in this process; the first that fails is the last."""
    output, code, err = "", 0, ""
    for words in lines:
        code, out, err = here(*words, cwd=cwd)
        output += out
        if code:
            break
    return Done(lines, code, output, err)


def run(arguments: list[str], cwd: Path, text: str = "", **more: str) -> Done:
    """Run a command with the `python` and `clocher` of this interpreter, and a text piped in."""
    bin_dir = str(Path(sys.executable).parent)
    environment = {k: v for k, v in os.environ.items() if k not in VARIABLES}
    environment["PATH"] = os.pathsep.join([bin_dir, environment.get("PATH", "")])
    return subprocess.run(
        arguments,
        cwd=cwd,
        env=environment | more,
        # Without a text as a terminal would be: an empty pipe is an error.
        **({"input": text} if text else {"stdin": subprocess.DEVNULL}),
        capture_output=True,
        text=True,
        timeout=280,
    )


def json_lines(output: str) -> list[dict]:
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def block_of(text: str) -> Block:
    return next(b for b in BLOCKS if b.page == USING and text in b.text)


@pytest.mark.parametrize(
    "block",
    [pytest.param(b, id=b.where) for b in COMMANDS if b.first not in ELSEWHERE],
)
def test_block(block: Block, outcome: Callable[[Block], Done]) -> None:
    done = outcome(block)
    # 9: the machine was busy, or the text that is left is short.
    codes = (0, 9) if re.search("bench.harness|clocher gate", block.text) else (0,)
    assert done.returncode in codes, f"{block.text}\n{done.stdout}\n{done.stderr}"
    lines = json_lines(done.stdout)
    assert len(lines) == sum(
        bool(re.match(r"(\w+=\S+ )*clocher([- ]run| perplexity| bench quality)", line))
        for line in block.text.splitlines()
    )
    assert all(line.get("status", "ok") == "ok" for line in lines)


def test_no_block_is_left_out_silently() -> None:
    assert {b.language for b in BLOCKS} <= RUN_BY_NAME | NOT_COMMANDS
    assert any(b.page == README for b in COMMANDS)
    first_lines = {b.first for b in COMMANDS}
    assert set(ELSEWHERE) <= first_lines, "an entry of ELSEWHERE that no page has"
    assert all(any(much in b.text for b in COMMANDS) for much in SMALLER)
    plain = [b for b in BLOCKS if b.language == "" and b.page in (README, USING)]
    assert not plain, "name the language of every block of these pages"


def test_the_json_shown_is_what_its_command_prints(outcome: Callable[[Block], Done]) -> None:
    shown = json.loads(block_of('"schema"').text.replace("\n", " "))
    (printed,) = json_lines(outcome(block_of("--prompt")).stdout)
    assert list(shown) == list(printed) == RUN_KEYS
    for key in ("schema", "version", "model", "precision", "outputs", "bytes_per_token"):
        assert shown[key] == printed[key], key
    for line in (shown, printed):  # how many passes it takes depends on the machine
        assert line["forward_passes"] + line["speculation"]["accepted"] == line["tokens_generated"]
        assert line["bytes_touched"] == line["bytes_per_token"] * line["forward_passes"]
        computed = line["prefill_tokens"] + line["tokens_generated"] - 1
        assert line["kv_misses"] >= computed
        assert line["kv_hits"] >= computed * (computed - 1) // 2  # guesses find keys too


def test_the_page_converts_to_the_same_tokens(outcome: Callable[[Block], Done]) -> None:
    (printed,) = json_lines(outcome(block_of("clocher convert")).stdout)
    shown = json.loads(block_of('"schema"').text.replace("\n", " "))
    assert printed["outputs"] == shown["outputs"]


def test_the_page_names_every_architecture_and_exit_code() -> None:
    text = USING.read_text(encoding="utf-8")
    assert [name for name in FAMILIES if f"`{name}`" not in text] == []
    text = (USING.parent / "cli.md").read_text(encoding="utf-8")
    assert [code for code in ExitCode if not re.search(rf"^\| {code:d} \|", text, re.M)] == []


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def test_links_resolve() -> None:
    broken = []
    for page in PAGES:
        text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.S)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            name, _, anchor = target.partition("#")
            if name.startswith(("https://", "http://")):
                continue
            path = page.parent / name if name else page
            if not path.exists() or (anchor and anchor not in anchors(path)):
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert broken == []


def test_every_page_is_linked() -> None:
    linked = set()
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
            if not target.startswith("http"):
                path = (page.parent / target).resolve()
                linked |= {path, *(path.glob("*.md") if path.is_dir() else ())}
    assert [p for p in PAGES if p not in linked | {README, ROOT / "tests/data/README.md"}] == []


def render(*flags: str) -> int:
    code: int = CliRunner().invoke(RENDER, flags).exit_code
    return code


def test_generated_pages_are_current() -> None:
    assert render("--check") == 0, "run: python scripts/render_docs.py"


@pytest.mark.parametrize("name", ["ops.md", "formats.md", "compatibility.md"])
def test_a_stale_page_is_noticed(name: str, tmp_path: Path) -> None:
    assert render("--docs", str(tmp_path)) == 0
    assert render("--docs", str(tmp_path), "--check") == 0
    page = tmp_path / name
    page.write_text(page.read_text(encoding="utf-8").replace("e", "3", 1), encoding="utf-8")
    assert render("--docs", str(tmp_path), "--check") == 1


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_changelog_has_this_version() -> None:
    versions = re.findall(r"^## \[(.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert versions[:2] == ["Unreleased", project()["version"]]


def test_constraints_pin_everything_that_is_installed_for_the_tests() -> None:
    pins = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            name, version = line.split("==")
            pins[re.sub(r"[-_.]+", "-", name).lower()] = version
    wanted = project()["dependencies"] + project()["optional-dependencies"]["test"]
    names = {re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", w)[0]).lower() for w in wanted}
    # torch asks for the triton and the NVRTC that it was built with, so no pin of ours would fit
    # every build.
    assert names - {"triton", "nvidia-cuda-nvrtc-cu12"} <= set(pins)


@pytest.mark.slow
def test_the_first_screen_in_a_fresh_copy(tmp_path: Path) -> None:
    left_out = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist")
    copy = tmp_path / "clocher"
    shutil.copytree(ROOT, copy, ignore=left_out)
    first = next(block for block in BLOCKS if block.page == README)
    command = ["bash", "-euo", "pipefail", "-c", first.text]
    done = run(command, copy, text="import os\n", PYTHON=sys.executable)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_readme_is_a_shop_window() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) < 150
