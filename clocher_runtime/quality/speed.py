"""Speed in llama-bench's cases: pp512, tg128, pp512+tg128, tg128 @ d4096."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from hashlib import sha256
from math import inf
from typing import Any

import numpy as np

from clocher_kernels.errors import UsageError
from clocher_runtime.config.engine import EngineConfig
from clocher_runtime.engine.arguments import REPEATED
from clocher_runtime.engine.backends import BACK_ENDS
from clocher_runtime.engine.load import Model
from clocher_runtime.engine.session import Session
from clocher_runtime.engine.timing import Span, TimedWindow
from clocher_runtime.models.build import PAGE_CELLS

_CHECKED = 8
"""Tokens generated after a timed prompt, to check that it was read right."""

_BESIDE = 37
"""Tokens of the sequence beside a repeated case; odd, so that steps begin elsewhere."""

_LEAST_STEP = 16
"""Least average prompt tokens of a step while others decode; see `Scheduler`."""


@dataclass(frozen=True, slots=True, order=True)
class Case:
    """One timed case."""

    prompt: int  # tokens of a prompt that is read
    tokens: int  # that are generated then
    depth: int = 0  # tokens that come before
    batch: int = 1  # sequences side by side; more than one only without a prompt

    @property
    def name(self) -> str:
        """llama-bench's name for it."""
        parts = [f"pp{self.prompt}"] * (self.prompt > 0) + [f"tg{self.tokens}"] * (self.tokens > 0)
        return "+".join(parts) + (f" @ d{self.depth}" if self.depth else "")

    @property
    def before(self) -> int:
        """Tokens before the first generated one: depth and prompt."""
        return max(self.depth + self.prompt, 1)

    @property
    def made(self) -> int:
        """Generated tokens, timed or not."""
        return self.tokens + 1 if self.tokens else _CHECKED

    @property
    def needs(self) -> int:
        """Cells of a sequence, without what the context may lack."""
        return self.before + (self.tokens + 1 if self.tokens else 1)

    @property
    def longest(self) -> int:
        """Cells of its longest sequence; the first decodes while the last is still being read."""
        waits = self.batch * -(-self.before // _LEAST_STEP) + 8 if self.batch > 1 else 0
        return self.before + self.made + waits


def session_for(model: Model, cases: Sequence[Case], config: EngineConfig, **more: Any) -> Session:
    """Return a warm session for the cases, which decide batch, chunk, context and pages."""
    most = model.spec.max_positions
    batch = max(case.batch for case in cases) + 1
    step = max(BACK_ENDS[config.backend].chunk, batch)
    for case in cases:
        if case.needs > most:
            raise UsageError(
                f"{case.name} needs a context of {case.needs} tokens; this model's is {most}; give "
                "less to -p, -n, -d or -pg"
            )
        if case.prompt and case.depth % step:
            raise UsageError(
                f"{case.name}: a prompt is read {step} tokens a step, and its time begins with a "
                f"step; give -d a multiple of {step}, or -p 0"
            )
    pages = 1
    for case in cases:
        blocks = _blocks(min(case.longest, most))
        beside = _blocks(min(_BESIDE + case.made, most))
        pages = max(pages, case.batch * blocks, blocks + beside)
    config = replace(
        config,
        batch=batch,
        chunk=step,
        context=min(most, max(max(case.longest for case in cases), _BESIDE + 1)),
        kv_pages=pages,
        itl_ms=inf,  # no client waits for a single token
    )
    session = Session(model, config, **more)
    session.warm()
    return session


class Runner:
    """Runs cases, prompting with repeated `text` or random ids; `made` hashes the outputs."""

    def __init__(self, session: Session, text: Sequence[int] = ()) -> None:
        self.session, self._text = session, list(text)
        self.made: dict[Case, list[str]] = {}
        self._decoded: dict[Case, tuple[int, int]] = {}  # tokens and forwards
        self._last: dict[Case, list[list[int]]] = {}

    def run(self, case: Case) -> int:
        """Run a case and return the nanoseconds that count."""
        window = TimedWindow(case.name, synchronize=self.session.synchronize)
        if case.prompt:
            made = [self._generate([self._ids(case, 0)], case.made, window)]
            ns = sum(_counted(window.spans, case))
        else:
            made = self._decode(case, window)
            ns = _time_of(_full(window.spans, case.batch), case.tokens * case.batch)
        self._count(case, window.spans)
        self._last[case] = made
        self.made.setdefault(case, []).append(sha256(np.array(made, "<i4").tobytes()).hexdigest())
        return ns

    def _count(self, case: Case, spans: Sequence[Span]) -> None:
        decodes = [span for span in spans if span.kind == "decode"]
        tokens, forwards = self._decoded.get(case, (0, 0))
        tokens += sum(span.tokens for span in decodes)
        self._decoded[case] = tokens, forwards + sum(_sequences(span) for span in decodes)

    def tokens_per_pass(self, case: Case) -> float:
        """Return a sequence's tokens per forward in a case that ran; 1 without drafts."""
        tokens, forwards = self._decoded.get(case, (0, 0))
        return tokens / forwards if forwards else 1.0

    def agrees(self, case: Case) -> bool:
        """Return whether the first half of a case's output, as a prompt, gives the second half."""
        index = case.batch - 1
        made = self._last[case][index]
        known = len(made) // 2 if case.tokens else 0
        company = self._ids(Case(min(_BESIDE, self.session.longest - 1), 0), 1)
        given = self._ids(case, index) + made[:known]
        return self._generate([company, given], len(made) - known) == made[known:]

    def bytes_per_token(self, case: Case) -> int | None:
        """Return the mean bytes that a decoded token reads, None if unknown for shared experts."""
        model, per_forward = self.session.model, self.tokens_per_pass(case)
        shared = case.batch > 1 or per_forward > 1
        if not case.tokens or case.prompt or (model.spec.moe is not None and shared):
            return None
        # Accepted draft tokens read nothing beyond their forward.
        return round((model.bytes_per_token / case.batch + self._cache_bytes(case)) / per_forward)

    def _cache_bytes(self, case: Case) -> float:
        """Return the mean bytes of keys and values read per token."""
        seen = case.before + 1 + np.arange(case.tokens)
        total = 0.0
        for name, buffer in self.session.executor.plan.buffers.items():
            if buffer.role == "state" and name.startswith("kv."):
                window = self.session.model.spec.windows[int(name.split(".")[1])]
                cells = np.minimum(seen, window) if window else seen
                total += float(cells.mean()) * buffer.nbytes / (buffer.shape[0] * PAGE_CELLS)
        return total

    def _decode(self, case: Case, window: TimedWindow) -> list[list[int]]:
        prompts = [self._ids(case, index) for index in range(case.batch)]
        budget = case.longest - case.before
        made: list[list[int]] = [[] for _ in prompts]
        seen = full = 0
        stream = self.session.generate(prompts, budget, None, frozenset(), window, salt=REPEATED)
        with closing(stream):
            for token in stream:
                made[token.sequence].append(token.id)
                full += sum(span.tokens for span in _full(window.spans[seen:], case.batch))
                seen = len(window.spans)
                if full >= case.tokens * case.batch and min(map(len, made)) >= case.tokens:
                    return [ids[: case.tokens] for ids in made]
        raise UsageError(
            f"{case.name} with {case.batch} sequences: the context of {self.session.longest} "
            "tokens has no room to decode all of them together; give less to -d or -b"
        )

    def _generate(
        self, prompts: Sequence[list[int]], tokens: int, window: TimedWindow | None = None
    ) -> list[int]:
        """Return what follows the last prompt."""
        stream = self.session.generate(prompts, tokens, None, frozenset(), window, salt=REPEATED)
        return [token.id for token in stream if token.sequence == len(prompts) - 1]

    def _ids(self, case: Case, index: int) -> list[int]:
        """Return a sequence's ids before its first generated token."""
        return prompt_ids(self.session, case.before, self._text, index)


def prompt_ids(session: Session, count: int, text: Sequence[int] = (), seed: int = 0) -> list[int]:
    """Return a prompt, the same each time: the ids of a text repeated, else random ones."""
    if text:
        return (list(text) * (count // len(text) + 1))[:count]
    random = np.random.default_rng(seed)
    return [int(i) for i in random.integers(session.model.spec.vocab_size, size=count)]


def _full(spans: Sequence[Span], batch: int) -> list[Span]:
    """Return the spans in which exactly `batch` sequences decode and nothing else happens."""
    return [span for span in spans if span.kind == "decode" and _sequences(span) == batch]


def _sequences(span: Span) -> int:
    return span.sequences or span.tokens


def _time_of(spans: Sequence[Span], tokens: int) -> int:
    """Return the time of the first tokens; those of a step share its time."""
    ns, left = 0.0, tokens
    for span in spans:
        count = min(span.tokens, left)
        ns += span.ns * count / span.tokens
        left -= count
    return round(ns)


def _counted(spans: Sequence[Span], case: Case) -> Iterator[int]:
    read = 0
    for span in spans:
        if span.kind == "prefill":
            read += span.tokens
        if read > case.depth if span.kind == "prefill" else case.tokens:
            yield span.ns


def _blocks(cells: int) -> int:
    return -(-cells // PAGE_CELLS)
