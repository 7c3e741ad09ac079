"""A session: one Plan bound to one back end, shared by all callers. Token ids only."""

from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np

from clocher_kernels.errors import ModelChanged, UsageError
from clocher_kernels.ops.elementwise import rms_norm
from clocher_kernels.plan import Touch
from clocher_runtime.config.engine import EngineConfig
from clocher_runtime.config.values import shown
from clocher_runtime.engine import arguments
from clocher_runtime.engine.arguments import Constraint, Sampling
from clocher_runtime.engine.backends import Progress
from clocher_runtime.engine.binding import PagesRead, bind
from clocher_runtime.engine.footprint import draft_config, sizes_of, state_bytes
from clocher_runtime.engine.generation import Generation, StepLock
from clocher_runtime.engine.load import Model
from clocher_runtime.engine.requests import OutputQueue, Request, Score, Take
from clocher_runtime.engine.scheduler import Scheduler
from clocher_runtime.engine.timing import TimedWindow
from clocher_runtime.models.build import COUNTS
from clocher_runtime.models.inventory import NORM
from clocher_runtime.models.spec import ModelSpec
from clocher_runtime.speculation.draft import Answers, SuffixDrafter, Track
from clocher_runtime.speculation.gate import DraftModelGate
from clocher_runtime.speculation.speculator import WITH_DRAFT_MODEL, Account, Counts, Speculator

if TYPE_CHECKING:
    from clocher_runtime.engine.diffusing import Diffusing
    from clocher_runtime.engine.draft_model import DraftModel


