"""Speed of a model in the cases that llama-bench has: pp512, tg128, pp512+tg128, tg128 @ d4096.

A case is timed by the steps of a `TimedWindow`; what a test needs besides, such as the depth before
it, is outside. The ids of a case are the same in every repetition, so its tokens have to be, too.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from hashlib import sha256
from math import inf
from typing import Any

import numpy as np

from clocher_kernels.errors import UsageError
from clocher_runtime.engine.backends import BACK_ENDS
from clocher_runtime.engine.load import Model
from clocher_runtime.engine.session import Session
from clocher_runtime.engine.timing import Span, TimedWindow
from clocher_runtime.models.build import PAGE_CELLS

_CHECKED = 8
"""Tokens after a prompt whose reading is timed, to tell whether it was read right."""

_BESIDE = 37
"""Tokens of the sequence beside which a case is repeated; odd, so that steps begin elsewhere."""

_LEAST_STEP = 16
"""Tokens of prompts that a step takes at least on average while others decode; see `Scheduler`."""


@dataclass(frozen=True, slots=True, order=True)
class Case:
    """What is timed.

    Attributes:
        prompt: tokens of a prompt that is read.
        tokens: that are generated then.
        depth: tokens that come before.
        batch: sequences side by side; more than one only without a prompt.
    """

    prompt: int
    tokens: int
    depth: int = 0
    batch: int = 1

    @property
    def name(self) -> str:
        """What llama-bench calls it."""
        parts = [f"pp{self.prompt}"] * (self.prompt > 0) + [f"tg{self.tokens}"] * (self.tokens > 0)
        return "+".join(parts) + (f" @ d{self.depth}" if self.depth else "")

    @property
    def before(self) -> int:
        """Length of the text that is given to the engine."""
        return max(self.depth + self.prompt, 1)

    @property
    def made(self) -> int:
        """Tokens that are generated, timed or not."""
        return self.tokens + 1 if self.tokens else _CHECKED

    @property
    def needs(self) -> int:
        """Cells of a sequence, without what the context may lack."""
        return self.before + (self.tokens + 1 if self.tokens else 1)

    @property
    def longest(self) -> int:
        """Cells of its longest sequence.

        Of several, the first decodes already while the last is being read.
        """
        waits = self.batch * -(-self.before // _LEAST_STEP) + 8 if self.batch > 1 else 0
        return self.before + self.made + waits


def session_for(
    model: Model, cases: Sequence[Case], backend: str = "cpu", **settings: Any
) -> Session:
    """Return a warm session with room for each of some cases, and for one more sequence.

    Raises:
        UsageError: a case is longer than the context of the model, or its prompt does not begin
            where a step does.
        OutOfMemory: the model or its cache does not fit.
    """
    most = model.spec.max_positions
    batch = max(case.batch for case in cases) + 1
    step = max(BACK_ENDS[backend].chunk, batch)
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
    session = Session(
        model,
        backend=backend,
        batch=batch,
        chunk=step,
        context=min(most, max(max(case.longest for case in cases), _BESIDE + 1)),
        kv_pages=pages,
        itl_ms=inf,  # nobody waits for a single token
        **settings,
    )
    session.warm()
    return session


class Runner:
    """Runs cases in a session.

    Args:
        session: from `session_for`.

    Attributes:
        made: SHA-256 of the tokens of each repetition of a case.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.made: dict[Case, list[str]] = {}
        self._last: dict[Case, list[list[int]]] = {}

    def run(self, case: Case) -> int:
        """Run a case and return the nanoseconds that count."""
        window = TimedWindow(case.name, synchronize=self.session.synchronize)
        if case.prompt:
            made = [list(self._generate([self._ids(case, 0)], case.made, window))]
            ns = sum(_counted(window.spans, case))
        else:
            made = self._decode(case, window)
            ns = sum(span.ns for span in _full(window.spans, case.batch)[: case.tokens])
        self._last[case] = made
        self.made.setdefault(case, []).append(sha256(np.array(made, "<i4").tobytes()).hexdigest())
        return ns

    def agrees(self, case: Case) -> bool:
        """Return whether another way to compute a case that ran gives the same tokens.

        Half of what it made is given as a prompt, beside another sequence: these tokens go through
        the products of prompts, not those of decoding, steps begin at other tokens, and the rest is
        decoded in company.
        """
        index = case.batch - 1
        made = self._last[case][index]
        known = len(made) // 2 if case.tokens else 0
        company = self._ids(Case(min(_BESIDE, self.session.longest - 1), 0), 1)
        given = self._ids(case, index) + made[:known]
        ids = self._generate([company, given], len(made) - known, None, sequence=1)
        return list(ids) == made[known:]

    def bytes_per_token(self, case: Case) -> int | None:
        """Return the bytes that a decoded token of a case reads: weights and, on average, keys.

        Returns:
            None where it is not known: which experts several sequences have in common.
        """
        model = self.session.model
        if not case.tokens or case.prompt or (model.spec.moe is not None and case.batch > 1):
            return None
        return round(model.bytes_per_token / case.batch + self._cache_bytes(case))

    def _cache_bytes(self, case: Case) -> float:
        """Return the bytes of keys and values that a token of a case reads on average."""
        seen = case.before + 1 + np.arange(case.tokens)
        total = 0.0
        for name, buffer in self.session.executor.plan.buffers.items():
            if buffer.role == "state" and name.startswith("kv."):
                window = self.session.model.spec.windows[int(name.split(".")[1])]
                cells = np.minimum(seen, window) if window else seen
                total += float(cells.mean()) * buffer.nbytes / (buffer.shape[0] * PAGE_CELLS)
        return total

    def _decode(self, case: Case, window: TimedWindow) -> list[list[int]]:
        """Generate until each step of the case has been done by all sequences together."""
        prompts = [self._ids(case, index) for index in range(case.batch)]
        budget = case.longest - case.before
        made: list[list[int]] = [[] for _ in prompts]
        seen = full = 0
        stream = self.session.generate(prompts, budget, stop_ids=frozenset(), window=window)
        with closing(stream):
            for token in stream:
                made[token.sequence].append(token.id)
                full += len(_full(window.spans[seen:], case.batch))
                seen = len(window.spans)
                if full >= case.tokens and min(map(len, made)) >= case.tokens:
                    return [ids[: case.tokens] for ids in made]
        raise UsageError(
            f"{case.name} with {case.batch} sequences: the context of {self.session.longest} "
            "tokens has no room to decode all of them together; give less to -d or -b"
        )

    def _generate(
        self,
        prompts: Sequence[list[int]],
        tokens: int,
        window: TimedWindow | None,
        sequence: int = 0,
    ) -> Iterator[int]:
        """Yield the ids that one of some sequences makes."""
        for token in self.session.generate(prompts, tokens, stop_ids=frozenset(), window=window):
            if token.sequence == sequence:
                yield token.id

    def _ids(self, case: Case, index: int) -> list[int]:
        """Return the ids before the first token of a sequence: random, and always the same."""
        vocabulary = self.session.model.spec.vocab_size
        ids: list[int] = (
            np.random.default_rng(index).integers(vocabulary, size=case.before).tolist()
        )
        return ids


def _full(spans: Sequence[Span], batch: int) -> list[Span]:
    """Return the spans in which so many sequences decode, and nothing else happens."""
    return [span for span in spans if span.kind == "decode" and span.tokens == batch]


def _counted(spans: Sequence[Span], case: Case) -> Iterator[int]:
    """Yield the time of each step that counts for a case with a prompt."""
    read = 0
    for span in spans:
        if span.kind == "prefill":
            read += span.tokens
        if read > case.depth if span.kind == "prefill" else case.tokens:
            yield span.ns


def _blocks(cells: int) -> int:
    return -(-cells // PAGE_CELLS)
