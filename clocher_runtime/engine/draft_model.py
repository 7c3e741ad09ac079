"""A small model of the same vocabulary that drafts for a larger one (Leviathan et al. 2023).

It has its own Plan and KV cache and runs between the target's forwards, on its threads or stream,
with the same seeds and temperatures. Rejected tokens' KV cells are overwritten. On the host it says
how sure it is of a token: the probability that it gave it. Of a long prompt it reads the end only.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from clocher_runtime.engine.arguments import Sampling
from clocher_runtime.engine.backends import BACK_ENDS
from clocher_runtime.engine.binding import Bound
from clocher_runtime.engine.forwards import Part, StepInputs
from clocher_runtime.engine.requests import OutputQueue, Request
from clocher_runtime.engine.timing import StepTimes
from clocher_runtime.speculation.draft import CONFIDENCE, NO_DRAFT, UNSEEN, Draft
from clocher_runtime.speculation.gate import ForwardCosts

_READ = 32
"""Tokens of a text that are read before its first draft: further ones win less than they cost."""

Wanted = Callable[[Mapping["SequenceReader", Draft]], bool]
"""Whether to draft one more token for each of some sequences after those that they have."""


class DraftModel:
    """Drafts for sequences of a larger model with `vocabulary` ids, side by side."""

    def __init__(self, bound: Bound, vocabulary: int) -> None:
        self._executor, self.pages = bound.executor, bound.pages
        self._inputs, self._now = StepInputs(bound.executor), StepTimes().now
        self._vocabulary, self.known_ids = vocabulary, bound.model.spec.vocab_size
        self.longest = bound.sizes.longest
        self._on_host = BACK_ENDS[bound.config.backend].on_host
        self.costs = ForwardCosts(bound.executor.plan.tokens)

    def reader(self, ids: Sequence[int], sampling: Sampling, salt: bytes) -> "SequenceReader":
        """Return a reader of a prompt's sequence, without the host-side options of its sampling."""
        return SequenceReader(self, ids, sampling, salt)

    def draft(
        self, readers: Sequence["SequenceReader"], depth: int, most: int, wanted: Wanted
    ) -> list[Draft]:
        """Read up to `most` tokens of some; draft up to `depth` for those read to their end.

        `wanted` is asked before each but the first of them.
        """
        parts: list[Part] = []
        drafts: dict[SequenceReader, Draft] = {}
        most = min(most, self._executor.plan.tokens)
        for reader in sorted(readers, key=lambda each: each.request.waiting_tokens):
            request = reader.request
            count = min(request.waiting_tokens, most)
            is_whole = count == request.waiting_tokens
            end = request.cells + count + (depth - 1 if is_whole else 0)
            if not count or end > self.longest or not self.pages.reserve(request, end):
                continue
            most -= count
            parts.append((request, count))
            if is_whole:
                drafts[reader] = NO_DRAFT
        if parts:
            self._draft(parts, drafts, depth, wanted)
        return [drafts.get(reader, NO_DRAFT) for reader in readers]

    def _draft(
        self, parts: list[Part], drafts: dict["SequenceReader", Draft], depth: int, wanted: Wanted
    ) -> None:
        self._step(*self._inputs.stage(parts), drafts)
        for request, count in parts:
            self.pages.commit(request, request.cells + count)
        size = len(drafts)
        for number in range(1, depth if drafts else 1):
            if not wanted(drafts):
                break
            if number == 1 and sum(count for _, count in parts) != size:
                self._stage_after(drafts)
            # Otherwise the device continues with its own tokens.
            self._step(size, size, drafts)
        for reader, draft in drafts.items():
            drafts[reader] = reader.take(draft, self._vocabulary)

    def _stage_after(self, drafts: Mapping["SequenceReader", Draft]) -> None:
        requests = [reader.request for reader in drafts]
        for request, draft in zip(requests, drafts.values(), strict=True):
            request.ids.append(max(draft.tokens[0], 0))
            request.made += 1
        self._inputs.stage([(request, 1) for request in requests])
        for request in requests:
            request.ids.pop()
            request.made -= 1

    def _step(self, tokens: int, rows: int, drafts: dict["SequenceReader", Draft]) -> None:
        """Do a forward whose rows are those of the drafts, and add what it drew to them."""
        began = self._now()
        self._executor.step(tokens, rows)
        if not rows:
            return
        drawn: list[int] = self._executor.fetch("sampled", rows).tolist()
        # Without rows a GPU might still be at it.
        self.costs.note(tokens, self._now() - began)
        for place, (reader, draft) in enumerate(drafts.items()):
            kind = self._class_of(place, drawn[place], reader.request.sampling)
            drafts[reader] = Draft((*draft.tokens, drawn[place]), (*draft.classes, kind))

    def _class_of(self, row: int, token: int, sampling: Sampling) -> int:
        if not (self._on_host and 0 <= token < self.known_ids):
            return UNSEEN
        scaled = self._executor.array("logits")[row] / np.float32(sampling.temperature or 1)
        chance = 1 / np.exp(scaled - scaled[token]).sum()
        return UNSEEN + 1 + bisect_right(CONFIDENCE, float(chance))

    def warm(self) -> None:
        """Compile everything, and measure what steps cost."""
        self._executor.warm()
        self._inputs.blank(1, self._now)
        self.costs.measure(partial(self._inputs.blank, now=self._now))

    def close(self) -> None:
        """Release the buffers; to be called before the target, whose threads it uses, is closed."""
        self._executor.close()


class SequenceReader:
    """What a draft model has read and drafted; all drafted tokens but the last have keys."""

    def __init__(
        self, model: DraftModel, ids: Sequence[int], sampling: Sampling, salt: bytes
    ) -> None:
        self._model = model
        cuts = sampling.temperature, sampling.top_k, sampling.top_p
        on_device = Sampling(*cuts, seed=sampling.seed, min_p=sampling.min_p)
        self.request = Request(
            ids=[], salt=salt, queue=OutputQueue(1), sampling=on_device, made=-len(ids)
        )
        self.drafted: list[int] = []
        self._is_lost, self._skipped = False, 0  # the tokens of the text before those that it reads

    def behind(self, ids: Sequence[int]) -> int:
        """Note the sequence so far; return how many tokens are to be read before a draft."""
        request, model = self.request, self._model
        if not request.ids:
            self._skipped = max(0, len(ids) - _READ)
            request.made += self._skipped
        new = list(ids[self._skipped + len(request.ids) :])
        right = 0
        while right < min(len(self.drafted) - 1, len(new)) and self.drafted[right] == new[right]:
            right += 1
        self.drafted = []
        cells = len(request.ids) + right
        request.ids += new
        request.made += len(new)
        if len(request.ids) > model.longest or max(new, default=0) >= model.known_ids:
            self._is_lost = True
        if self._is_lost:
            self.leave()
            return 0
        if request.slot < 0:
            return request.waiting_tokens if model.pages.admit(request) else 0
        if right:
            model.pages.commit(request, min(cells, len(request.ids) - 1))
        return request.waiting_tokens

    def take(self, draft: Draft, vocabulary: int) -> Draft:
        """Note and return what the model drew, up to the first id outside the vocabulary."""
        drawn = draft.tokens
        end = next((i for i, t in enumerate(drawn) if not 0 <= t < vocabulary), len(drawn))
        self.drafted = list(drawn[:end])
        # A model that computes NaN would be asked again and again, without result.
        self._is_lost = not end
        return draft.first(end)

    def leave(self) -> None:
        """Give slot and pages back; if the sequence continues, it is read again."""
        self.drafted = []
        self._model.pages.release(self.request)
