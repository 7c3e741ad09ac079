"""A session: one Plan bound to one back end, and the generate loop. It knows ids, not text."""

import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

import numpy as np

from clocher_kernels.errors import NonFinite, SessionBusy, UsageError
from clocher_kernels.host_memory import require
from clocher_kernels.ops.sampling import NO_TOKEN
from clocher_kernels.plan import Plan
from clocher_runtime.engine.arguments import Sampling, listed, one_of, shown, token_ids, whole
from clocher_runtime.engine.backends import (
    ACTIVATIONS,
    CHUNK_DEFAULT,
    KV_DEFAULT,
    Executor,
    Progress,
    acted_on,
    default_act_prec,
    make_executor,
)
from clocher_runtime.engine.load import Model
from clocher_runtime.engine.nonfinite import explain
from clocher_runtime.engine.probes import Touch
from clocher_runtime.engine.sequences import Growing, Token, chunks, take_all
from clocher_runtime.engine.step_inputs import StepInputs
from clocher_runtime.engine.timing import TimedWindow
from clocher_runtime.engine.tuning import Tuning
from clocher_runtime.engine.turns import Stream, Turn
from clocher_runtime.models.build import build_plan
from clocher_runtime.models.inventory import SCOPES, in_scope
from clocher_runtime.models.rewrite import INTEGER_PRODUCTS, quantize_activations

KV_DTYPES = ("f32", "bf16", "f16", "e4m3", "e5m2", "i8")
DEFAULT_CONTEXT = 4096
MAX_THREADS = 1024
_MOST = (1 << 31) - 1  # slots and rows are int32
ACT_GROUP = 128
"""Columns per scale of int8 activations."""


