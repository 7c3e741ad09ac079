"""One turn of a conversation: messages in, the answer in parts, and its numbers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from clocher_kernels.errors import UsageError
from clocher_runtime.engine.arguments import Sampling
from clocher_runtime.engine.generation import Generation
from clocher_runtime.engine.session import Session
from clocher_runtime.text.answers import AnswerReader, Delta, make_reader, message_of
from clocher_runtime.text.chat_template import Message, checked_template, conversation_of
from clocher_runtime.text.harmony import harmony_stop_ids
from clocher_runtime.text.tokenizer import Tokenizer

Ending = Literal["", "stop", "length", "full", "stopped"]


class NoRoom(UsageError):
    """The conversation does not fit the context."""


class TurnNumbers(NamedTuple):
    """Numbers of an answer; times in nanoseconds."""

    prompt_tokens: int  # of the conversation before the answer
    computed: int  # not found in the cache
    tokens: int  # generated, the stop token included
    first_ns: int  # from the question to the first token; 0 if there was none
    decode_tokens: int  # after the first token
    decode_ns: int  # of the decode steps
    per_pass: float  # mean tokens per forward; NaN without drafts


class ChatModel:
    """Answers messages with a model, by its chat template or by continuing the last message.

    The session generates for this object only while it answers. `variables` are the template's.
    """

    def __init__(
        self,
        session: Session,
        tokenizer: Tokenizer,
        *,
        by_template: bool,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        self.session, self.by_template = session, by_template
        self._tokenizer, self._variables = tokenizer, variables or {}
        self.style = tokenizer.style if by_template else "plain"
        self._ends = frozenset(session.model.spec.eos_ids)
        if self.style == "harmony":
            self._ends |= harmony_stop_ids(tokenizer)

    def check_template(self) -> None:
        """Compile the template in its process; raises FormatError, UsageError (variables)."""
        if self.by_template:
            checked_template(self._tokenizer.chat_template).settled(self._variables)

    @property
    def larger_context(self) -> str:
        """The hint about a larger context, for messages; may be ""."""
        most = self.session.model.spec.max_positions
        return f", or raise --context (at most {most})" if self.session.longest < most else ""

    def answer(
        self, messages: Sequence[Message], sampling: Sampling, max_new: int | None = None
    ) -> "Answer":
        """Return the answer to the last message, generated as its parts are read.

        `max_new` None: as many tokens as fit. Raises NoRoom, UsageError, FormatError.
        """
        began = self.session.scheduler.times.now()
        ids, tail = self._prompt(messages)
        room = self.session.longest - len(ids)
        if room < 1:
            raise NoRoom(
                f"{len(ids)} tokens with all that was said, and the context holds "
                f"{self.session.longest}; shorten the text{self.larger_context}"
            )
        # A harmony call has its function in the header, lost unless parsed as a call.
        # Other formats write calls as text, which is shown and kept: no tools are offered.
        tools = self.style == "harmony"
        reader = make_reader(
            self._tokenizer, self.style, tools=tools, prompt_tail=tail, ends=self._ends
        )
        most = room if max_new is None else min(max_new, room)
        generation = self.session.generate([ids], most, sampling, self._ends)
        return Answer(self.session, reader, ids, generation, began)

    def _prompt(self, messages: Sequence[Message]) -> tuple[list[int], str]:
        room = self.session.longest
        if not self.by_template:
            return self._tokenizer.encode_prompt(messages[-1]["content"], room=room), ""
        text = self._tokenizer.apply_chat_template(
            conversation_of(messages, self.style), variables=self._variables
        )
        return self._tokenizer.encode(text, special=False, room=room), text


class Answer:
    """An answer as it is generated; made by `ChatModel.answer`.

    `prompt` and `ids` are token ids, the final stop token included. `ending`: "stop" (by the
    model), "length" (max_new), "full" (context), "stopped" (by the caller); "" while it runs.
    """

    def __init__(
        self,
        session: Session,
        reader: AnswerReader,
        prompt: list[int],
        generation: Generation,
        began: int,
    ) -> None:
        self.prompt, self.ids = prompt, list[int]()
        self.ending: Ending = ""
        self._session, self._reader, self._generation = session, reader, generation
        self._began, self._first_ns = began, 0
        self._before = replace(session.scheduler.sums)
        self._guessed = session.speculation().counts
        self._said: list[Delta] = []

    def parts(self, stopped: Callable[[], bool] = lambda: False) -> Iterator[Delta]:
        """Yield the parts as tokens come, once; ends at the first step where `stopped` is true."""
        session, generation = self._session, self._generation
        try:
            while (tokens := generation.poll()) is not None:
                for token in tokens:
                    if not self.ids:
                        self._first_ns = session.scheduler.times.now() - self._began
                    self.ids.append(token.id)
                    if token.finish:
                        is_full = len(self.prompt) + len(self.ids) >= session.longest
                        full = token.finish == "length" and is_full
                        self.ending = "full" if full else token.finish
                    yield from self._noted(self._reader.push(token.id))
                if not tokens:
                    if stopped():
                        self.ending = "stopped"
                        break
                    session.step()
        finally:
            generation.close()
        yield from self._noted(self._reader.finish())

    def _noted(self, deltas: list[Delta]) -> list[Delta]:
        self._said += deltas
        return deltas

    @property
    def message(self) -> Message:
        """The answer so far, as a message of the conversation."""
        calls = {d.index: f"call_{d.index}" for d in self._said if d.kind == "tool_call"}
        return message_of(self._said, calls)

    @property
    def numbers(self) -> TurnNumbers:
        """The numbers so far."""
        sums, before = self._session.scheduler.sums, self._before
        return TurnNumbers(
            prompt_tokens=len(self.prompt),
            computed=sums.prompt_tokens - before.prompt_tokens,
            tokens=len(self.ids),
            first_ns=self._first_ns,
            decode_tokens=sums.decode_tokens - before.decode_tokens,
            decode_ns=sums.decode_ns - before.decode_ns,
            per_pass=self._session.speculation(self._guessed).tokens_per_forward,
        )
