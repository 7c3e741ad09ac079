"""The Python API: load a model, complete prompts, answer conversations.

import clocher_runtime as clocher

model = clocher.load()                       # or a directory
print(model.generate("def fibonacci(n):", max_new=48))
for piece in model.stream_generate("import "):
    print(piece, end="", flush=True)
print(model.chat([{"role": "user", "content": "What is a bell tower?"}]).text)
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from clocher_kernels.errors import UsageError
from clocher_runtime.checkpoints.locate import embedded_model, locate
from clocher_runtime.command.loading import load_engine
from clocher_runtime.config.engine import config_of
from clocher_runtime.config.values import Given, shown
from clocher_runtime.engine.arguments import check_functions, listed, taken, token_ids
from clocher_runtime.engine.backends import Progress
from clocher_runtime.engine.footprint import KVCacheConfig as KVCacheConfig
from clocher_runtime.engine.footprint import with_kv_cache
from clocher_runtime.engine.load import Model
from clocher_runtime.engine.session import Session
from clocher_runtime.text.answers import opens_thoughts
from clocher_runtime.text.completion import (
    MAX_NEW,
    OPTIONS,
    Completion,
    Options,
    TextGeneration,
    side_by_side,
)
from clocher_runtime.text.grammar import GrammarMaker
from clocher_runtime.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


def _text_or_ids(prompt: Prompt) -> str | list[int]:
    try:
        return prompt if isinstance(prompt, str) else token_ids(prompt)
    except UsageError as error:
        raise UsageError(f"a prompt is text or a list of token ids: {error}") from None


def _usable_path(path: object) -> Path | None:
    if path is None:
        return None
    if not isinstance(path, str | os.PathLike):
        raise UsageError(f"path is {shown(path)}; expected a string or a pathlib.Path")
    return locate(str(os.fspath(path)), "path")


class LanguageModel:
    """A model bound to a back end, with its tokenizer. Any number of threads may share it.

    Methods take `max_new` (also `max_tokens`, `max_new_tokens`; default 64), `stop` (a string or
    several), `logprobs` (number of top tokens to return with each), `adapter` (the name of one that
    `load` got in `lora={name: directory}`, "" for the base), and the fields of `Sampling`:
    temperature, top_k, top_p, min_p, seed, repetition_penalty, presence_penalty, frequency_penalty,
    logit_bias, processors. One of `json_schema` (a dictionary), `json_object` (True), `regex`,
    `grammar` (Lark or GBNF) and `choice` (a list of texts) constrains the output, which is complete
    only if it ends with "stop".

    Every method raises UsageError when an argument is invalid or the model is closed.

    Attributes:
        model: weights and ModelSpec.
        session: generates, in token ids.
        sampling_defaults: from generation_config.json; arguments override them, and `temperature=0`
            all of them.
    """

    def __init__(
        self,
        model: Model,
        session: Session,
        tokenizer: Tokenizer,
        sampling_defaults: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        self.model, self.session, self.tokenizer = model, session, tokenizer
        self.sampling_defaults = sampling_defaults

    @property
    def kv_cache_mb(self) -> float:
        """MiB of the KV cache."""
        return self.session.kv_cache_bytes / (1 << 20)

    def generate(self, prompt: Prompt, max_new: int = MAX_NEW, **options: Any) -> str:
        """Return the completion of a prompt: text or token ids."""
        return self.complete(prompt, **_with(max_new, options)).text

    def complete(self, prompt: Prompt, **options: Any) -> Completion:
        """Return a completion with its ids, finish reason and log probabilities."""
        return self._begin(prompt, options).result()

    def stream_generate(
        self, prompt: Prompt, max_new: int = MAX_NEW, **options: Any
    ) -> TextGeneration:
        """Return the completion in pieces, as tokens are made; its `result()` is the whole."""
        return self._begin(prompt, _with(max_new, options))

    def generate_batch(
        self, prompts: Sequence[Prompt], max_new: int = MAX_NEW, **options: Any
    ) -> list[str]:
        """Return the completions of several prompts; see `complete_batch`."""
        return [each.text for each in self.complete_batch(prompts, **_with(max_new, options))]

    def complete_batch(self, prompts: Sequence[Prompt], **options: Any) -> list[Completion]:
        """Return completions of prompts, `batch` of `load` at a time side by side."""
        given = listed(prompts, "a list of prompts")
        return self.complete_each([(prompt, options) for prompt in given])

    def complete_each(
        self,
        asked: Sequence[tuple[Prompt, Mapping[str, Any]]],
        progress: Callable[[int, int], None] | None = None,
    ) -> list[Completion]:
        """Return completions of prompts, each with its options; `progress` gets (done, total)."""
        texts = []
        for number, (prompt, options) in enumerate(asked):
            try:
                texts.append(self._begin(prompt, options))
            except UsageError as error:
                raise UsageError(f"prompt {number}: {error}") from None
        if not texts:
            raise UsageError("0 prompts; give at least one")
        found: dict[int, Completion] = {}
        for number, completion in side_by_side(texts, self.session.config.batch):
            found[number] = completion
            if progress is not None:
                progress(len(found), len(texts))
        return [found[number] for number in range(len(texts))]

    def chat(
        self, messages: Messages, tools: Sequence[Mapping[str, Any]] | None = None, **options: Any
    ) -> Completion:
        """Return the answer to a conversation, with channel and tool-call markup.

        `messages` are `{"role": ..., "content": ...}` each, as the model's chat template reads
        them; `tools`: functions that the model may call, as JSON schemas; `options`: see
        `LanguageModel`; others are variables of the chat template. Raises UsageError if there is no
        template, or it refuses the messages.
        """
        return self.stream_chat(messages, tools, **options).result()

    def stream_chat(
        self, messages: Messages, tools: Sequence[Mapping[str, Any]] | None = None, **options: Any
    ) -> TextGeneration:
        """Return the answer to a conversation in pieces; see `chat`."""
        variables = {name: value for name, value in options.items() if name not in OPTIONS}
        text = self.tokenizer.apply_chat_template(messages, tools=tools, variables=variables)
        ids = self.tokenizer.encode(text, special=False, room=self.session.context)
        chosen = {name: options[name] for name in options if name in OPTIONS}
        form = {"style": self.tokenizer.style, "opened": opens_thoughts(text)}
        return self._begin(ids, chosen, form)

    def close(self) -> None:
        """Stop the threads and release the buffers, after the current step. Generations end."""
        self.session.close()

    def __enter__(self) -> "LanguageModel":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(
        self,
        prompt: Prompt,
        options: Mapping[str, Any],
        form: Mapping[str, Any] = MappingProxyType({}),
    ) -> TextGeneration:
        chosen = Options.of({**options, **taken(self.sampling_defaults, options)})
        ids = _text_or_ids(prompt)
        if isinstance(ids, str):
            ids = self.tokenizer.encode_prompt(ids, room=self.session.context)
        self.session.check(ids)
        constraint = None
        if chosen.structure is not None:
            spec = {**chosen.structure, **form}
            self._grammars.check(spec)
            constraint = self._grammars.compile(spec)
        return TextGeneration(self.session, self.tokenizer, ids, chosen, constraint)

    @cached_property
    def _grammars(self) -> GrammarMaker:
        source, spec = self.model.checkpoint.tokenizer_source, self.model.spec
        return GrammarMaker(source, spec.vocab_size, spec.eos_ids)


def _with(max_new: int, options: dict[str, Any]) -> dict[str, Any]:
    is_named = "max_tokens" in options or "max_new_tokens" in options
    return options if is_named and max_new == MAX_NEW else {**options, "max_new": max_new}


def load(
    path: str | Path | None = None,
    *,
    kv_cache: KVCacheConfig | None = None,
    progress: Progress | None = None,
    packing: Progress | None = None,
    **settings: Any,
) -> LanguageModel:
    """Load a model.

    Weight files stay mapped and must not change: a generation raises ModelChanged if one was
    written to, replaced or deleted. Truncating one ends the process with SIGBUS, which only the
    commands handle.

    Args:
        path: a Hugging Face directory, one with an IEBIN pair or a GGUF file, or that file; or
            `owner/name` of a model in the Hub's cache (see `clocher pull`); None: the embedded
            model.
        kv_cache: dtype and size of the KV cache, instead of the settings for these.
        progress, packing: called with (done, total) while kernels compile, or weights are packed.
        **settings: fields of `EngineConfig`, such as device, precision, threads, lora, draft_model,
            batch, context, itl_ms, generation_config. Prefix caching (`prefix_cache`) and lossless
            speculation (`speculate`) are on by default.

    Raises:
        ModelError: the model is missing, damaged or not supported.
        DeviceError: the device is not available.
        OutOfMemory: the model or its cache does not fit.
        UsageError: an argument is invalid.
    """
    where = embedded_model() if path is None else path
    check_functions(progress=progress, packing=packing)
    keywords = {"prefix_cache": True, **with_kv_cache(settings, kv_cache), "model_dir": where}
    config = config_of(keywords, "load")
    names = {"model_dir": "path", "lora": "lora", "draft_model": "draft_model"}
    given = {n: Given(flag, str(keywords[n])) for n, flag in names.items() if n in keywords}
    engine = load_engine(replace(config, given=given), progress, packing)
    session, loaded = engine.session, engine.loaded
    assert isinstance(loaded.tokenizer, Tokenizer)  # only the stub has another
    return LanguageModel(loaded.model, session, loaded.tokenizer, loaded.sampling_defaults)


def generate(prompt: Prompt, path: str | Path | None = None, **options: Any) -> str:
    """Load a model and return one text; `options` are those of `LanguageModel.generate`."""
    Options.of(options)  # before a model is loaded for nothing
    with load(path) as model:
        return model.generate(prompt, **options)


def stream_generate(
    prompt: Prompt, path: str | Path | None = None, **options: Any
) -> Iterator[str]:
    """Load a model at the first piece and yield one text in pieces. Raises UsageError.

    The model is closed after the last piece.
    """
    Options.of(options)
    given, where = _text_or_ids(prompt), _usable_path(path)

    def pieces() -> Iterator[str]:
        with load(where) as model:
            yield from model.stream_generate(given, **options)

    return pieces()
