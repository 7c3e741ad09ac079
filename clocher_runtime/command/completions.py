"""Where completions go: the JSON line, the console, and the files that a run is asked for."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Self

from clocher_runtime.command.console import Console
from clocher_runtime.command.jsonline import OutputFields, clocher_version
from clocher_runtime.command.loading import Engine
from clocher_runtime.disk.output_file import JsonlWriter
from clocher_runtime.engine.arguments import Sampling
from clocher_runtime.quality.trace import TopLogits, Trace, document
from clocher_runtime.text.prompts import Prompt

MAX_LISTED = 1000
"""Prompts in `outputs` of the JSON line; `--outputs` writes all of them."""


class Completions:
    """Takes the completions of the first round in the order of their prompts, and keeps few.

    Use it as a context manager: leaving it finishes the files of `--outputs` and `--trace-ids`.

    Args:
        console: shows what is wrong with a prompt, and texts that were not shown as they grew.
        outputs: file for all completions.
        trace_ids: file for the ids of all completions.
        trace_topk: whether traces have largest logits.
        aggregate: list none.
        single: there is but one prompt, whose error ends the run and is told then.

    Attributes:
        prompts: how many came.
        failed: of these, those that nothing could be generated from.
        first_error: what was wrong with the first of them.
        listed: the first `MAX_LISTED` completions; none with `--aggregate`.
        fingerprint: of the weights, for traces.

    Raises:
        UsageError: a file cannot be written.
    """

    def __init__(
        self,
        console: Console,
        *,
        outputs: Path | None = None,
        trace_ids: Path | None = None,
        trace_topk: int = 0,
        aggregate: bool = False,
        single: bool = False,
    ) -> None:
        self.prompts = self.failed = 0
        self.first_error = ""
        self.listed: list[OutputFields] = []
        self._console, self.sampling = console, Sampling()
        self._most = 0 if aggregate else MAX_LISTED
        self._has_topk, self._is_single = trace_topk > 0, single
        self.fingerprint: str | None = None
        self._files = ExitStack()
        self._outputs = self._traces = None
        if outputs is not None:
            self._outputs = self._files.enter_context(JsonlWriter(outputs, "--outputs"))
        if trace_ids is not None:
            self._traces = self._files.enter_context(JsonlWriter(trace_ids, "--trace-ids"))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._files.__exit__(kind, error, trace)

    def add(
        self,
        engine: Engine,
        prompt: Prompt,
        ids: Sequence[int],
        topk: Sequence[TopLogits],
        show: bool,
    ) -> None:
        """Take the completion of the next prompt.

        Args:
            engine: what generated it.
            prompt: the prompt; with an error, nothing was generated.
            ids: what was generated.
            topk: largest logits of each step, if they are traced.
            show: write its text to the console.

        Raises:
            UsageError: a file cannot be written any more.
        """
        self.prompts += 1
        listed = len(self.listed) < self._most
        text = engine.text(ids) if listed or show or self._outputs is not None else ""
        if prompt.error is not None:
            self.failed += 1
            self.first_error = self.first_error or prompt.error
            if not self._is_single:
                self._console.note(prompt.error)
        elif show:
            self._console.note(f"prompt {self.prompts}:")
            self._console.completion(text)
            self._console.end_line()
        output = OutputFields(token_ids=list(ids), text=text, error=prompt.error)
        if listed:
            self.listed.append(output)
        if self._outputs is not None:
            self._outputs.write({"index": self.prompts - 1, **asdict(output)})
        if self._traces is not None and prompt.error is None:
            self._traces.write(document(self._trace(engine, prompt, ids, topk)))

    def _trace(
        self, engine: Engine, prompt: Prompt, ids: Sequence[int], topk: Sequence[TopLogits]
    ) -> Trace:
        return Trace(
            version=clocher_version(),
            model=engine.model,
            fingerprint=self.fingerprint,
            precision=engine.precision,
            act_prec=engine.act_prec,
            kv_dtype=engine.kv_dtype,
            device=engine.device,
            sampling={
                "temperature": self.sampling.temperature,
                "top_k": self.sampling.top_k,
                "top_p": self.sampling.top_p,
                "seed": self.sampling.seed,
            },
            prompt=prompt.text,
            prompt_ids=tuple(prompt.ids),
            generated_ids=tuple(ids),
            topk=tuple(topk) if self._has_topk else None,
        )
