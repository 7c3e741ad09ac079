"""Every line of the pages' plain blocks that starts one of our programs runs, or has a reason here.

Blocks that name their language are run by test_docs, those of coming-from.md by test_coming_from.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import clean_environment, here, plain
from test_docs import BLOCKS, Block
from weight_files import GPTOSS, LLAMA, ROOT

OURS = re.compile(r"(\w+=\S+ )*(clocher|python (-m bench|scripts|tests)|bash scripts|make) ?")
GUIDE = "guide-vm-run.md"
NOT_RUN = {
    "make ": "installs; test_make runs what targets run",
    "MODEL_DIR=models/tiny PROMPTS": "of make bench: test_make runs what targets run",
    "clocher bench": "a minute each: test_bench_command runs it",
    "python -m bench.harness ": "needs two result files: test_harness compares some",
    "python -m bench quantise": "needs files of floats: test_bench_real runs it",
    "python -m bench.strict": "minutes: test_strict runs it",
    "python scripts/make_synthetic.py": "a gigabyte: test_synthetic runs it",
    "clocher run llama.gguf": "needs a file of llama.cpp: test_gguf_import runs some",
    "clocher chat BASE --lora": "needs an adapter: test_lora runs with some",
    "clocher convert MODEL OUT.gguf": "the model here needs --pre: test_exports writes some",
    "clocher serve": "serves until it is ended: test_serve does it",
    "CLOCHER_API_KEY=... clocher serve": "serves until it is ended: test_serve does it",
    "clocher ray": "needs the extra ray, and half a minute: test_ray_cluster runs both",
    "python tests/": "minutes: test_fuzz_readers and test_attack_runs run fewer",
    "python scripts/verify_hf_generation_ids.py": "needs transformers: test_verify runs it",
    "python scripts/download_gpt_oss_20b.py": "needs the network: test_hub has a hub of its own",
    'eval "$(_CLOCHER_COMPLETE': "of a shell that is used",
    "_CLOCHER_COMPLETE=bash_source clocher >>": "writes into a home",
}
"""How lines begin that are not run here, each with the reason."""


def lines_of(block: Block) -> list[str]:
    """Return the commands of a block, each in one line, without the remarks behind them."""
    joined = re.sub(r"\\\n\s*", "", block.text)
    return [re.sub(r"\s{2,}# .*", "", line).strip() for line in joined.splitlines()]


PLAIN = [block for block in BLOCKS if block.language == ""]
LINES = sorted(
    {
        (block.page.name, line)
        for block in PLAIN
        for line in lines_of(block)
        if block.page.name != GUIDE and (OURS.match(line) or " | clocher " in line)
    }
)
RUN = [(page, line) for page, line in LINES if not line.startswith(tuple(NOT_RUN))]


def place_at(folder: Path) -> dict[str, str]:
    """Make what the lines name, and return the environment that they run in."""
    (folder / "bin").mkdir()
    program = folder / "bin" / "clocher"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m clocher_runtime "$@"\n')
    program.chmod(0o755)
    for name in ("scripts", "bench"):
        (folder / name).symlink_to(ROOT / name)
    for name in ("MODEL", "DIR"):
        (folder / name).symlink_to(LLAMA)
    for name in ("story.txt", "FILE"):
        (folder / name).write_text("import os\nimport re\n", encoding="utf-8")
    environment = clean_environment(CLOCHER_MAX_NEW="8", HF_HUB_CACHE=str(folder / "hub"))
    path = [folder / "bin", Path(sys.executable).parent, environment["PATH"]]
    return environment | {"PATH": os.pathsep.join(map(str, path))}


def shell(text: str, folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=folder,
        env=environment,
        input="import os\n",
        capture_output=True,
        text=True,
        timeout=250,
    )


def test_every_reason_is_of_a_line() -> None:
    every = [line for block in PLAIN for line in lines_of(block)]
    assert [s for s in NOT_RUN if not any(line.startswith(s) for line in every)] == []
    assert len(NOT_RUN) == 18 and len(RUN) > 10


@pytest.mark.parametrize(("page", "line"), RUN)
def test_a_line_of_a_page_runs(page: str, line: str, tmp_path: Path) -> None:
    line = line.replace("git diff |", "echo x |")
    environment = place_at(tmp_path)
    if line.startswith("clocher ") and (words := plain(line)) is not None:
        code, out, err = here(*words, text="import os\n", cwd=tmp_path, env=environment)
        assert code == 0, err
    else:
        done = shell(line, tmp_path, environment)
        assert done.returncode == 0, done.stderr
        target = re.search(r"> ?(\w+\.txt)", line)
        out = (tmp_path / target[1]).read_text(encoding="utf-8") if target else done.stdout
    first = out.partition("\n")[0]
    assert first.startswith('{"schema": "clocher.run/1", "status": "ok"') == (" run" in line)
    assert first.startswith("Usage: clocher ") == line.endswith("--help")
    assert out.strip()


@pytest.mark.slow  # test_docs runs its last block, test_converters each of its commands
def test_the_blocks_of_the_guide_run_one_after_the_other(tmp_path: Path) -> None:
    """The model is the embedded one, under the name and in the place that the guide has."""
    environment = place_at(tmp_path)
    (tmp_path / "quant").mkdir()
    model = tmp_path / "models" / "gpt-oss-20b" / "hf"
    shutil.copytree(GPTOSS, model)
    environment["MODEL_DIR"] = str(model.parent)
    ran = 0
    for block in PLAIN:
        ours = [line for line in lines_of(block) if OURS.match(line)]
        if block.page.name != GUIDE or not ours or ours[0].startswith(tuple(NOT_RUN)):
            continue
        done = shell(block.text, tmp_path, environment)
        assert done.returncode == 0, f"{block.text}\n{done.stderr}"
        ran += 1
    assert ran == 9
