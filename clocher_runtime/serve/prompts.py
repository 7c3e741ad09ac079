"""Text work of a server: templates, tokens and back. None of it keeps the event loop waiting.

Long texts, unusual tokenizers and templates have a process of their own with bounds on time and
memory (`text.text_process`); a thread waits for it. Short texts take a millisecond in that thread.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from clocher_kernels.errors import ClocherError
from clocher_runtime.checkpoints import Checkpoint
from clocher_runtime.engine.load import model_spec
from clocher_runtime.serve.errors import context_too_long, invalid
from clocher_runtime.text.answers import AnswerReader, AnswerStyle, answer_style, make_reader
from clocher_runtime.text.conversation import conversation_of
from clocher_runtime.text.harmony import harmony_stop_ids
from clocher_runtime.text.tokenizer import Tokenizer

HERE_CHARS = 1 << 14
"""Longer texts are tokenised elsewhere: the library lets no other Python thread run meanwhile."""

_TAIL_CHARS = 64
T = TypeVar("T")


class PromptRoom:
    """What the server knows of text.

    Args:
        checkpoint: of the model; its tokenizer and its template are read.

    Attributes:
        tokenizer: text to ids and back.
        style: how the model marks reasoning and calls.
        vocab_size: tokens of the model; the tokenizer may have fewer.
        stop_ids: tokens that end an answer.

    Raises:
        ModelError: the tokenizer, or the model's configuration, cannot be used.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        config = checkpoint.tokenizer_config
        self.tokenizer = Tokenizer(checkpoint.tokenizer_source, config, here=HERE_CHARS)
        self.style: AnswerStyle = answer_style(self.tokenizer, self.tokenizer.chat_template)
        spec = model_spec(checkpoint)
        more = harmony_stop_ids(self.tokenizer) if self.style == "harmony" else ()
        self.vocab_size = spec.vocab_size
        self.stop_ids = tuple(dict.fromkeys((*spec.eos_ids, *more)))
        self._thread = ThreadPoolExecutor(1, "text")
        self._thread.submit(self._warm)

    def _warm(self) -> None:
        """Start the process for templates, so that the first conversation does not wait for it."""
        with suppress(ClocherError):
            self.tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}])

    def close(self) -> None:
        """Take no more work."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        context: int,
    ) -> tuple[list[int], str]:
        """Return the ids of a conversation, and how its text ends.

        Raises:
            UsageError: the model has no template, or it refuses these messages.
            ApiError: the conversation is longer than the context.
        """

        def work() -> tuple[list[int], str]:
            text = self.tokenizer.apply_chat_template(
                conversation_of(messages, self.style), tools=tools or None, variables=variables
            )
            ids = self._encode(text, False, context)
            return ids, text[-_TAIL_CHARS:]

        return await self.apart(work)

    async def ids(self, prompt: str | list[int], special: bool, context: int) -> list[int]:
        """Return the ids of a prompt.

        Args:
            prompt: text, or the ids.
            special: add what the model expects around a text.
            context: tokens that there is room for.

        Raises:
            UsageError: the text cannot be tokenised.
            ApiError: the text is longer than the context. Ids are looked at by `room_for`.
        """
        if isinstance(prompt, str):
            return await self.apart(lambda: self._encode(prompt, special, context))
        return prompt

    def _encode(self, text: str, special: bool, context: int) -> list[int]:
        if special:
            return self.tokenizer.encode_prompt(text, room=context)
        return self.tokenizer.encode(text, special=False, room=context)

    def reader(self, tools: bool, tail: str, ends: Collection[int]) -> AnswerReader:
        """Return what reads an answer.

        Args:
            tools: whether the model may call functions.
            tail: how the prompt ends.
            ends: tokens that end it.
        """
        return make_reader(self.tokenizer, self.style, tools=tools, prompt_tail=tail, ends=ends)

    async def apart(self, work: Callable[[], T]) -> T:
        """Do some work in the thread for text."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def room_for(
    ids: Sequence[int], wanted: int | None, longest: int, vocab_size: int, param: str
) -> int:
    """Return how many tokens may follow a prompt.

    Args:
        ids: the prompt.
        wanted: tokens asked for; None: as many as there is room for.
        longest: tokens of a sequence.
        vocab_size: ids are below it.
        param: where the prompt came from.

    Raises:
        ApiError: there is no room for it, or an id is no token.
    """
    if not ids:
        raise invalid(f"{param} has no tokens; give it at least one", param)
    if max(ids) >= vocab_size:
        raise invalid(f"{param} has the token {max(ids)}; the last one is {vocab_size - 1}", param)
    if len(ids) + (wanted or 0) > longest or (wanted is None and len(ids) >= longest):
        raise context_too_long(len(ids), wanted, longest, param)
    return longest - len(ids) if wanted is None else wanted
