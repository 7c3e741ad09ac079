"""Text work off the event loop: short texts in a thread, others in a process with limits."""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from clocher_kernels.errors import ClocherError, PromptTooLong, UsageError
from clocher_runtime.checkpoints import Checkpoint
from clocher_runtime.engine.diffusing import Diffusing, among, of_call
from clocher_runtime.engine.load import model_spec
from clocher_runtime.serve.errors import ApiError, invalid
from clocher_runtime.serve.messages import Ready
from clocher_runtime.serve.requests import ChatRequest, CompletionRequest, TokenizeRequest
from clocher_runtime.text.answers import AnswerReader, make_reader, opens_thoughts
from clocher_runtime.text.call_styles import AnswerStyle
from clocher_runtime.text.chat_template import conversation_of
from clocher_runtime.text.grammar import Grammars
from clocher_runtime.text.harmony import harmony_stop_ids
from clocher_runtime.text.tokenizer import Tokenizer

HERE_CHARS = 1 << 14
"""Longer texts are tokenised in another process: the library blocks all Python threads."""
_TAIL_CHARS = 64
T = TypeVar("T")


class PromptRoom:
    """A model's tokenizer, template and grammars, in threads; raises ModelError: unusable."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        config = checkpoint.tokenizer_config
        self.tokenizer = Tokenizer(checkpoint.tokenizer_source, config, here=HERE_CHARS)
        self.style = self.tokenizer.style
        spec = model_spec(checkpoint)
        more = harmony_stop_ids(self.tokenizer) if self.style == "harmony" else ()
        # With the names of special tokens as text, where files may have their settings too.
        settings = {
            "eos_token": None,
            **config,
            "chat_template": self.tokenizer.chat_template or None,
        }
        self.info = {
            name: value["content"] if isinstance(value, dict) and "content" in value else value
            for name, value in settings.items()
        }
        self.pooling = checkpoint.pooling or "last"
        self.stop_ids = tuple(dict.fromkeys((*spec.eos_ids, *more)))
        # Not the tokenizer's vocabulary, which may be smaller.
        self.grammars = Grammars(checkpoint, spec.vocab_size, self.stop_ids)
        self._thread = ThreadPoolExecutor(1, "text")
        self._thread.submit(self._warm)

    def _warm(self) -> None:
        """Start the template process, so that the first conversation does not wait for it."""
        with suppress(ClocherError):
            self.tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}])

    def close(self) -> None:
        """Stop the threads."""
        self.grammars.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def chat(
        self, asked: ChatRequest | TokenizeRequest, context: int
    ) -> tuple[list[int], str]:
        """Return the ids of a conversation and the end of its text; raises UsageError."""
        if not self.tokenizer.chat_template:
            raise UsageError("this model has no chat template; send plain text to /v1/completions")

        def work() -> tuple[list[int], str]:
            conversation = conversation_of(asked.dialogue(), self.style)
            variables, tail = asked.template_variables, _TAIL_CHARS
            goes_on = not asked.continue_final_message
            text = self.tokenizer.apply_chat_template(
                conversation,
                tools=asked.functions or None,
                add_generation_prompt=variables.get("add_generation_prompt", goes_on),
                variables=variables,
            )
            if asked.continue_final_message:
                text = _until_end_of(conversation[-1]["content"], text)
                tail += len(conversation[-1]["content"])  # with what opened the message
            return self.tokenizer.encode(text, special=False, room=context), text[-tail:]

        return await self.apart(work)

    async def chat_that_fits(
        self, asked: ChatRequest, longest: int, vocab_size: int
    ) -> tuple[list[int], str]:
        """Return what `chat` does, without as many of the oldest turns as do not fit in `longest`.

        A turn begins with a message of the user. The last one stays, and so does what is not a
        turn: messages of the system, or of the developer.
        """

        def cut(first: int) -> ChatRequest:
            told = [m for m in asked.messages[:first] if m.role in ("system", "developer")]
            return asked.model_copy(update={"messages": [*told, *asked.messages[first:]]})

        async def fitting(first: int) -> tuple[list[int], str] | None:
            try:
                ids, tail = await self.chat(cut(first), longest)
                room_for(ids, asked.budget, longest, vocab_size, "input")
            except (ApiError, PromptTooLong):
                return None
            return ids, tail

        starts = [at for at, message in enumerate(asked.messages) if message.role == "user"]
        found = await fitting(0)
        low, high = 0, 0 if found else len(starts)
        while low < high:
            middle = (low + high) // 2
            if fit := await fitting(starts[middle]):
                found, high = fit, middle
            else:
                low = middle + 1
        return found or await self.chat(cut(starts[-1] if starts else 0), longest)

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


def _until_end_of(content: str, text: str) -> str:
    """Return a conversation's text up to the end of its last message, as transformers cuts it."""
    at = text.rfind(content.strip())
    if at < 0:
        raise UsageError(
            "continue_final_message: the chat template of this model does not write the last "
            "message as it is; leave it out"
        )
    kept = content.lstrip() if text.startswith(content.lstrip(), at) else content.strip()
    return text[: at + len(kept)]


def room_for(
    ids: Sequence[int],
    wanted: int | None,
    longest: int,
    vocab_size: int,
    param: str,
    where: str = "",
) -> int:
    """Return how many tokens may follow a prompt, `wanted` or what fits in `longest`.

    Raises ApiError about the field `param`: no room, or an id that is not below `vocab_size`;
    `where`: all that the tokens come from, if that is not `param` alone.
    """
    if not ids:
        raise invalid(f"{param} has no tokens; give it at least one", param)
    if max(ids) >= vocab_size:
        raise invalid(
            f"{param}: token id {max(ids)} out of range (vocabulary size {vocab_size})", param
        )
    if len(ids) + (wanted or 0) > longest or (wanted is None and len(ids) >= longest):
        rest = f" and {wanted} in the answer; shorten one of them" if wanted else "; shorten them"
        raise invalid(
            f"This model's maximum context length is {longest} tokens, but the request has "
            f"{len(ids)} tokens in the {where or param}{rest}",
            param,
            "context_length_exceeded",
        )
    return longest - len(ids) if wanted is None else wanted


def denoised(ready: Ready, asked: str | None) -> Diffusing | None:
    """Return how a request's blocks are denoised; None: one token at a time. Raises ApiError."""
    own = None
    try:
        if ready.blocks is not None:
            own = among(ready.blocks, ready.about["diffusion"])
        return of_call(own, asked)
    except UsageError as error:
        raise invalid(str(error), "diffusion") from None


def grammar_of(
    asked: ChatRequest | CompletionRequest, style: AnswerStyle, tail: str, blocks: Diffusing | None
) -> dict[str, Any] | None:
    """Return what the answer has to follow, for `Grammars`; raises ApiError if it cannot be."""
    if isinstance(asked, ChatRequest) and asked.must_call:
        functions = [each["function"] for each in asked.functions]
        spec = {"kind": "tools", "value": functions, "several": asked.may_call_again}
    elif asked.constraint is not None:
        ((kind, value),) = asked.constraint.items()
        spec = {"kind": kind, "value": value}
    else:
        return None
    if blocks is not None and blocks.rule is not None:
        raise invalid(
            f"diffusion is {blocks.name}, which does not generate tokens in order, so the "
            "answer cannot be constrained; use lossless or off where the model has them, "
            "or leave response_format, guided_... and tool_choice out",
            "diffusion",
        )
    return {**spec, "style": style, "opened": opens_thoughts(tail)}
