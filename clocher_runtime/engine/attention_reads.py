"""What attention read with `--attn`, and what "auto" proposes."""

from typing import NamedTuple

from clocher_kernels.dtypes import STORAGE
from clocher_runtime.engine.binding import Bound
from clocher_runtime.engine.footprint import SPARSE_ON, whole_layers
from clocher_runtime.models.build import COUNTS, Sizes
from clocher_runtime.models.selection import PAGE_CELLS
from clocher_runtime.models.spec import ModelSpec

WORTH = 0.15
"""Share of a step's reads above which reading fewer keys and values is proposed."""
PROPOSED = 2048


class PagesRead(NamedTuple):
    """Pages that attention read, and pages available, summed over layers and heads."""

    listed: int
    seen: int

    def share(self, before: "PagesRead") -> float:
        """Return the share read since an earlier state; 1 if there was nothing to read."""
        seen = self.seen - before.seen
        return (self.listed - before.listed) / seen if seen else 1.0


class StepBytes(NamedTuple):
    """Bytes that a step of one sequence reads at a full context.

    `windows`: KV of layers with a window or chunk; `whole`: of others; `fewer`: if sparse.
    """

    weights: int
    windows: int
    whole: int
    fewer: int

    @property
    def share(self) -> float:
        """Share of all reads that could be left out."""
        return self.whole / max(1, self.weights + self.windows + self.whole)

    @property
    def gain(self) -> float:
        """Speedup of a memory-bound step."""
        rest = self.weights + self.windows
        return (rest + self.whole) / max(1, rest + self.fewer)


def step_bytes(spec: ModelSpec, weights: int, context: int, cache_dtype: str) -> StepBytes:
    """Return what a step reads, given the bytes of weights and a full context in tokens."""
    line = spec.num_kv_heads * spec.head_dim
    scales = 8 * spec.num_kv_heads if cache_dtype == "i8" else 0
    cell = 2 * line * STORAGE[cache_dtype].itemsize + scales
    chunks = spec.chunks or (0,) * len(spec.windows)
    windows = sum(
        min(context, window or context, chunk or context)
        for window, chunk in zip(spec.windows, chunks, strict=True)
        if window or chunk
    )
    layers = whole_layers(spec)
    bounds = 8 * line * -(-context // PAGE_CELLS)
    fewer = min(context, PROPOSED) * cell + bounds
    return StepBytes(weights, cell * windows, cell * layers * context, layers * fewer)


def _proposal(found: StepBytes, sizes: Sizes, backend: str) -> str:
    share = f"keys and values are {found.share:.0%} of what a step reads at {sizes.context} tokens"
    if found.share <= WORTH or found.gain <= 1 or backend not in SPARSE_ON:
        return f"attention: {share}; all of them are read"
    return (
        f"attention: {share}; --attn topk:{PROPOSED} would read {found.fewer / found.whole:.0%} of "
        f"them, and steps there should be up to {found.gain:.2f} times as fast; it is lossy, so "
        "all of them are read until it is asked for"
    )


class AttentionReads:
    """What attention reads of a KV cache; `proposal`: with "auto", whether less would pay."""

    def __init__(self, bound: Bound) -> None:
        sizes, config, model, self.proposal = bound.sizes, bound.config, bound.model, ""
        self.mode = "dense" if sizes.selection is None else sizes.selection.name
        self._executor, self._tokens = bound.executor, sizes.tokens
        if config.attn == "auto":
            weights = model.bytes_per_token
            found = step_bytes(model.spec, weights, sizes.context, sizes.cache_dtype)
            self.proposal = _proposal(found, sizes, config.backend)

    @property
    def pages(self) -> PagesRead:
        """Pages read since the session began; (0, 0) where all are read."""
        if self.mode == "dense":
            return PagesRead(0, 0)
        listed, seen = self._executor.fetch(COUNTS, self._tokens).sum(axis=(0, 1)).tolist()
        return PagesRead(listed, seen)
