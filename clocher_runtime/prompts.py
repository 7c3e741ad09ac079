"""The prompts of a run: a flag, standard input, or a file."""

import json
import sys
from pathlib import Path

from clocher_kernels.errors import UsageError
from clocher_runtime.config import RunConfig

DEFAULT_PROMPT = "def fibonacci(n):\n"
MAX_BYTES = 64 << 20


def read_prompts(config: RunConfig) -> list[str]:
    """Return the prompt texts of a run whose prompt is not given as token ids.

    Raises:
        UsageError: the file or standard input holds no usable prompt.
    """
    if config.prompts_file is not None:
        return read_prompts_file(config.prompts_file)
    if config.prompt == "-":
        try:
            text = sys.stdin.read(MAX_BYTES + 1)
        except UnicodeDecodeError as error:
            raise UsageError(f"--prompt -: standard input is not UTF-8: {error}") from None
        if not 0 < len(text) <= MAX_BYTES:
            raise UsageError(f"--prompt -: expected 1 to {MAX_BYTES} characters on standard input")
        return [text]
    return [DEFAULT_PROMPT if config.prompt is None else config.prompt]


def read_prompts_file(path: Path) -> list[str]:
    """Return the prompts of a file in their order.

    A file whose name ends in `.jsonl` has one JSON object with a `prompt` per line; any other
    file has one prompt per line. Blank lines do not count.

    Raises:
        UsageError: the file cannot be read, is larger than 64 MiB, not UTF-8, has no prompt, or
            has a line that is not a prompt.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"prompts file {path}: {error.strerror}") from None
    if len(data) > MAX_BYTES:
        raise UsageError(f"prompts file {path}: larger than {MAX_BYTES} bytes; split it")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"prompts file {path}: not UTF-8: {error}") from None
    # Not splitlines(): a prompt may contain form feeds and Unicode line separators.
    numbered = [(n, line.rstrip("\r")) for n, line in enumerate(text.split("\n"), start=1)]
    lines = [(n, line) for n, line in numbered if line.strip()]
    if not lines:
        raise UsageError(f"prompts file {path}: no prompts; put one on each line")
    if path.suffix != ".jsonl":
        return [line for _, line in lines]
    return [_prompt_of(line, f"prompts file {path}, line {n}") for n, line in lines]


def _prompt_of(line: str, where: str) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: not JSON: {error}") from None
    prompt = value.get("prompt") if isinstance(value, dict) else None
    if not isinstance(prompt, str):
        raise UsageError(f'{where}: expected an object with text under "prompt"')
    return prompt
