"""Text work off the event loop: short texts in a thread, others in a process with limits."""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from clocher_kernels.errors import ClocherError, UsageError
from clocher_runtime.checkpoints import Checkpoint
from clocher_runtime.engine.load import model_spec
from clocher_runtime.serve.errors import invalid
from clocher_runtime.text.answers import AnswerReader, make_reader
from clocher_runtime.text.chat_template import conversation_of
from clocher_runtime.text.harmony import harmony_stop_ids
from clocher_runtime.text.tokenizer import Tokenizer

HERE_CHARS = 1 << 14
"""Longer texts are tokenised in another process: the library blocks all Python threads."""
_TAIL_CHARS = 64
T = TypeVar("T")


class PromptRoom:
    """A model's tokenizer and template, in a thread; raises ModelError if they cannot be used."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        config = checkpoint.tokenizer_config
        self.tokenizer = Tokenizer(checkpoint.tokenizer_source, config, here=HERE_CHARS)
        self.style = self.tokenizer.style
        spec = model_spec(checkpoint)
        more = harmony_stop_ids(self.tokenizer) if self.style == "harmony" else ()
        self.vocab_size = spec.vocab_size  # the tokenizer may have fewer
        self.stop_ids = tuple(dict.fromkeys((*spec.eos_ids, *more)))
        self._thread = ThreadPoolExecutor(1, "text")
        self._thread.submit(self._warm)

    def _warm(self) -> None:
        """Start the template process, so that the first conversation does not wait for it."""
        with suppress(ClocherError):
            self.tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}])

    def close(self) -> None:
        """Stop the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def chat(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        context: int,
    ) -> tuple[list[int], str]:
        """Return the ids of a conversation and the end of its text; raises UsageError."""
        if not self.tokenizer.chat_template:
            raise UsageError("this model has no chat template; send plain text to /v1/completions")

        def work() -> tuple[list[int], str]:
            text = self.tokenizer.apply_chat_template(
                conversation_of(messages, self.style), tools=tools or None, variables=variables
            )
            ids = self.tokenizer.encode(text, special=False, room=context)
            return ids, text[-_TAIL_CHARS:]

        return await self.apart(work)

    async def ids(self, prompt: str | list[int], special: bool, context: int) -> list[int]:
        """Return the ids of a prompt; `special` adds BOS and the like."""
        if not isinstance(prompt, str):
            return prompt
        encode = self.tokenizer.encode_prompt if special else self.tokenizer.encode
        more = {} if special else {"special": False}
        return await self.apart(lambda: encode(prompt, room=context, **more))

    def reader(
        self, tools: Sequence[Mapping[str, Any]], tail: str, ends: Collection[int]
    ) -> AnswerReader:
        """Return a reader for the answer to a prompt that ends with `tail`."""
        return make_reader(self.tokenizer, self.style, tools=tools, prompt_tail=tail, ends=ends)

    async def apart(self, work: Callable[[], T]) -> T:
        """Run `work` in the text thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def room_for(
    ids: Sequence[int], wanted: int | None, longest: int, vocab_size: int, param: str
) -> int:
    """Return how many tokens may follow a prompt, `wanted` or what fits in `longest`.

    Raises ApiError about the field `param`: no room, or an id that is not below `vocab_size`.
    """
    if not ids:
        raise invalid(f"{param} has no tokens; give it at least one", param)
    if max(ids) >= vocab_size:
        raise invalid(
            f"{param}: token id {max(ids)} out of range (vocabulary size {vocab_size})", param
        )
    if len(ids) + (wanted or 0) > longest or (wanted is None and len(ids) >= longest):
        asked = f"{len(ids)} tokens in the {param}"
        asked += f" and {wanted} in the answer" if wanted is not None else ""
        raise invalid(
            f"This model's maximum context length is {longest} tokens, but the request has {asked};"
            " shorten one of them",
            param,
            "context_length_exceeded",
        )
    return longest - len(ids) if wanted is None else wanted
