"""Text to token ids and back; the only part of the runtime that knows text."""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from clocher_kernels.errors import FormatError, OutOfMemory, PromptTooLong, UsageError
from clocher_runtime.checkpoints.checkpoint import MadeTokenizer
from clocher_runtime.config.values import shown
from clocher_runtime.engine.arguments import listed
from clocher_runtime.text import Refused
from clocher_runtime.text.call_styles import AnswerStyle, style_of
from clocher_runtime.text.tokenizer_library import LibraryTokenizer, TokenizerApart, inspect

MAX_TEXT_CHARS = 8 << 20
LONG_TEXT_CHARS = 1 << 18
"""Longer texts are tokenised in another process, which can be interrupted."""

ROOMY_TOKEN_CHARS = 64
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
_REASONING = ("reasoning_content", "thinking", "reasoning")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MOST_BYTES = 4

_BYTE_FALLBACK = re.compile("<0x([0-9A-F]{2})>")
_SHOWN = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), 256)]
_HIDDEN = [byte for byte in range(256) if byte not in _SHOWN]
BYTE_OF = {chr(b): b for b in _SHOWN} | {chr(256 + n): b for n, b in enumerate(_HIDDEN)}
"""Character of a byte-level vocabulary -> its byte, as in GPT-2."""


class Tokenizer:
    """A tokenizer.json, with the settings of tokenizer_config.json (`config`).

    `tokenizer_json` is a path or the contents. Files and work are limited (docs/limits.md). Texts
    of up to `here` characters are tokenised in this process, which blocks other Python threads.
    Raises ModelNotFound, FormatError, OutOfMemory.
    """

    def __init__(
        self,
        tokenizer_json: Path | bytes | MadeTokenizer,
        config: Mapping[str, Any],
        here: int = LONG_TEXT_CHARS,
    ) -> None:
        self._here = here
        found = inspect(tokenizer_json)
        self._chars_of_token = max(found.longest, ROOMY_TOKEN_CHARS)
        self._inner: LibraryTokenizer | TokenizerApart
        self._for_long_texts: TokenizerApart | None = None
        self._special = {
            name: _content(name, config[name]) for name in _SPECIAL if config.get(name) is not None
        }
        try:
            self._inner = found.load()
            self._prefix = self._ids_of("bos_token") if config.get("add_bos_token") is True else []
            self._suffix = self._ids_of("eos_token") if config.get("add_eos_token") is True else []
        except Refused as error:
            if isinstance(found.source, MadeTokenizer):
                found.source.check()
            raise FormatError(
                f"{found.where}: not a tokenizer that can be loaded: {error}"
            ) from None
        self._explicit = "add_bos_token" in config or "add_eos_token" in config
        self._template = config.get("chat_template")

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return self._inner.vocab_size

    @property
    def bos_id(self) -> int | None:
        """The id of the BOS token; None if not configured."""
        return next(iter(self._ids_of("bos_token")), None)

    @property
    def chat_template(self) -> str:
        """The chat template (of a list the "default"), "" if there is none; raises FormatError."""
        source = "" if self._template is None else self._template
        if isinstance(source, list):
            entries = [entry for entry in source if isinstance(entry, Mapping)]
            named = {entry.get("name"): entry.get("template") for entry in entries}
            source = named.get("default")
        if not isinstance(source, str):
            raise FormatError("chat template: expected text, or a list with one named 'default'")
        return source

    @cached_property
    def style(self) -> AnswerStyle:
        """How the model marks up its answers, by its tokens and chat template."""
        return style_of(self.chat_template, lambda name: self.token_id(name) is not None)

    def encode(self, text: str, special: bool = True, *, room: int | None = None) -> list[int]:
        """Return the ids of a text; special tokens spelled out in it become their ids.

        `special` adds BOS and the like: as in transformers `add_bos_token` and `add_eos_token`
        decide, else the post-processor. A text surely longer than `room` tokens is refused early.
        Raises UsageError: not valid Unicode, too long, or no ids for it. OutOfMemory: over its
        memory limit.
        """
        self._check_length(text, room)
        try:
            ids = self._fit_for(text).encode(text, special and not self._explicit)
        except Refused as error:
            if error.kind == "unicode":
                raise UsageError("the prompt is not valid Unicode text; give it in UTF-8") from None
            kind = OutOfMemory if error.kind == "memory" else UsageError
            raise kind(f"the prompt cannot be tokenised: {error}") from None
        return [*self._prefix, *ids, *self._suffix] if special else ids

    def encode_prompt(self, text: str, *, room: int | None = None) -> list[int]:
        """Like `encode`, but without a second BOS if a chat template has written one."""
        ids = self.encode(text, room=room)
        begins = self._special.get("bos_token")
        if begins and text.startswith(begins) and len(ids) > 1 and ids[0] == ids[1]:
            return ids[1:]
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        """Return the text of ids; invalid UTF-8 becomes U+FFFD. Raises UsageError."""
        try:
            return self._inner.decode(ids, skip_special)
        except Refused as error:
            raise UsageError(f"the token ids have no text: {error}") from None

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its name, as "<|end|>"; None if there is none."""
        try:
            return self._inner.token_to_id(token)
        except Refused:
            return None

    def token_bytes(self, token: int) -> bytes:
        """Return a token's bytes, possibly part of a character; b"" if it has none."""
        spelled = self._inner.id_to_token(token)
        if spelled is None:
            return b""
        if self._is_byte_level:
            with suppress(KeyError):
                return bytes(map(BYTE_OF.__getitem__, spelled))
            return spelled.encode()  # an added token
        if found := _BYTE_FALLBACK.fullmatch(spelled):
            return bytes.fromhex(found[1])
        return spelled.replace("\u2581", " ").encode()  # as SentencePiece spells a space

    @cached_property
    def _is_byte_level(self) -> bool:
        """Whether the vocabulary spells bytes as GPT-2's, where a space is "Ġ"."""
        space = self.token_id("Ġ")
        return space is not None and self.decode([space]) == " "

    def stream(self) -> "TextStream":
        """Return a decoder that takes one id at a time."""
        return TextStream(self.decode)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text of a conversation, to be encoded with `special=False`.

        `variables`: see `ChatTemplate.settled`. `tools` and calls become text where
        the template does not read them. Raises UsageError: no template, or it rejects the messages.
        FormatError: unusable template.
        """
        if self._template is None:
            raise UsageError("this model has no chat template; give it plain text")
        # Completions, the common case, do not pay for importing Jinja.
        from clocher_runtime.text.chat_template import checked_template

        template = checked_template(self.chat_template)
        variables = template.settled(variables or {})
        given = {
            **self._special,
            "documents": None,  # which transformers always passes
            **variables,
            "add_generation_prompt": add_generation_prompt,
        }
        turns = [_with_reasoning(dict(message)) for message in _conversation(messages)]
        return template.converse(turns, tools, self.style, given)

    def _ids_of(self, name: str) -> list[int]:
        found = self._inner.token_to_id(self._special.get(name, ""))
        return [] if found is None else [found]

    def _fit_for(self, text: str) -> LibraryTokenizer | TokenizerApart:
        if isinstance(self._inner, TokenizerApart) or len(text) <= self._here:
            return self._inner
        if self._for_long_texts is None:
            self._for_long_texts = TokenizerApart(self._inner.to_text())
        return self._for_long_texts

    def _check_length(self, text: str, room: int | None) -> None:
        most = MAX_TEXT_CHARS
        if room is not None:
            most = min(most, room * self._chars_of_token)
        if len(text) > most:
            holds = "" if room is None else f", and the context holds {room} tokens"
            raise PromptTooLong(
                f"{len(text)} characters are too many: at most {most} are taken{holds}; shorten it"
            )


class TextStream:
    """Decodes ids incrementally; returns text only once it can no longer change.

    The joined pieces of a byte-level tokenizer are the text of all ids. A UTF-8 character has at
    most 4 bytes and an id at least one, so what 4 ids leave open is partly invalid and becomes
    U+FFFD: the cost per id is constant.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []  # the last finished piece, for context, then the open one
        self._context = 0

    def push(self, token: int) -> str:
        """Return the text that an id completes, "" while a character is incomplete."""
        self._ids.append(token)
        piece = self._open_text()
        if piece and not piece.endswith(_REPLACEMENT):
            self._ids = self._ids[self._context :]
            self._context = len(self._ids)
            return piece
        if len(self._ids) - self._context < _MOST_BYTES:
            return ""
        if not piece:
            self._ids.pop()  # it has no text
            return ""
        return self._cut(piece)

    def _cut(self, piece: str) -> str:
        ids, done = self._ids, len(self._decode(self._ids[: self._context]))
        whole = self._decode(ids)
        for end in range(len(ids) - 1, len(ids) - 1 - _MOST_BYTES, -1):
            # Split inside a character, the halves would have more U+FFFD than the whole.
            head = self._decode(ids[:end])
            if head + self._decode(ids[end:]) == whole:
                self._ids, self._context = ids[end - 1 :], 1
                return head[done:]
        self._ids, self._context = ids[-1:], 1  # a decoder that is not byte-level
        return piece

    def flush(self) -> str:
        """Return the rest at the end."""
        piece = self._open_text()
        self._ids, self._context = [], 0
        return piece

    def _open_text(self) -> str:
        # Decoded with its context: some decoders drop the space before the first token.
        done = self._decode(self._ids[: self._context])
        return self._decode(self._ids)[len(done) :]


def _conversation(messages: object) -> list[Mapping[str, Any]]:
    found = listed(messages, "a list of messages, each with a role and its content")
    for at, message in enumerate(found):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise UsageError(
                f"message {at} is {shown(message)}; expected a mapping with a role and its content"
            )
    return found


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    found = [message[name] for name in _REASONING if message.get(name) is not None]
    if not found:
        return message
    return {"thinking": found[0], **message, "reasoning_content": found[0]}


def _content(name: str, value: object) -> str:
    content = value.get("content") if isinstance(value, Mapping) else value
    if not isinstance(content, str):
        raise FormatError(f"tokenizer_config.json: {name} is {value!r:.60}; expected a string")
    return content
