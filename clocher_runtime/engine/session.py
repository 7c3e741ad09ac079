"""A session: one Plan bound to one back end, shared by all who generate. It knows ids, not text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from clocher_kernels.errors import ModelChanged, UsageError
from clocher_runtime.config.engine import EngineConfig
from clocher_runtime.engine.arguments import (
    Sampling,
    check_biases,
    check_functions,
    for_each_prompt,
    prompt_ids,
    whole,
)
from clocher_runtime.engine.attention_reads import AttentionReads
from clocher_runtime.engine.backends import Progress, acted_on
from clocher_runtime.engine.binding import bind
from clocher_runtime.engine.constraint import Constraint, one_for_each
from clocher_runtime.engine.diffusing import diffusing, longest_text, of_call, width_of
from clocher_runtime.engine.draft_model import (
    DraftModel,
    check_draft,
    speculates,
    speculator_of,
)
from clocher_runtime.engine.footprint import draft_config, sizes_of
from clocher_runtime.engine.generation import Generation
from clocher_runtime.engine.load import Model
from clocher_runtime.engine.pages import PageStats
from clocher_runtime.engine.requests import OutputQueue, Request, Score, Take
from clocher_runtime.engine.scheduler import Scheduler
from clocher_runtime.engine.step_lock import StepLock
from clocher_runtime.engine.timing import TimedWindow
from clocher_runtime.engine.work_touch import Touch
from clocher_runtime.speculation.speculator import Account, Counts, account
from clocher_runtime.speculation.track import Track


class Session:
    """A model bound to a back end. Any number of threads and generations share its steps.

    A thread that waits for a token does the next step for all, or waits while another does it. A
    generation that was dropped leaves before the next step.

    Args:
        draft: a small model of the same vocabulary that drafts tokens, with "auto" or "draft".
        calibration: token ids that the thresholds of `act_sparsity` are taken from.
        progress, packing: called with (done, total), the first while kernels compile or weights are
            copied, the second while weights are packed, if they are many.

    Attributes:
        act_prec, speculate: what matmuls read, and what drafts tokens, once all is decided.
        changed: what became of a weight file while it was in use, with `keep_mapped`; else "".

    Raises:
        UsageError: a size is out of range, or two settings exclude each other.
        OutOfMemory: the KV cache, the buffers or the packed weights do not fit in memory.
    """

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        *,
        draft: Model | None = None,
        calibration: Sequence[int] | None = None,
        progress: Progress | None = None,
        packing: Progress | None = None,
    ) -> None:
        check_functions(progress=progress, packing=packing)
        self.model, self.config = model, config
        self._blocks = diffusing(model.spec, config.diffusion, config.speculate)
        drafts = self._blocks is None and speculates(config)
        check_draft(draft, config.speculate if self._blocks is None else "off")
        self.speculate = config.speculate if drafts else "off"
        self.sizes = sizes = sizes_of(
            model.spec, config, speculates=drafts, width=width_of(self._blocks)
        )
        bound = bind(
            model, config, sizes, calibration=calibration, progress=progress, packing=packing
        )
        self.executor, self.act_prec = bound.executor, bound.act_prec
        self._scope_is_kept = bound.scope_is_kept
        self._longest = longest_text(self._blocks, sizes.longest)
        self._draft_model: DraftModel | None = None
        if drafts and draft is not None:
            smaller = draft_config(config, sizes, draft.spec)
            guest = bind(
                draft,
                smaller,
                sizes_of(draft.spec, smaller),
                progress=progress,
                packing=packing,
                beside=self.executor,
            )
            self._draft_model = DraftModel(guest, model.spec.vocab_size)
        speculator = None
        if drafts:
            speculator = speculator_of(self.speculate, sizes.rows, self._draft_model)
        self.scheduler = Scheduler(bound, speculator)
        self.reading = AttentionReads(bound)
        self.changed = ""
        self._lock = StepLock(self.scheduler)

    @property
    def diffusion(self) -> str:
        """How blocks are decoded: "lossless", a rule, or "off"."""
        return "off" if self._blocks is None else self._blocks.name

    @property
    def isa(self) -> str:
        """Instruction set that the kernels were compiled for."""
        return self.executor.isa

    @property
    def acted_on(self) -> frozenset[str]:
        """Settings that change what happens; "pretranspose" if it was obeyed."""
        return acted_on(self.executor) | ({"pretranspose"} if self._scope_is_kept else set())

    @property
    def context(self) -> int:
        """Tokens of the context."""
        return self.sizes.context

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence: the context, unless the KV cache holds less."""
        return self._longest

    @property
    def kv_cache_bytes(self) -> int:
        """Memory of the KV cache, tables and scales included."""
        buffers = self.executor.plan.buffers.values()
        return sum(buffer.nbytes for buffer in buffers if buffer.role == "state")

    @property
    def kv_hits(self) -> int:
        """Keys of earlier tokens that tokens found in the cache."""
        return self.scheduler.kv_hits

    @property
    def kv_misses(self) -> int:
        """Tokens that were computed."""
        return self.scheduler.kv_misses

    def speculation(self, before: Counts | None = None) -> Account:
        """Return what speculation came to, since an earlier state of its counts."""
        speculator = self.scheduler.speculator
        if speculator is None:
            return Account(self.scheduler.forwards.counts.since(before or Counts()))
        return account(speculator.costs, speculator.counts, before, speculator.draft_ns)

    def page_stats(self) -> list[PageStats]:
        """Count the pages of each pool: blank, cached, in use; those of calls that left are not."""
        with self._lock.taken("page_stats"):
            self.scheduler.sweep()
            return self.scheduler.page_stats()

    def warm(self) -> None:
        """Run one step, so that every kernel is compiled. Raises SessionBusy, UsageError."""
        with self._lock.taken("warm"), self.executor.running():
            self.executor.warm()
            self.scheduler.forwards.warm()
            if self._draft_model is not None:
                self._draft_model.warm()
            self.synchronize()

    def work_touch(self, bytes_per_token: int, stride: int) -> Touch | None:
        """Return a work-touch of weights on a device, else None. Raises SessionBusy, UsageError."""
        with self._lock.taken("work_touch"):
            make = getattr(self.executor, "work_touch", None)
            touch: Touch | None = make(bytes_per_token, stride) if make else None
            return touch

    def synchronize(self) -> None:
        """Wait until the device has done all steps."""
        self.executor.synchronize()

    def close(self) -> None:
        """End all generations after the step that runs; release all. Raises SessionBusy."""
        if self._lock.close():
            if self._draft_model is not None:
                self._draft_model.close()
            self.executor.close()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new: int,
        sampling: Sampling | None = None,
        stop_ids: frozenset[int] | None = None,
        window: TimedWindow | None = None,
        after_token: Callable[[int], None] | None = None,
        **more: Any,
    ) -> Generation:
        """Generate tokens for some prompts.

        It joins the steps of the session when its first token is asked for, and leaves when the
        last one is made, or it is closed or dropped. While others step, its tokens are made too.
        Every step is one span of `window`, "prefill" if it has tokens of a prompt, else "decode".

        Args:
            prompts: token ids of each prompt, at least one each.
            max_new: tokens to generate for each prompt; fewer where the context ends.
            sampling: how tokens are chosen; greedy by default.
            stop_ids: ids that end a sequence; None: the model's; empty: none.
            window: measures the steps; no other generation may run beside a measured one.
            after_token: called inside the span with the number of tokens that the step made.
            **more: logits (bool): give each token the logits that it was drawn from; salt (str):
                find only cached pages of the same salt; constraints: of each prompt or None, each
                of one call only; diffusion (str): how blocks are denoised, if not as usual.

        Returns:
            Tokens, in the order of their steps. What is wrong shows when the first is asked for.

        Raises:
            SessionBusy: a measured generation beside another, or a call from within a step.
            UsageError: no prompt, an empty or too long one, an id that is no token; closed.
            NonFinite: a step gave logits that are NaN or infinite.
            ModelChanged: a weight file is another one since it was loaded; looked for before the
                first step and after the last one.
        """
        call = _Call(**more)

        def begin() -> OutputQueue:
            usable, most = self._usable(prompts), whole("max_new", max_new, 1)
            stop = frozenset(self.model.spec.eos_ids) if stop_ids is None else stop_ids
            chosen, salt = sampling or Sampling(), call.salt.encode()
            check_biases(chosen.logit_bias, self.model.spec.vocab_size)
            allowed = self.executor.array("allowed")
            bound = one_for_each(call.constraints, len(usable), allowed)
            queue = OutputQueue(len(usable), window, after_token, call.logits)
            blocks = of_call(self._blocks, call.diffusion)
            requests: list[Request] = []
            for index, (ids, constraint) in enumerate(zip(usable, bound, strict=True)):
                fields: dict[str, Any] = {
                    "ids": ids,
                    "salt": salt,
                    "queue": queue,
                    "index": index,
                    "budget": max(1, min(most, self._longest - len(ids))),
                    "sampling": chosen,
                    "stop": stop,
                    "constraint": constraint,
                    "track": self._track(ids, chosen, salt, constraint),
                }
                if blocks is None:
                    requests.append(Request(**fields))
                else:
                    requests.append(blocks.request(self._longest, fields))
            self._submit("generate", requests)
            return queue

        return Generation(begin, self._lock, self._check_files)

    def check(self, prompt: Sequence[int]) -> None:
        """Check that a prompt can be generated from. Raises UsageError."""
        self._usable_ids(prompt)

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """Return the logits after each token of one sequence, [T, V] fp32; see `score`."""
        out = np.empty((len(ids), self.model.spec.vocab_size), np.float32)
        self.score(ids, out.__setitem__)
        return out

    def score(self, ids: Sequence[int], take: Take) -> None:
        """Hand over the logits after each token of one sequence; see `scoring`."""
        for _ in self.scoring(ids, take):
            pass

    def scoring(self, ids: Sequence[int], take: Take) -> Generation:
        """Hand over the logits after each token of one sequence while steps are done.

        Each token sees those before it, also where blocks see themselves. The generation has no
        token, and ends when the last position has been handed over; see `generate` for errors.

        Args:
            ids: the sequence.
            take: called with each position in order, and logits [V] fp32 that are valid meanwhile.
        """
        if not (self.config.all_logits or self.config.score_rows):
            raise UsageError("logits: make the session with all_logits=True, or with score_rows")
        (usable,) = self._usable([ids])

        def begin() -> OutputQueue:
            request = Score(ids=usable, queue=OutputQueue(1), scored=take)
            self._submit("logits", [request])
            return request.queue

        return Generation(begin, self._lock, self._check_files)

    def step(self) -> bool:
        """Do the next step for all who generate; return whether there is more to do.

        For one loop that serves many, with `Generation.poll`. Raises SessionBusy, UsageError.
        """
        with self._lock.taken("step"):
            self.scheduler.step()
            return not self.scheduler.is_idle

    def _track(
        self, ids: list[int], sampling: Sampling, salt: bytes, constraint: Constraint | None
    ) -> Track | None:
        """Return what is to be drafted for a sequence; None if nothing is."""
        speculator = self.scheduler.speculator
        if speculator is None or not (constraint is None or hasattr(constraint, "undo")):
            return None
        track = speculator.track()
        if self._draft_model is not None:
            track.reader = self._draft_model.reader(ids, sampling, salt)
        return track

    def _check_files(self) -> None:
        """Raise ModelChanged if a weight file is another one now, or note it and go on."""
        try:
            self.model.checkpoint.check_unchanged()
        except ModelChanged as error:
            if not self.config.keep_mapped:
                raise
            self.changed = self.changed or str(error)

    def _submit(self, purpose: str, requests: Sequence[Request]) -> None:
        self._check_files()
        with self._lock.taken(purpose):
            self.scheduler.submit(requests)

    def _usable(self, given: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return the ids of the prompts of a call, one list for each."""
        return for_each_prompt(given, self._usable_ids)

    def _usable_ids(self, prompt: Sequence[int]) -> list[int]:
        what = "context" if self._longest == self.context else "KV cache (kv_pages)"
        return prompt_ids(prompt, self.model.spec.vocab_size, self._longest, what)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """Options of a call; see `Session.generate`."""

    logits: bool = False
    salt: str = ""
    constraints: Sequence[Constraint | None] | None = None
    diffusion: str | None = None
