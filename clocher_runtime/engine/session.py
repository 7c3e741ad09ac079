"""A session: one Plan bound to one back end, shared by all who generate. It knows ids, not text."""

from collections.abc import Callable, Sequence
from dataclasses import replace

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
from clocher_runtime.engine.backends import Binding, Executor, Progress, acted_on
from clocher_runtime.engine.binding import bind
from clocher_runtime.engine.constraint import Constraint, one_for_each
from clocher_runtime.engine.diffusing import diffusing, longest_text, of_call, prepare, width_of
from clocher_runtime.engine.draft_model import DraftModel
from clocher_runtime.engine.drafting import Drafting, check_draft
from clocher_runtime.engine.footprint import guesses, sizes_beside, sizes_of
from clocher_runtime.engine.generation import Generation
from clocher_runtime.engine.load import Model
from clocher_runtime.engine.pages import Census
from clocher_runtime.engine.probes import Touch
from clocher_runtime.engine.reading import Reading
from clocher_runtime.engine.requests import Mailbox, Request
from clocher_runtime.engine.scheduler import Scheduler
from clocher_runtime.engine.timing import TimedWindow
from clocher_runtime.engine.turns import Turns
from clocher_runtime.speculation.speculator import Account, Counts, Track, account


class Session:
    """A model bound to a back end. Any number of threads and generations share its steps.

    Whoever waits for a token does the next step for all, or waits for who is doing it. A generation
    that nobody holds any more leaves before the next step.

    Attributes:
        changed: what became of a weight file while it was in use, with `keep_mapped`; else "".

    Args:
        model: from `load_model`.
        config: how it is bound and stepped.
        draft: a small model of the same vocabulary that drafts tokens, with "auto" or "draft".
        calibration: token ids that the thresholds of `act_sparsity` are taken from.
        progress, packing: called with (done, total), the first while kernels compile or weights are
            copied, the second while weights are packed, if they are many.

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
        self._blocks = diffusing(model.spec, config.diffusion, config.speculate)
        mode = config.speculate if self._blocks is None else "off"
        drafts = guesses(config) and self._blocks is None
        check_draft(draft, mode)
        sizes = sizes_of(
            model.spec,
            config,
            speculates=drafts,
            width=width_of(self._blocks),
        )
        self.model, self.batch, self.context = model, sizes.slots, sizes.context
        self.kv_dtype, self._chunk = sizes.kv_dtype, sizes.tokens
        how = Binding(config=config, progress=progress, packing=packing)
        own = bind(model, sizes, how, config.act_sparsity, calibration)
        self.act_sparsity = config.act_sparsity
        self.act_prec, self._scope_is_kept = own.act_prec, own.scope_is_kept
        self._executor, self._longest = own.executor, longest_text(self._blocks, own.longest)
        self._scores = config.all_logits or config.score_rows > 0
        self._drafting: Drafting | None = None
        if drafts:
            drafting = None
            if draft is not None:
                smaller = sizes_beside(sizes, draft.spec, config)
                guest = bind(draft, smaller, replace(how, beside=self._executor))
                drafting = DraftModel(guest, model.spec.vocab_size)
            self._drafting = Drafting(mode, sizes.rows, drafting)
        speculator = self._drafting.speculator if self._drafting is not None else None
        self._scheduler = Scheduler(
            self._executor,
            own.pages,
            self.batch,
            own.weights,
            self.act_prec,
            config.itl_ms,
            speculator,
        )
        self.speculate = mode if drafts else "off"
        self.reading = Reading(own, config.backend, config.attn)
        self._keeps_mapped, self.changed = config.keep_mapped, ""
        self._turns = Turns(self._scheduler)

    @property
    def diffusion(self) -> str:
        """How blocks are decoded: "lossless", a rule, or "off"."""
        return "off" if self._blocks is None else self._blocks.name

    @property
    def isa(self) -> str:
        """Instruction set that the kernels were compiled for."""
        return self._executor.isa

    @property
    def acted_on(self) -> frozenset[str]:
        """Settings that change what happens; "pretranspose" if it was obeyed."""
        kept = {"pretranspose"} if self._scope_is_kept else set()
        return acted_on(self._executor) | kept

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence: the context, unless the KV cache holds less."""
        return self._longest

    @property
    def executor(self) -> Executor:
        """What executes the Plan, for those who measure it."""
        return self._executor

    @property
    def scheduler(self) -> Scheduler:
        """Who computes what, for those who measure it."""
        return self._scheduler

    @property
    def kv_cache_bytes(self) -> int:
        """Memory of the KV cache, tables and scales included."""
        buffers = self._executor.plan.buffers.values()
        return sum(buffer.nbytes for buffer in buffers if buffer.role == "state")

    @property
    def kv_hits(self) -> int:
        """Keys of earlier tokens that tokens found in the cache."""
        return self._scheduler.kv_hits

    @property
    def kv_misses(self) -> int:
        """Tokens that were computed."""
        return self._scheduler.kv_misses

    def speculation(self, before: Counts | None = None) -> Account:
        """Return what guessing came to, since an earlier state of its counts."""
        speculator = self._scheduler.speculator
        if speculator is None:
            return Account(self._scheduler.passes.counts.since(before or Counts()))
        return account(speculator.costs, speculator.counts, before, speculator.draft_ns)

    def census(self) -> list[Census]:
        """Count the pages of each pool: blank, cached, in use; those of who has left are unused."""
        with self._turns.taken("census"):
            self._scheduler.sweep()
            return self._scheduler.census()

    def warm(self) -> None:
        """Run one step, so that every kernel is compiled and loaded.

        Raises:
            SessionBusy: it is called from within a step.
            UsageError: the session is closed.
        """
        with self._turns.taken("warm"), self._executor.running():
            self._executor.warm()
            self._scheduler.passes.warm()
            if self._drafting is not None:
                self._drafting.warm()
            self.synchronize()

    def work_touch(self, bytes_per_token: int, stride: int) -> Touch | None:
        """Return a work-touch of the weights on the device; None: they are the mapped files.

        Raises:
            SessionBusy: it is called from within a step.
            UsageError: the session is closed.
        """
        with self._turns.taken("work_touch"):
            make = getattr(self._executor, "work_touch", None)
            touch: Touch | None = make(bytes_per_token, stride) if make else None
            return touch

    def synchronize(self) -> None:
        """Wait until the device has done all steps."""
        self._executor.synchronize()

    def close(self) -> None:
        """Stop the threads and release the buffers, after the step that runs. Generations end.

        Raises:
            SessionBusy: it is called from within a step.
        """
        if self._turns.close():
            if self._drafting is not None:
                self._drafting.close()
            self._executor.close()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new: int,
        sampling: Sampling | None = None,
        stop_ids: frozenset[int] | None = None,
        window: TimedWindow | None = None,
        after_token: Callable[[int], None] | None = None,
        *,
        logits: bool = False,
        salt: str = "",
        constraints: Sequence[Constraint | None] | None = None,
        diffusion: str | None = None,
    ) -> Generation:
        """Generate tokens for some prompts.

        It joins the steps of the session when its first token is asked for, and leaves when the
        last one is made, or it is closed or dropped. While others step, its tokens are made too,
        and wait for being asked for.

        Every step is one span of `window`, "prefill" if it has tokens of a prompt, else "decode".
        What the caller does between two tokens is outside the window.

        Args:
            prompts: token ids of each prompt, at least one each.
            max_new: tokens to generate for each prompt; fewer where the context ends.
            sampling: how tokens are chosen; greedy by default.
            stop_ids: ids that end a sequence; None: the model's; empty: none.
            window: measures the steps; no other generation may run beside a measured one.
            after_token: called inside the span with the number of tokens that the step made.
            logits: give each token the logits that it was drawn from.
            salt: find only cached texts of the same salt.
            constraints: of each prompt, what its text may be, or None; each of one call only.
            diffusion: how blocks are denoised, if not as the session does.

        Returns:
            Tokens, in the order of their steps. What is wrong shows when the first is asked for.

        Raises:
            SessionBusy: a measured generation beside another, or a call from within a step.
            UsageError: no prompt, an empty or too long one, or an id that is no token; or the
                session is closed.
            NonFinite: a step gave logits that are NaN or infinite.
            ModelChanged: a weight file was written to, replaced or deleted since it was loaded;
                looked for before the first step and after the last one.
        """

        def begin() -> Mailbox:
            usable, most = self._usable(prompts), whole("max_new", max_new, 1)
            stop = frozenset(self.model.spec.eos_ids) if stop_ids is None else stop_ids
            chosen = sampling or Sampling()
            check_biases(chosen.logit_bias, self.model.spec.vocab_size)
            bound = one_for_each(constraints, len(usable), self._executor.array("allowed"))
            box = Mailbox(len(usable), window, after_token, logits)
            requests = [
                Request(
                    ids=ids,
                    salt=salt.encode(),
                    box=box,
                    index=index,
                    budget=max(1, min(most, self._longest - len(ids))),
                    sampling=chosen,
                    stop=stop,
                    constraint=limit,
                    track=self._track(ids, chosen, salt.encode(), limit),
                )
                for index, (ids, limit) in enumerate(zip(usable, bound, strict=True))
            ]
            prepare(of_call(self._blocks, diffusion), requests, self._longest)
            self._submit("generate", requests)
            return box

        return self._generation(begin)

    def check(self, prompt: Sequence[int]) -> None:
        """Check that a prompt can be generated from.

        Raises:
            UsageError: it is empty, longer than the context, or has an id that is no token.
        """
        self._usable_ids(prompt)

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """Return the logits after each token of one sequence, [T, V] fp32; see `score`."""
        out = np.empty((len(ids), self.model.spec.vocab_size), np.float32)
        self.score(ids, out.__setitem__)
        return out

    def score(self, ids: Sequence[int], take: Callable[[int, np.ndarray], None]) -> None:
        """Hand over the logits after each token of one sequence; see `scoring`."""
        for _ in self.scoring(ids, take):
            pass

    def scoring(self, ids: Sequence[int], take: Callable[[int, np.ndarray], None]) -> Generation:
        """Hand over the logits after each token of one sequence while steps are done.

        Args:
            ids: the sequence; each token sees those before it, also where blocks see themselves.
            take: called with each position in order, and logits [V] fp32 that are valid meanwhile.

        Returns:
            What has no token, and ends when the last position has been handed over.

        Raises:
            SessionBusy: a measured generation runs, or a call from within a step.
            UsageError: the session was not made with all_logits, the sequence does not fit the
                context, or an id is no token.
            NonFinite: a logit is NaN or infinite.
            ModelChanged: see `generate`.
        """
        if not self._scores:
            raise UsageError("logits: make the session with all_logits=True, or with score_rows")
        (usable,) = self._usable([ids])

        def begin() -> Mailbox:
            request = Request(
                ids=usable, box=Mailbox(1), index=0, budget=0, sampling=Sampling(), scored=take
            )
            self._submit("logits", [request])
            return request.box

        return self._generation(begin)

    def step(self) -> bool:
        """Do the next step for all who generate; return whether there is more to do.

        Whoever waits for a token does this by itself; it is for one loop that serves many, and
        takes what is made with `Generation.poll`.

        Raises:
            SessionBusy: it is called from within a step.
            UsageError: the session is closed.
        """
        with self._turns.taken("step"):
            self._scheduler.step()
            return not self._scheduler.is_idle

    def _track(
        self, ids: list[int], sampling: Sampling, salt: bytes, constraint: Constraint | None
    ) -> Track | None:
        """Return what is to be guessed about a text; None if nothing is."""
        speculator = self._scheduler.speculator
        can_undo = constraint is None or hasattr(constraint, "undo")
        if self._drafting is None or speculator is None or not can_undo:
            return None
        return self._drafting.track(speculator, ids, sampling, salt)

    def _generation(self, begin: Callable[[], Mailbox]) -> Generation:
        return Generation(begin, self._turns.serve, self._turns.let_go, self._check_files)

    def _check_files(self) -> None:
        """Raise ModelChanged if a weight file is another one now, or note it and go on."""
        try:
            self.model.checkpoint.check_unchanged()
        except ModelChanged as error:
            if not self._keeps_mapped:
                raise
            self.changed = self.changed or str(error)

    def _submit(self, purpose: str, requests: Sequence[Request]) -> None:
        self._check_files()
        with self._turns.taken(purpose):
            self._scheduler.submit(requests)

    def _usable(self, given: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return the ids of the prompts of a call, one list for each."""
        return for_each_prompt(given, self._usable_ids)

    def _usable_ids(self, prompt: Sequence[int]) -> list[int]:
        what = "context" if self._longest == self.context else "KV cache (kv_pages)"
        return prompt_ids(prompt, self.model.spec.vocab_size, self._longest, what)