class Session:
    """A model bound to a back end. It does one thing at a time (`turns`); two sessions do two.

    Args:
        model: from `load_model`.
        backend: "cpu", "cuda" or "reference".
        threads: threads of the CPU team.
        batch: sequences generated side by side.
        context: cells of each sequence, prompt and output; None: the model's, at most 4096.
        kv_dtype: storage of the KV cache: f32, bf16, f16, e4m3, e5m2 or i8; None: the back end's.
        chunk: tokens of a prefill step; None: the back end's.
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
        chunk: int | None = None,
        act_prec: str | None = None,
        tuning: Tuning | None = None,
        pretranspose: str | None = None,
        all_logits: bool = False,
        progress: Progress | None = None,
        packing: Progress | None = None,
    ) -> None:
        one_of("backend", backend, ACTIVATIONS)
        kv_dtype = KV_DEFAULT[backend] if kv_dtype is None else kv_dtype
        one_of("kv_dtype", kv_dtype, KV_DTYPES)
        chunk = CHUNK_DEFAULT.get(backend, 128) if chunk is None else chunk
        batch, chunk = whole("batch", batch, 1, _MOST), whole("chunk", chunk, 1, _MOST)
        threads = whole("threads", threads, 1, MAX_THREADS)
        for name, function in (("progress", progress), ("packing", packing)):
            if function is not None and not callable(function):
                raise UsageError(f"{name} is {shown(function)}; expected a function or None")
        longest = model.spec.max_positions
        context = min(longest, DEFAULT_CONTEXT) if context is None else whole("context", context)
        if not 1 <= context <= longest:
            raise UsageError(f"context is {shown(context)}; this model takes 1 to {longest}")
        self.model, self.batch, self.context, self.kv_dtype = model, batch, context, kv_dtype
        self._chunk = max(chunk, batch)
        plan = build_plan(
            model.spec,
            model.formats,
            tokens=self._chunk,
            rows=self._chunk if all_logits else batch,
            slots=batch,
            context=context,
            kv_dtype=kv_dtype,
            room=partial(_check_room, backend),
        )
        act_prec = default_act_prec(backend) if act_prec is None else act_prec
        one_of(f"act_prec of the {backend} back end", act_prec, ACTIVATIONS[backend])
        if pretranspose is not None:
            one_of("pretranspose", pretranspose, SCOPES)
        scope = in_scope(model.spec, pretranspose or "all")
        tuning = replace(tuning or Tuning(), copied=scope if pretranspose else frozenset())
        if act_prec == "int8":
            formats = {name: fmt for name, fmt in model.formats.items() if name in scope}
            plan = quantize_activations(plan, formats, ACT_GROUP)
        self.act_prec = _act_prec(plan, act_prec)
        self._executor = make_executor(
            backend, plan, model.weights, threads, progress, act_prec, tuning, packing
        )
        packed = {c.args["w"] for c in plan.calls if c.op in ("linear_i8", *INTEGER_PRODUCTS)}
        self._scope_is_kept = backend == "cpu" and packed <= scope
        self._inputs = StepInputs(self._executor, batch)
        self._all_logits, self._is_warm = all_logits, False
        self._turn = Turn()
        self._last: Sequence[Token] = ()  # what the last step made
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
        """Run one step, so that every kernel is compiled and loaded.

        Raises:
            SessionBusy: a generation is under way.
        """
        with self._turn.taken("warm"):
            self._last, self._is_warm = (), True
            self._executor.warm()
            self._inputs.choose(Sampling())
            self._inputs.stage([0], [0], [0], [0], [0])
            self._executor.step(1, 1)
            self.synchronize()

    def work_touch(self, bytes_per_token: int, stride: int) -> Touch | None:
        """Return a work-touch of the weights on the device; None: they are the mapped files.

        Raises:
            SessionBusy: a generation is under way.
        """
        with self._turn.taken("work_touch"):
            make = getattr(self._executor, "work_touch", None)
            touch: Touch | None = make(bytes_per_token, stride) if make else None
            return touch

    def synchronize(self) -> None:
        """Wait until the device has done all steps."""
        self._executor.synchronize()

    def close(self) -> None:
        """Stop the threads and release the buffers. A generation that is suspended ends.

        Raises:
            SessionBusy: a step is running, in another thread or around this call.
        """
        if self._turn.end():
            self._last = ()
            self._executor.close()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new: int,
        sampling: Sampling | None = None,
        stop_ids: frozenset[int] | None = None,
        window: TimedWindow | None = None,
        after_token: Callable[[int], None] | None = None,
    ) -> Stream[Token]:
        """Generate tokens for up to `batch` prompts.

        The session is taken when the first token is asked for, and free again when the last one has
        been given out, or the stream is closed or dropped.

        Every step is one span of `window`: first "prefill" spans, then "decode" spans. What the
        caller does between two tokens is outside the window.

        Args:
            prompts: token ids of each prompt, at least one each.
            max_new: tokens to generate for each prompt; fewer where the context ends.
            sampling: how tokens are chosen; greedy by default.
            stop_ids: ids that end a sequence; None: the model's; empty: none.
            window: measures the steps.
            after_token: called inside the span with the number of tokens that the step made.

        Returns:
            Tokens, in the order of their steps. What is wrong shows when the first is asked for.

        Raises:
            SessionBusy: a generation is under way.
            UsageError: too many prompts, an empty or too long one, or an id that is no token; or
                the session is closed.
            NonFinite: a step gave logits that are NaN or infinite.
            ModelChanged: a weight file was written to, replaced or deleted since it was loaded;
                looked for before the first step and after the last one.
        """
        return Stream(
            lambda own: self._generate(
                own, prompts, max_new, sampling, stop_ids, window, after_token
            )
        )

    def _generate(
        self,
        own: "weakref.ref[Stream[Token]]",
        given: Sequence[Sequence[int]],
        max_new: int,
        sampling: Sampling | None,
        stop_ids: frozenset[int] | None,
        window: TimedWindow | None,
        after_token: Callable[[int], None] | None,
    ) -> Generator[Token, None, None]:
        """Yield the tokens of `generate`."""
        prompts, max_new = self._usable(given), whole("max_new", max_new, 1)
        self.model.checkpoint.check_unchanged()
        stop = frozenset(self.model.spec.eos_ids) if stop_ids is None else stop_ids
        span = window.span if window is not None else _no_span
        sequences = [
            Growing(slot, len(p), min(max_new, self.context - len(p)))
            for slot, p in enumerate(prompts)
        ]
        active: list[Growing] = []
        with self._turn.taken("generate", own), self._executor.running():
            self._inputs.choose(sampling or Sampling())
            if self._is_warm:  # another temperature may need more
                self._executor.warm()
            for slots, positions, ids, ends in chunks(prompts, self._chunk):
                self._last = ()
                with span("prefill", len(ids)):
                    self._inputs.stage(ids, slots, positions, ends, [0] * len(ends))
                    self._executor.step(len(ids), len(ends))
                    if ends and after_token is not None:
                        after_token(len(ends))
                self._count(positions)
                sampled = self._sampled(len(ends))
                if NO_TOKEN in sampled:
                    raise self._fault(self._again(prompts))
                ended = [sequences[slots[i]] for i in ends]
                tokens = take_all(ended, sampled, stop)
                active += [s for s, t in zip(ended, tokens, strict=True) if not t.last]
                self._last = tokens
                yield from tokens
            staged: list[Growing] = []
            while active:
                count, self._last = len(active), ()
                with span("decode", count):
                    if staged != active:
                        self._stage_decode(active)
                        staged = active
                    self._executor.step(count, count)
                    if after_token is not None:
                        after_token(count)
                    sampled = self._sampled(count)
                if NO_TOKEN in sampled:
                    raise self._fault([self._stage_decode(active)])
                tokens = take_all(active, sampled, stop)
                self._count([s.position for s in active])
                for s in active:
                    s.position += 1
                if any(t.last for t in tokens):
                    active = [s for s, t in zip(active, tokens, strict=True) if not t.last]
                self._last = tokens
                yield from tokens
        self.model.checkpoint.check_unchanged()

    def check(self, prompt: Sequence[int]) -> None:
        """Check that a prompt can be generated from.

        Raises:
            UsageError: it is empty, longer than the context, or has an id that is no token.
        """
        self._ids(prompt)

    def _ids(self, prompt: Sequence[int]) -> list[int]:
        """Return the ids of a prompt that can be generated from."""
        ids = token_ids(prompt)
        if not ids:
            raise UsageError("no tokens; give it at least one")
        if len(ids) > self.context:
            raise UsageError(
                f"{len(ids)} tokens, the context holds {self.context}; "
                "shorten it or raise --context"
            )
        last = self.model.spec.vocab_size - 1
        if min(ids) < 0 or max(ids) > last:
            at = next(i for i, each in enumerate(ids) if not 0 <= each <= last)
            raise UsageError(f"token {at} is the id {shown(ids[at])}, outside 0..{last}")
        return ids

    def step_logits(self, token: Token) -> np.ndarray:
        """Return the logits that a token was drawn from, [V] fp32, while its step is the last.

        Raises:
            SessionBusy: another thread began a step meanwhile.
            UsageError: another step has been, or is being, done since; or the session is closed.
        """
        self._turn.refuse_closed("step_logits")
        last = self._last
        if not any(made is token for made in last):
            raise UsageError(
                "step_logits: this token is not of the last step; ask before the next token is "
                "asked for"
            )
        logits: np.ndarray = self._executor.fetch("logits", token.row + 1)[token.row].copy()
        if self._last is not last:
            raise SessionBusy("step_logits: another thread asked for the next token meanwhile")
        return logits

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """Return the logits after each token of one sequence, [T, V] fp32.

        Raises:
            SessionBusy: a generation is under way.
            UsageError: the session was not made with `all_logits`, or an id is no token.
            NonFinite: a logit is NaN or infinite.
            ModelChanged: see `generate`.
        """
        if not self._all_logits:
            raise UsageError("logits: make the session with all_logits=True")
        prompts = self._usable([ids])
        self.model.checkpoint.check_unchanged()
        out = np.empty((len(prompts[0]), self.model.spec.vocab_size), np.float32)
        with self._turn.taken("logits"), self._executor.running():
            self._last = ()
            self._inputs.choose(Sampling())
            for slots, positions, tokens, _ in chunks(prompts, self._chunk):
                count = len(tokens)
                self._inputs.stage(tokens, slots, positions, range(count), [0] * count)
                self._executor.step(count, count)
                if NO_TOKEN in self._sampled(count):
                    raise self._fault(self._again(prompts))
                out[positions[0] : positions[0] + count] = self._executor.fetch("logits", count)
        self.model.checkpoint.check_unchanged()
        return out

    def _again(self, prompts: Sequence[Sequence[int]]) -> Iterator[tuple[int, int]]:
        """Stage the prompts again, step by step; yield counts of tokens and output rows."""
        for slots, positions, ids, ends in chunks(prompts, self._chunk):
            rows = range(len(ids)) if self._all_logits else ends
            yield self._inputs.stage(ids, slots, positions, rows, [0] * len(rows))

    def _fault(self, steps: Iterable[tuple[int, int]]) -> NonFinite:
        return explain(self._executor, self.model.weights, self.act_prec, steps)

    def _sampled(self, count: int) -> list[int]:
        """Return the token ids that the last step drew."""
        ids: list[int] = self._executor.fetch("sampled", count).tolist() if count else []
        return ids

    def _stage_decode(self, active: Sequence[Growing]) -> tuple[int, int]:
        """Write the inputs of the next decode steps; the Plan itself then steps them on."""
        return self._inputs.stage(
            [s.token for s in active],
            [s.slot for s in active],
            [s.position for s in active],
            range(len(active)),
            [s.made for s in active],
        )

    def _count(self, positions: Sequence[int]) -> None:
        self.kv_misses += len(positions)
        self.kv_hits += sum(positions)

    def _usable(self, given: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return the ids of the prompts of a call, one list for each."""
        prompts = listed(given, "a list of prompts, each a list of token ids")
        if not 1 <= len(prompts) <= self.batch:
            raise UsageError(
                f"{len(prompts)} prompts; this session takes 1 to {self.batch}; load it with "
                f"batch={len(prompts)} for more side by side"
            )
        usable = []
        for number, prompt in enumerate(prompts):
            try:
                usable.append(self._ids(prompt))
            except UsageError as error:
                raise UsageError(f"prompt {number}: {error}") from None
        return usable


def _no_span(kind: str, tokens: int) -> AbstractContextManager[None]:
    return nullcontext()


def _act_prec(plan: Plan, stored: str) -> str:
    """Return "int8" if the Plan has integer products, else how activations are stored."""
    integer = any(call.op in ("linear_i8", *INTEGER_PRODUCTS) for call in plan.calls)
    return "int8" if integer else "fp32" if stored == "int8" else stored


def _check_room(backend: str, buffers: int, tables: int) -> None:
    """Refuse before anything is allocated that the machine does not have."""
    # The GPU's memory is checked where it is known.
    require(
        tables if backend == "cuda" else buffers + tables,
        "KV cache and buffers need",
        "lower --context or --batch, or choose a smaller --kv-dtype",
    )
