"""The command `clocher-serve`: flags, messages, exit codes."""

import asyncio
import json
import logging
import os
import sys
from importlib.util import find_spec
from typing import Any

from clocher_kernels.errors import UsageError
from clocher_runtime.command.clocher_run import PRECEDENCE
from clocher_runtime.command.console import Console, is_terminal
from clocher_runtime.command.flags import script
from clocher_runtime.config.commands import ServeConfig
from clocher_runtime.exit_codes import ExitCode

ABOUT = """Serve a language model over HTTP: OpenAI's API, Anthropic's messages, a chat page at /.

It listens on this machine only, unless --host names another address. When the model is loaded,
standard output gets the address, as one line of JSON where it is no terminal; messages go to
standard error. SIGTERM and Ctrl-C let running requests end first."""


@script(
    "clocher-serve",
    kind=ServeConfig,
    help=ABOUT,
    epilog=PRECEDENCE,
    examples=(
        ("SmolLM2-135M-Instruct, fetched once (93 MB)", "clocher-serve"),
        (
            "your model: a Hugging Face directory, a GGUF file, or owner/name once it is pulled",
            "clocher-serve MODEL",
        ),
        ("float weights quantised to 4 bits at load", "clocher-serve MODEL --precision int4w"),
        ("a LoRA adapter beside its base", "clocher-serve MODEL --lora sql=ADAPTER"),
        ("16 texts side by side, 8192 tokens each", "clocher-serve --batch 16 --context 8192"),
        (
            "for other machines, with a key",
            "export CLOCHER_API_KEY=$(openssl rand -hex 16); clocher-serve --host 0.0.0.0",
        ),
        (
            "a question",
            "curl -s localhost:8000/v1/chat/completions -H 'Content-Type: application/json' -d "
            '\'{"messages":[{"role":"user","content":"Hello"}]}\'',
        ),
    ),
    exit_codes={
        ExitCode.OK: "ended by a signal, after what ran",
        ExitCode.USAGE: "bad flag or variable, or an extra is not installed",
        ExitCode.DEVICE: "device or address not available; the engine ended three times",
        ExitCode.TERMINATED: "ended at once by a second signal",
    },
)
def clocher_serve(console: Console, config: ServeConfig) -> int:
    """Serve until a signal comes."""
    _require_extra()
    logging.basicConfig(format=f"{console.name}: %(message)s", level=logging.WARNING)
    from clocher_runtime.command.fetching import with_model
    from clocher_runtime.serve.life import Life

    return asyncio.run(Life(with_model(config, console), console.say, _announce).run())


def _announce(facts: dict[str, Any]) -> None:
    line = json.dumps(facts)
    if is_terminal(sys.stdout):
        line = f"{facts['model']}: {facts['url']} (API: {facts['url']}/v1); Ctrl-C ends it"
    try:
        print(line, flush=True)  # noqa: T201 - what the starter of the server waits for
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _require_extra() -> None:
    needed = ("llguidance", "prometheus_client", "pydantic", "starlette", "uvicorn")
    if missing := [name for name in needed if find_spec(name) is None]:
        raise UsageError(
            f"the server needs {missing[0]}, which is not installed; pip install '.[serve]' in a "
            "clone of Clocher"
        )


def main() -> int:
    """Run `clocher-serve`, and return its exit code."""
    return clocher_serve.run()


if __name__ == "__main__":
    sys.exit(main())