class Session:
    """A model bound to a back end. Any number of threads and generations share its steps.

    A thread that waits for a token runs the next step for all, or waits while another does. `draft`
    is a model of the same vocabulary; `calibration`: see `act_sparsity`; `progress` and `packing`
    get (done, total) while kernels compile or weights are copied, and packed; `changed`: what
    happened to a weight file, with `keep_mapped`. Raises UsageError, OutOfMemory.

    Attributes:
        diffusion: how blocks are decoded: "lossless", a rule, or "off".
        isa: instruction set that the kernels were compiled for.
        longest: maximum sequence length: the context, or less if the KV cache is smaller.
        kv_cache_bytes: of the KV cache, tables and scales included.
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
        self.model, self.config = model, config
        self._blocks = _blocks(model.spec, config)
        drafts = self._blocks is None and _speculates(config)
        self.speculate = config.speculate if drafts else "off"
        if draft is None and self.speculate == "draft":
            raise UsageError(
                "speculate is 'draft' without a draft model; give draft_model to load, or "
                "--draft-model, or use 'auto'"
            )
        if draft is not None and self.speculate not in WITH_DRAFT_MODEL:
            raise UsageError(
                f"a draft model with speculate {self.speculate!r}; expected 'auto' or 'draft'"
            )
        width = 0 if self._blocks is None else 2 * self._blocks.blocks.block
        self.sizes = sizes = sizes_of(model.spec, config, speculates=drafts, width=width)
        functions: dict[str, Any] = {"progress": progress, "packing": packing}
        bound = bind(model, config, sizes, calibration=calibration, **functions)
        self.executor, self.act_prec = bound.executor, bound.act_prec
        self.synchronize = self.executor.synchronize
        self.diffusion = "off" if self._blocks is None else self._blocks.name
        self.isa, self.context, self.longest = self.executor.isa, sizes.context, sizes.longest
        if self._blocks is not None:
            self.longest = self._blocks.longest(sizes.longest)
        self._scope_is_kept = bound.scope_is_kept
        self.kv_cache_bytes = state_bytes(self.executor.plan)
        self._draft_model: DraftModel | None = None
        if drafts and draft is not None:
            from clocher_runtime.engine import draft_model

            smaller = draft_config(config, sizes, draft.spec)
            its_sizes = sizes_of(draft.spec, smaller)
            guest = bind(draft, smaller, its_sizes, beside=self.executor, **functions)
            self._draft_model = draft_model.DraftModel(guest, model.spec.vocab_size)
        speculator = None
        if drafts:
            gate = None if self._draft_model is None else DraftModelGate(self._draft_model)
            alone = self.speculate in ("auto", "suffix")
            answers = Answers()

            def make(shares: bool) -> SuffixDrafter | None:
                return SuffixDrafter(answers if shares else None) if alone else None

            speculator = Speculator(make, sizes.rows, gate)
        self.scheduler = Scheduler(bound, speculator)
        self.changed = ""
        self._lock = StepLock(self.scheduler)

    @property
    def acted_on(self) -> frozenset[str]:
        """Settings that have an effect; "pretranspose" if it was obeyed."""
        hints: frozenset[str] = getattr(self.executor, "acted_on", frozenset())
        return hints | ({"pretranspose"} if self._scope_is_kept else set())

    @property
    def pages_read(self) -> PagesRead:
        """Pages that attention has read; (0, 0) where it reads all."""
        if self.sizes.selection is None:
            return PagesRead(0, 0)
        counts = self.executor.fetch(COUNTS, self.sizes.tokens)
        return PagesRead(*counts.sum(axis=(0, 1)).tolist())

    def speculation(self, before: Counts | None = None) -> Account:
        """Return speculation figures, since an earlier state of its counts."""
        forwards, speculator = self.scheduler.forwards, self.scheduler.forwards.speculator
        counts = (speculator or forwards).counts.since(before or Counts())
        return speculator.account(counts) if speculator else Account(counts)

    def warm(self) -> None:
        """Run one step, so that every kernel is compiled. Raises SessionBusy, UsageError."""
        with self._lock.taken("warm"), self.executor.running():
            self.executor.warm()
            # Where single tokens need not be fast, the first of them does not wait for that.
            self.scheduler.forwards.warm(measure=self.config.itl_ms < inf)
            if self._draft_model is not None:
                self._draft_model.warm()
            self.synchronize()

    def work_touch(self, bytes_per_token: int, stride: int) -> Touch | None:
        """Return a work-touch of device weights, else None. Raises SessionBusy, UsageError."""
        with self._lock.taken("work_touch"):
            make = getattr(self.executor, "work_touch", None)
            touch: Touch | None = make(bytes_per_token, stride) if make else None
            return touch

    def close(self) -> None:
        """End all generations after the current step; release everything. Raises SessionBusy."""
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
        *,
        logits: bool = False,
        salt: str = "",
        constraints: Sequence[Constraint | None] | None = None,
        diffusion: str | None = None,
        adapter: str = "",
    ) -> Generation:
        """Generate tokens for prompts, given as token ids; yields them in step order.

        It joins the steps at its first token. `stop_ids` None takes the model's. Each step is one
        span of `window`, "prefill" if it has prompt tokens, else "decode", inside which
        `after_token` gets the number of tokens made. `salt`: cached pages are shared within it,
        and answers to draft from among calls without one; `constraints`: one or None per prompt;
        `adapter`: the name of a LoRA adapter.

        Raises SessionBusy (beside a measured generation or within a step), UsageError, NonFinite,
        ModelChanged (checked before the first step and after the last).
        """

        def begin() -> OutputQueue:
            usable = arguments.for_each_prompt(prompts, self.check)
            most = arguments.AT_LEAST_ONE.check("max_new", max_new)
            stop = frozenset(self.model.spec.eos_ids) if stop_ids is None else stop_ids
            chosen, number = sampling or Sampling(), self._adapter(adapter)
            arguments.check_biases(chosen.logit_bias, self.model.spec.vocab_size)
            allowed = self.executor.array("allowed")
            bound = arguments.one_for_each(constraints, len(usable), allowed)
            queue = OutputQueue(len(usable), window, after_token, logits)
            blocks = self._blocks
            if diffusion is not None:
                from clocher_runtime.engine.diffusing import of_call

                blocks = of_call(blocks, diffusion)
            make: Callable[..., Request] = Request
            if blocks is not None:
                make = partial(blocks.request, self.longest)
            requests = [
                make(
                    ids=ids,
                    salt=salt.encode(),
                    adapter=number,
                    queue=queue,
                    index=index,
                    budget=max(1, min(most, self.longest - len(ids))),
                    sampling=chosen,
                    stop=stop,
                    constraint=constraint,
                    track=self._track(ids, chosen, salt.encode(), constraint),
                )
                for index, (ids, constraint) in enumerate(zip(usable, bound, strict=True))
            ]
            self._submit("generate", requests)
            return queue

        return Generation(begin, self._lock, self._check_files)

    def check(self, prompt: Sequence[int]) -> list[int]:
        """Return the ids of a prompt that can be generated from. Raises UsageError."""
        what = "context" if self.longest == self.context else "KV cache (kv_pages)"
        spec = self.model.spec
        return arguments.prompt_ids(prompt, spec.vocab_size, self.longest, what, spec.max_positions)

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """Return the logits after each token of a sequence, [T, V] fp32; see `scoring`."""
        out = np.empty((len(ids), self.model.spec.vocab_size), np.float32)
        for _ in self.scoring(ids, out.__setitem__):
            pass
        return out

    def scoring(self, ids: Sequence[int], take: Take, adapter: str = "") -> Generation:
        """Call `take` with each position and its logits [V] fp32, valid during the call.

        The generation yields no tokens. Tokens see only earlier ones, also in block models.
        """
        if not (self.config.all_logits or self.config.score_rows):
            raise UsageError("logits: make the session with all_logits=True, or with score_rows")
        return self._delivering(ids, take, adapter)

    def states(
        self, ids: Sequence[int], take: Take, last_only: bool = False, adapter: str = ""
    ) -> Generation:
        """Call `take` with each position, or the last, and its final hidden state [D] fp32.

        The final norm is applied (Granite's is scaled). The generation yields no tokens.
        """
        weight, spec = np.asarray(self.model.weights[NORM]), self.model.spec
        eps = spec.norm_eps / spec.residual_scale**2  # as `Builder` has it

        def normed(position: int, row: np.ndarray) -> None:
            y = np.empty((1, row.size), np.float32)
            rms_norm(x=row[None], weight=weight, y=y, eps=eps)
            take(position, y[0])

        return self._delivering(ids, normed, adapter, hidden=True, last_only=last_only)

    def _delivering(
        self, ids: Sequence[int], take: Take, adapter: str, **options: Any
    ) -> Generation:
        (usable,) = arguments.for_each_prompt([ids], self.check)
        options["adapter"] = self._adapter(adapter)

        def begin() -> OutputQueue:
            request = Score(ids=usable, queue=OutputQueue(1), scored=take, **options)
            self._submit("logits", [request])
            return request.queue

        return Generation(begin, self._lock, self._check_files)

    def step(self) -> bool:
        """Run the next step for all callers; return whether there is more to do."""
        with self._lock.taken("step"):
            self.scheduler.step()
            return not self.scheduler.is_idle

    def _adapter(self, name: str) -> int:
        """Return the number of an adapter; 0 for "", the base. Raises UsageError."""
        known = self.model.adapters.names if self.model.adapters else ()
        if name and name not in known:
            raise UsageError(f"adapter: got {shown(name)}, expected one of those loaded: {known}")
        return known.index(name) + 1 if name else 0

    def _track(
        self, ids: list[int], sampling: Sampling, salt: bytes, constraint: Constraint | None
    ) -> Track | None:
        speculator = self.scheduler.forwards.speculator
        if speculator is None or not (constraint is None or hasattr(constraint, "undo")):
            return None
        track = speculator.track(shares=not salt)
        if self._draft_model is not None:
            track.reader = self._draft_model.reader(ids, sampling, salt)
        return track

    def _check_files(self) -> None:
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


def _blocks(spec: ModelSpec, config: EngineConfig) -> "Diffusing | None":
    if spec.diffusion is None and config.diffusion in ("auto", "off"):
        return None
    from clocher_runtime.engine.diffusing import among

    found = among(spec.diffusion, config.diffusion)
    if found is not None and config.speculate not in ("auto", "off"):
        raise UsageError(
            f"speculate {config.speculate} with diffusion {config.diffusion}: blocks are drafted "
            "by the model itself; use diffusion=off, or speculate=auto"
        )
    return found


def _speculates(config: EngineConfig) -> bool:
    """Return whether tokens are drafted, unless blocks are denoised. Raises UsageError."""
    mode = config.speculate
    if config.backend == "stub" and mode not in ("auto", "off"):
        raise UsageError(f"speculate={mode}: the stub has nothing to verify; give off")
    return mode != "off" and config.backend != "stub"
