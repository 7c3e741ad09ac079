"""How answers are shown: their parts as they are made, why they ended, what they took."""

from collections.abc import Iterable

from clocher_runtime.engine import timing
from clocher_runtime.subcommands.chat_screen import Screen
from clocher_runtime.subcommands.chat_settings import ChatConfig
from clocher_runtime.text.chat_turn import Answer, ChatModel
from clocher_runtime.text.deltas import Delta, DeltaKind

MAKE_ROOM = "/undo takes the last turn back, /reset begins a new conversation"
"""What to do when the context is full."""


class View:
    """Shows answers.

    Args:
        answers: gets what the model says.
        notes: gets everything else.
        config: what is shown.
    """

    def __init__(self, answers: Screen, notes: Screen, config: ChatConfig) -> None:
        self._answers, self._notes = answers, notes
        self._hide_thinking, self._no_stats = config.hide_thinking, config.no_stats

    def echo(self, text: str) -> None:
        """Repeat a text that is gone on with, for whoever reads it on a terminal."""
        if self._answers.is_terminal:
            self._answers.write(text, dim=True)

    def end_line(self) -> None:
        """Begin a new line unless one has just begun."""
        self._answers.end_line()

    def show(self, parts: Iterable[Delta]) -> None:
        """Write an answer as it is made: thoughts dim, and only on a terminal."""
        out, last = self._answers, None
        for delta in parts:
            if delta.kind == "reasoning":
                self._think(delta.text, begins=last != "reasoning")
            else:
                if last is not None and (delta.kind != last or delta.kind == "tool_call"):
                    self._part(last, delta.kind)
                out.write(f"[calls {delta.text}] " if delta.kind == "tool_call" else delta.text)
            last = delta.kind
        out.end_line()

    def _part(self, before: DeltaKind, now: DeltaKind) -> None:
        """Set two parts of an answer apart."""
        if now == "arguments" or (before == "reasoning" and not self._answers.is_terminal):
            return
        self._answers.end_line()
        if before == "reasoning" and not self._hide_thinking:
            self._answers.write("\n")

    def _think(self, text: str, *, begins: bool) -> None:
        if not self._answers.is_terminal:
            return
        if begins:
            self._answers.line("(thinking)", dim=True)
        if not self._hide_thinking:
            self._answers.write(text, dim=True)

    def tell(self, answer: Answer, model: ChatModel) -> None:
        """Say how an answer ended, if not by itself, and what it took."""
        numbers, longest = answer.numbers, model.session.longest
        if answer.ending == "full":
            self._notes.line(
                f"the context is full: {longest} tokens; {MAKE_ROOM}{model.larger_context}"
            )
        elif answer.ending == "length" and model.by_template:
            self._notes.line(f"cut after {numbers.tokens} tokens; /set max_new N allows more")
        elif answer.ending == "stopped":
            kept = "" if answer.ids else " before the first token; the message is not kept"
            self._notes.line(f"stopped{kept}", dim=True)
        if self._no_stats:
            return
        speed = timing.per_second(numbers.decode_tokens, numbers.decode_ns)
        shown = [
            f"{numbers.tokens} tokens",
            f"{speed:.1f} tok/s" if numbers.decode_tokens else "- tok/s",
            *([f"{numbers.per_pass:.1f} a pass"] if numbers.per_pass > 1.05 else []),
            f"first token {numbers.first_ns / timing.NS_PER_MS:.0f} ms",
            f"prompt {numbers.prompt_tokens} ({numbers.computed} computed)",
            f"context {numbers.prompt_tokens + numbers.tokens} of {longest}",
        ]
        self._notes.line(f"[{' | '.join(shown)}]", dim=True)
