"""The Python API: load a model, generate text.

import clocher_runtime as clocher

model = clocher.load()                       # or a directory
print(model.generate("def fibonacci(n):", max_new=48))
for piece in model.stream_generate("import "):
    print(piece, end="", flush=True)
"""

import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from clocher_kernels.errors import UsageError
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.checkpoints.gguf.checkpoint import find_gguf
from clocher_runtime.command.model_choice import embedded_model
from clocher_runtime.engine.arguments import (
    Sampling,
    listed,
    refuse_unknown,
    shown,
    token_ids,
    whole,
)
from clocher_runtime.engine.backends import choose
from clocher_runtime.engine.load import Model, load_model
from clocher_runtime.engine.session import Session
from clocher_runtime.engine.topology import default_threads
from clocher_runtime.engine.turns import Stream
from clocher_runtime.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]
_OPTIONS = frozenset(Session.__init__.__kwdefaults__ or ()) - {"backend", "threads"}


def _sampling(options: Mapping[str, Any]) -> Sampling:
    refuse_unknown(options, Sampling.__dataclass_fields__, "sampling")
    return Sampling(**options)


class LanguageModel:
    """A model bound to a back end, with its tokenizer. It generates one thing at a time.

    Every method raises SessionBusy while a generation is under way, in this thread or another, and
    UsageError when an argument cannot be used or the model is closed.

    Attributes:
        model: weights and ModelSpec.
        session: what generates, in token ids.
        tokenizer: text to ids and back.
    """

    def __init__(self, model: Model, session: Session, tokenizer: Tokenizer) -> None:
        self.model, self.session, self.tokenizer = model, session, tokenizer

    def generate(self, prompt: Prompt, max_new: int = 64, **sampling: Any) -> str:
        """Return the completion of a prompt.

        Args:
            prompt: text, or token ids.
            max_new: tokens to generate at most.
            **sampling: fields of `Sampling`: temperature, top_k, top_p, seed.

        Raises:
            SessionBusy: a generation is under way.
            UsageError: an argument cannot be used, or the model is closed.
        """
        return "".join(self.stream_generate(prompt, max_new, **sampling))

    def stream_generate(self, prompt: Prompt, max_new: int = 64, **sampling: Any) -> Stream[str]:
        """Return the completion of a prompt in pieces, as tokens are made.

        The model is busy from the first piece to the last, or until the stream is closed or
        dropped.

        Args:
            prompt: text, or token ids.
            max_new: tokens to generate at most.
            **sampling: fields of `Sampling`: temperature, top_k, top_p, seed.

        Raises:
            SessionBusy: at the first piece: a generation is under way.
            UsageError: an argument cannot be used, or the model is closed.
        """
        ids, max_new = self._ids(prompt), whole("max_new", max_new, 1)
        self.session.check(ids)
        chosen = _sampling(sampling)
        return Stream(lambda _: self._pieces(ids, max_new, chosen))

    def _pieces(
        self, ids: list[int], max_new: int, sampling: Sampling
    ) -> Generator[str, None, None]:
        pieces = self.tokenizer.stream()
        for token in self.session.generate([ids], max_new, sampling):
            if token.id not in self.model.spec.eos_ids:
                yield pieces.push(token.id)
        yield pieces.flush()

    def _ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, room=self.session.context)
        try:
            return token_ids(prompt)
        except UsageError as error:
            raise UsageError(f"a prompt is text or a list of token ids: {error}") from None

    def generate_batch(
        self, prompts: Sequence[Prompt], max_new: int = 64, **sampling: Any
    ) -> list[str]:
        """Return the completions of several prompts, generated side by side.

        Args:
            prompts: at most as many as the `batch` given to `load`.
            max_new: tokens to generate at most, each.
            **sampling: fields of `Sampling`: temperature, top_k, top_p, seed.

        Raises:
            SessionBusy: a generation is under way.
            UsageError: an argument cannot be used, or the model is closed.
        """
        ids = [self._ids(p) for p in listed(prompts, "a list of prompts")]
        made: list[list[int]] = [[] for _ in ids]
        for token in self.session.generate(ids, max_new, _sampling(sampling)):
            if token.id not in self.model.spec.eos_ids:
                made[token.sequence].append(token.id)
        return [self.tokenizer.decode(out) for out in made]

    def close(self) -> None:
        """Stop the threads and release the buffers. A generation that is suspended ends.

        Raises:
            SessionBusy: a step is running in another thread.
        """
        self.session.close()

    def __enter__(self) -> "LanguageModel":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def load(
    path: str | Path | None = None,
    *,
    device: str = "auto",
    precision: str | None = None,
    threads: int | None = None,
    **session: Any,
) -> LanguageModel:
    """Load a model.

    Its weight files stay mapped, so leave them alone: a generation raises ModelChanged if one was
    written to, replaced or deleted. A file that is truncated while it is read ends the process with
    SIGBUS; only the commands handle that signal.

    Args:
        path: a Hugging Face directory, one with an IEBIN pair or a GGUF file, or that file; None:
            the embedded model.
        device: "auto", "cpu", "cuda" or "ze".
        precision: None keeps the weights as stored; see `load_model`.
        threads: None: as many as this process may use.
        **session: arguments of `Session`: batch, context, kv_dtype, chunk, progress.

    Raises:
        ModelError: the model is missing, damaged or not supported.
        DeviceError: the device is not available.
        OutOfMemory: the model or its cache does not fit.
        UsageError: an argument cannot be used.
    """
    refuse_unknown(session, _OPTIONS, "load")
    backend, _ = choose(device)
    if path is not None and not isinstance(path, str | os.PathLike):
        raise UsageError(f"path is {shown(path)}; expected a string or a pathlib.Path")
    if path is not None and not (os.path.isdir(path) or find_gguf(Path(path))):
        raise UsageError(
            f"{path} is not a directory; give the directory of a model, or a GGUF file"
        )
    threads = default_threads() if threads is None else whole("threads", threads, 1)
    checkpoint = open_checkpoint(embedded_model() if path is None else Path(path))
    model = load_model(checkpoint, precision)
    tokenizer = Tokenizer(checkpoint.tokenizer_source, checkpoint.tokenizer_config)
    bound = Session(model, backend=backend, threads=threads, **session)
    return LanguageModel(model, bound, tokenizer)


def generate(prompt: Prompt, path: str | Path | None = None, **options: Any) -> str:
    """Load a model and return one completion; `options` are those of `LanguageModel.generate`."""
    with load(path) as model:
        return model.generate(prompt, **options)


def stream_generate(
    prompt: Prompt, path: str | Path | None = None, **options: Any
) -> Iterator[str]:
    """Load a model and return one completion in pieces; the model is closed after the last."""

    def pieces() -> Generator[str, None, None]:
        with load(path) as model:
            yield from model.stream_generate(prompt, **options)

    return Stream(lambda _: pieces())
