"""The command `clocher-run`: arguments and environment in, one JSON line and an exit code out."""

import sys

from clocher_runtime.command.console import RunConsole, Screen
from clocher_runtime.command.flags import script
from clocher_runtime.config.commands import RunConfig

NAME = "clocher-run"

ABOUT = """Complete text with a language model and report how fast it went.

On a terminal it shows the text. Where standard output is a file or a pipe, or with --json, it gets
exactly one line of JSON, also when the run fails, and the text goes to standard error."""

EXAMPLES = (
    ("SmolLM2-135M-Instruct, fetched once (93 MB), tells a story", "clocher-run"),
    ("another prompt, 100 tokens", 'clocher-run "The best thing about rain" --max-new 100'),
    (
        "your model: a Hugging Face directory, a GGUF file, or owner/name once it is pulled",
        'clocher-run MODEL "Once upon a time"',
    ),
    ("a file as the prompt", "clocher-run MODEL < FILE"),
    ("float weights quantised to 4 bits at load", "clocher-run MODEL --precision int4w"),
    ("every line of a file, four at a time", "clocher-run --prompts-file FILE --batch 4"),
    ("only the numbers, one per line", "clocher-run 2>/dev/null | python3 -m json.tool"),
    ("walk over 64 MB of the weights per token", "IE_BYTES_PER_TOKEN=64000000 clocher-run"),
)

PRECEDENCE = """A flag is stronger than a variable, a variable is stronger than the file of
--config, and the file is stronger than the default."""


@script(
    NAME,
    kind=RunConfig,
    console=RunConsole,
    help=ABOUT,
    examples=EXAMPLES,
    epilog=f"""{PRECEDENCE}

A hint is checked and accepted; this version does not act on it. The JSON line lists it under
hints_ignored unless it asks for what happens anyway.""",
)
def clocher_run(console: RunConsole, config: RunConfig) -> None:
    """Run, and write the line."""
    console.as_json = console.as_json or config.json
    if not console.as_json:
        console.texts = Screen(sys.stdout, may_be_lost=True)
    # NumPy and its users are imported after the flags are checked.
    from clocher_runtime.command.fetching import with_model

    config = with_model(config, console)
    from clocher_runtime.command.completions import summary
    from clocher_runtime.command.run import run

    line = run(config, console)
    console.say(summary(line))
    console.finish(line)
