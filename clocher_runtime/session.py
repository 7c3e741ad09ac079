"""A session: one Plan bound to one back end, and the generate loop. It knows ids, not text."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import numpy as np

from clocher_kernels.errors import OutOfMemory, UsageError
from clocher_kernels.plan import Plan
from clocher_runtime.backends import (
    ACTIVATIONS,
    KV_DEFAULT,
    Executor,
    Progress,
    acted_on,
    default_act_prec,
    make_executor,
)
from clocher_runtime.models.build import build_plan, page_table
from clocher_runtime.models.inventory import SCOPES, in_scope
from clocher_runtime.models.load import Model
from clocher_runtime.models.rewrite import INTEGER_PRODUCTS, quantize_activations
from clocher_runtime.probes import Touch
from clocher_runtime.timing import TimedWindow
from clocher_runtime.tuning import Tuning

_INPUTS = (
    "ids",
    "slots",
    "positions",
    "ends",
    "ancestors",
    "pages",
    "rows",
    "temperature",
    "top_k",
    "top_p",
    "seeds",
    "draws",
)
KV_DTYPES = ("f32", "bf16", "f16", "e4m3", "e5m2", "i8")
DEFAULT_CONTEXT = 4096
ACT_GROUP = 128
"""Columns per scale of int8 activations."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen; greedy by default.

    Attributes:
        temperature: 0 is greedy.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the shortest run of most likely tokens with this probability.
        seed: the same seed draws the same tokens, whatever the batch.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, good in (
            ("temperature", self.temperature, 0 <= self.temperature < float("inf")),
            ("top_k", self.top_k, 0 <= self.top_k < 1 << 31),
            ("top_p", self.top_p, 0 < self.top_p <= 1),
            ("seed", self.seed, 0 <= self.seed < 1 << 64),
        ):
            if not good:
                raise UsageError(
                    f"{name} is {value!r}; expected temperature >= 0, top_k >= 0, "
                    "0 < top_p <= 1, 0 <= seed < 2^64"
                )


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token.

    Attributes:
        sequence: index of its prompt in the call.
        last: nothing follows: the length is reached, or the id ends the sequence.
        row: row of the step's logits that it was drawn from.
    """

    sequence: int
    id: int
    last: bool
    row: int = 0


@dataclass(slots=True)
class _Sequence:
    """A sequence in its decode phase: the slot it lives in and the token to feed next."""

    slot: int
    position: int
    budget: int
    token: int = 0
    made: int = 0

    def take(self, token: int, stop: frozenset[int], row: int) -> Token:
        """Accept a generated token."""
        self.token = token
        self.made += 1
        return Token(self.slot, token, self.made >= self.budget or token in stop, row)


class Session:
    """A model bound to a back end.

    Args:
        model: from `load_model`.
        backend: "cpu", "cuda" or "reference".
        threads: threads of the CPU team.
        batch: sequences generated side by side.
        context: cells of each sequence, prompt and output; None: the model's, at most 4096.
        kv_dtype: storage of the KV cache: f32, bf16, f16, e4m3, e5m2 or i8; None: the back end's.
        chunk: tokens of a prefill step.
        act_prec: one of `backends.ACTIVATIONS[backend]`; None: its first.
        tuning: placement and memory access of the CPU team.
        pretranspose: weights that the CPU back end packs before the first step: "none", the output
            head ("woh"), the blocks ("wxh") or "all". Products with others keep fp32 activations,
            except ternary ones. Weights without a packed form are copied into large pages. None:
            "all" without these copies, which seldom pay.
        all_logits: keep logits of every token of a step, for scoring.
        progress: called with (done, total) while kernels compile, or weights are copied.
        packing: called with (done, total) while weights are packed, if they are many.

    Raises:
        UsageError: a size is out of range.
        OutOfMemory: the KV cache, the buffers or the packed weights do not fit in memory.
    """

    def __init__(
        self,
        model: Model,
        *,
        backend: str = "cpu",
        threads: int = 1,
        batch: int = 1,
        context: int | None = None,
        kv_dtype: str | None = None,
        chunk: int = 128,
        act_prec: str | None = None,
        tuning: Tuning | None = None,
        pretranspose: str | None = None,
        all_logits: bool = False,
        progress: Progress | None = None,
        packing: Progress | None = None,
    ) -> None:
        kv_dtype = KV_DEFAULT.get(backend, "f32") if kv_dtype is None else kv_dtype
        if kv_dtype not in KV_DTYPES:
            raise UsageError(f"kv_dtype is {kv_dtype!r}; known: {', '.join(KV_DTYPES)}")
        if min(batch, chunk, threads) < 1:
            raise UsageError(f"{batch=}, {chunk=}, {threads=}; each must be at least 1")
        longest = model.spec.max_positions
        context = min(longest, DEFAULT_CONTEXT) if context is None else context
        if not 1 <= context <= longest:
            raise UsageError(f"context is {context}; this model takes 1 to {longest}")
        self.model, self.batch, self.context = model, batch, context
        self.kv_dtype = kv_dtype
        self._chunk = max(chunk, batch)
        plan = build_plan(
            model.spec,
            model.formats,
            tokens=self._chunk,
            rows=self._chunk if all_logits else batch,
            slots=batch,
            context=context,
            kv_dtype=kv_dtype,
        )
        act_prec = default_act_prec(backend) if act_prec is None else act_prec
        if act_prec not in ACTIVATIONS[backend]:
            known = ", ".join(ACTIVATIONS[backend])
            raise UsageError(f"act_prec is {act_prec!r}; the {backend} back end knows {known}")
        if pretranspose not in (None, *SCOPES):
            raise UsageError(f"pretranspose is {pretranspose!r}; known: {', '.join(SCOPES)}")
        scope = in_scope(model.spec, pretranspose or "all")
        tuning = replace(tuning or Tuning(), copied=scope if pretranspose else frozenset())
        if act_prec == "int8":
            formats = {name: fmt for name, fmt in model.formats.items() if name in scope}
            plan = quantize_activations(plan, formats, ACT_GROUP)
        self.act_prec = _act_prec(plan, act_prec)
        if backend != "cuda":  # the GPU's memory is checked where it is known
            _check_memory(plan.scratch_bytes())
        self._executor = make_executor(
            backend, plan, model.weights, threads, progress, act_prec, tuning, packing
        )
        packed = {c.args["w"] for c in plan.calls if c.op in ("linear_i8", *INTEGER_PRODUCTS)}
        self._scope_is_kept = backend == "cpu" and packed <= scope
        self._inputs = {b: self._executor.array(b) for b in _INPUTS}
        self._inputs["pages"][...] = page_table(batch, self._inputs["pages"].shape[1])
        self._all_logits = all_logits
        self.kv_hits = self.kv_misses = 0

    @property
    def isa(self) -> str:
        """Instruction set that the kernels were compiled for."""
        return self._executor.isa

    @property
    def acted_on(self) -> frozenset[str]:
        """Fields of the tuning that change what happens, and "pretranspose" if it was obeyed."""
        kept = {"pretranspose"} if self._scope_is_kept else set()
        return acted_on(self._executor) | kept

    @property
    def executor(self) -> Executor:
        """What executes the Plan, for those who measure it."""
        return self._executor

    def warm(self) -> None:
        """Run one step, so that every kernel is compiled and loaded."""
        self._executor.warm()
        self._set_sampling(Sampling())
        self._stage([0], [0], [0], [0], [0])
        self._executor.step(1, 1)
        self.synchronize()

    def work_touch(self, bytes_per_token: int, stride: int) -> Touch | None:
        """Return a work-touch of the weights on the device; None: they are the mapped files."""
        make = getattr(self._executor, "work_touch", None)
        touch: Touch | None = make(bytes_per_token, stride) if make else None
        return touch

    def synchronize(self) -> None:
        """Wait until the device has done all steps."""
        self._executor.synchronize()

    def close(self) -> None:
        """Stop the threads and release the buffers."""
        self._executor.close()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new: int,
        sampling: Sampling | None = None,
        stop_ids: frozenset[int] | None = None,
        window: TimedWindow | None = None,
        after_token: Callable[[int], None] | None = None,
    ) -> Iterator[Token]:
        """Generate tokens for up to `batch` prompts.

        Every step is one span of `window`: first "prefill" spans, then "decode" spans. What the
        caller does between two tokens is outside the window.

        Args:
            prompts: token ids of each prompt, at least one each.
            max_new: tokens to generate for each prompt; fewer where the context ends.
            sampling: how tokens are chosen; greedy by default.
            stop_ids: ids that end a sequence; None: the model's; empty: none.
            window: measures the steps.
            after_token: called inside the span with the number of tokens that the step made.

        Yields:
            Tokens, in the order of their steps.

        Raises:
            UsageError: too many prompts, an empty or too long one, or an id that is no token.
            ModelChanged: a weight file was written to, replaced or deleted since it was loaded;
                looked for before the first step and after the last one.
        """
        self._check(prompts, max_new)
        self.model.checkpoint.check_unchanged()
        stop = frozenset(self.model.spec.eos_ids) if stop_ids is None else stop_ids
        span = window.span if window is not None else _no_span
        self._set_sampling(sampling or Sampling())
        sequences = [
            _Sequence(slot, len(p), min(max_new, self.context - len(p)))
            for slot, p in enumerate(prompts)
        ]
        active: list[_Sequence] = []
        with self._executor.running():
            for slots, positions, ids in self._chunks(prompts):
                ends = [i for i, p in enumerate(positions) if p == len(prompts[slots[i]]) - 1]
                with span("prefill", len(ids)):
                    self._stage(ids, slots, positions, ends, [0] * len(ends))
                    self._executor.step(len(ids), len(ends))
                    if ends and after_token is not None:
                        after_token(len(ends))
                self._count(positions)
                sampled = self._sampled(len(ends))
                for row, i in enumerate(ends):
                    sequence = sequences[slots[i]]
                    token = sequence.take(sampled[row], stop, row)
                    if not token.last:
                        active.append(sequence)
                    yield token
            staged: list[_Sequence] = []
            while active:
                count = len(active)
                with span("decode", count):
                    if staged != active:
                        self._stage_decode(active)
                        staged = active
                    self._executor.step(count, count)
                    if after_token is not None:
                        after_token(count)
                    sampled = self._sampled(count)
                tokens = [
                    s.take(i, stop, row)
                    for row, (s, i) in enumerate(zip(active, sampled, strict=True))
                ]
                self._count([s.position for s in active])
                for s in active:
                    s.position += 1
                if any(t.last for t in tokens):
                    active = [s for s, t in zip(active, tokens, strict=True) if not t.last]
                yield from tokens
        self.model.checkpoint.check_unchanged()

    def check(self, prompt: Sequence[int]) -> None:
        """Check that a prompt can be generated from.

        Raises:
            UsageError: it is empty, longer than the context, or has an id that is no token.
        """
        if not prompt:
            raise UsageError("no tokens; give it at least one")
        if len(prompt) > self.context:
            raise UsageError(
                f"{len(prompt)} tokens, the context holds {self.context}; "
                "shorten it or raise --context"
            )
        last = self.model.spec.vocab_size - 1
        if min(prompt) < 0 or max(prompt) > last:
            raise UsageError(f"an id is outside 0..{last}")

    def step_logits(self, token: Token) -> np.ndarray:
        """Return the logits that a token was drawn from, [V] fp32, while its step is the last."""
        logits: np.ndarray = self._executor.fetch("logits", token.row + 1)[token.row].copy()
        return logits

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """Return the logits after each token of one sequence, [T, V] fp32.

        Raises:
            UsageError: the session was not made with `all_logits`, or an id is no token.
            ModelChanged: see `generate`.
        """
        if not self._all_logits:
            raise UsageError("logits: make the session with all_logits=True")
        self._check([ids], 1)
        self.model.checkpoint.check_unchanged()
        self._set_sampling(Sampling())
        out = np.empty((len(ids), self.model.spec.vocab_size), np.float32)
        with self._executor.running():
            for slots, positions, tokens in self._chunks([ids]):
                count = len(tokens)
                self._stage(tokens, slots, positions, list(range(count)), [0] * count)
                self._executor.step(count, count)
                out[positions[0] : positions[0] + count] = self._executor.fetch("logits", count)
        self.model.checkpoint.check_unchanged()
        return out

    def _chunks(
        self, prompts: Sequence[Sequence[int]]
    ) -> Iterator[tuple[list[int], list[int], list[int]]]:
        """Cut all prompts, one after another, into steps: slots, positions and ids of each."""
        flat = [
            (slot, position, token)
            for slot, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        for start in range(0, len(flat), self._chunk):
            slots, positions, ids = zip(*flat[start : start + self._chunk], strict=True)
            yield list(slots), list(positions), list(ids)

    def _stage(
        self,
        ids: Sequence[int],
        slots: Sequence[int],
        positions: Sequence[int],
        rows: Sequence[int],
        draws: Sequence[int],
    ) -> None:
        """Write the inputs of a step of causal tokens."""
        count = len(ids)
        inputs = self._inputs
        inputs["ids"][:count] = ids
        inputs["slots"][:count] = slots
        inputs["positions"][:count] = positions
        inputs["ends"][:count] = inputs["positions"][:count] + 1
        inputs["rows"][: len(rows)] = rows
        inputs["draws"][: len(rows)] = draws
        self._executor.upload()

    def _sampled(self, count: int) -> list[int]:
        """Return the token ids that the last step drew."""
        ids: list[int] = self._executor.fetch("sampled", count).tolist() if count else []
        return ids

    def _stage_decode(self, active: Sequence[_Sequence]) -> None:
        """Write the inputs of the next decode steps; the Plan itself then steps them on."""
        self._stage(
            [s.token for s in active],
            [s.slot for s in active],
            [s.position for s in active],
            range(len(active)),
            [s.made for s in active],
        )

    def _set_sampling(self, sampling: Sampling) -> None:
        self._inputs["temperature"][...] = sampling.temperature
        self._inputs["top_k"][...] = sampling.top_k
        self._inputs["top_p"][...] = sampling.top_p
        self._inputs["seeds"][...] = np.uint64(sampling.seed)

    def _count(self, positions: Sequence[int]) -> None:
        self.kv_misses += len(positions)
        self.kv_hits += sum(positions)

    def _check(self, prompts: Sequence[Sequence[int]], max_new: int) -> None:
        if not 1 <= len(prompts) <= self.batch:
            raise UsageError(f"{len(prompts)} prompts; this session takes 1 to {self.batch}")
        if max_new < 1:
            raise UsageError(f"max_new is {max_new}; expected at least 1")
        for number, prompt in enumerate(prompts):
            try:
                self.check(prompt)
            except UsageError as error:
                raise UsageError(f"prompt {number}: {error}") from None


def _no_span(kind: str, tokens: int) -> AbstractContextManager[None]:
    return nullcontext()


def _act_prec(plan: Plan, stored: str) -> str:
    """Return "int8" if the Plan has integer products, else how activations are stored."""
    integer = any(call.op in ("linear_i8", *INTEGER_PRODUCTS) for call in plan.calls)
    return "int8" if integer else "fp32" if stored == "int8" else stored


def _check_memory(needed: int) -> None:
    """Refuse before allocating what the machine does not have."""
    import psutil

    available = int(psutil.virtual_memory().available)
    if needed > available:
        raise OutOfMemory(
            f"KV cache and buffers need {needed >> 20} MiB, {available >> 20} MiB are available; "
            "lower --context or --batch, or choose a smaller --kv-dtype"
        )
