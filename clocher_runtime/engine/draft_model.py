"""A small model that guesses what a larger one of the same vocabulary makes next.

It has a Plan and a KV cache of its own and is stepped by the same threads, or on the same stream,
between the passes of the larger one. It draws with the seeds, numbers and temperatures of the
requests, so where the models think alike they draw alike. Only what a text turned out to be keeps
its keys: after a wrong guess fewer cells count, and the next tokens are written over the rest.

Speculation asks it (`speculation.model_gate`); its time is inside the steps that it guesses for.

Source: Leviathan et al., Fast Inference from Transformers via Speculative Decoding, 2023.
"""

from collections.abc import Sequence

from clocher_runtime.engine.arguments import Sampling
from clocher_runtime.engine.binding import Bound
from clocher_runtime.engine.requests import Mailbox, Request
from clocher_runtime.engine.step_inputs import Part, StepInputs
from clocher_runtime.engine.timing import StepTimes
from clocher_runtime.speculation.gate import ForwardCosts


class DraftModel:
    """Guesses texts side by side.

    Args:
        bound: the model, with a slot for each sequence of a step.
        vocabulary: ids that the larger model has.

    Attributes:
        costs: time of a step by its tokens.
    """

    def __init__(self, bound: Bound, vocabulary: int) -> None:
        self._executor, self.pages, self.longest = bound.executor, bound.pages, bound.longest
        self._inputs, self._now = StepInputs(bound.executor), StepTimes().now
        self._vocabulary, self.known_ids = vocabulary, bound.model.spec.vocab_size
        self._count = bound.sizes.slots
        self.slots = list(range(self._count))[::-1]
        self.costs = ForwardCosts(bound.executor.plan.tokens)

    def reader(self, ids: Sequence[int], sampling: Sampling, salt: bytes) -> "TextReader":
        """Return what reads a text.

        Args:
            ids: its prompt.
            sampling: how its tokens are drawn; what the host adds to that is left out.
            salt: it finds only cached texts of the same salt.
        """
        return TextReader(self, ids, sampling, salt)

    def draft(self, readers: Sequence["TextReader"], depth: int, most: int) -> list[list[int]]:
        """Read on in some texts and guess how those go on; see `model_gate.DraftModel`."""
        parts: list[Part] = []
        ready: list[TextReader] = []
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
                ready.append(reader)
        if parts:
            self._guess(parts, ready, depth)
        return [reader.guesses if reader in ready else [] for reader in readers]

    def _guess(self, parts: list[Part], ready: list["TextReader"], depth: int) -> None:
        """Read, and guess for those that were read to their end, which stand first."""
        drawn = [self._step(*self._inputs.stage(parts))]
        for request, count in parts:
            self.pages.commit(request, request.cells + count)
        size = len(ready)
        for number in range(1, depth if ready else 1):
            if number == 1 and sum(count for _, count in parts) != size:
                self._stage_after([reader.request for reader in ready], drawn[0])
            # Otherwise the device goes on with its own tokens.
            drawn.append(self._step(size, size))
        for place, reader in enumerate(ready):
            reader.take([tokens[place] for tokens in drawn], self._vocabulary)

    def _stage_after(self, requests: list[Request], guesses: list[int]) -> None:
        """Write a step of the first guess of each text."""
        for request, token in zip(requests, guesses, strict=True):
            request.ids.append(max(token, 0))
            request.made += 1
        self._inputs.stage([(request, 1) for request in requests])
        for request in requests:
            request.ids.pop()
            request.made -= 1

    def _step(self, tokens: int, rows: int) -> list[int]:
        """Execute what was staged; return what was drawn."""
        began = self._now()
        self._executor.step(tokens, rows)
        drawn: list[int] = self._executor.fetch("sampled", rows).tolist() if rows else []
        if rows:  # otherwise a GPU may still be at it
            self.costs.note(tokens, self._now() - began)
        return drawn

    def admit(self, request: Request) -> bool:
        """Give a text a slot and what the cache has of it; return whether there is room."""
        if not self.slots or not self.pages.admit(request, self.slots[-1]):
            return False
        self.slots.pop()
        return True

    def reset(self) -> None:
        """Forget all texts, when nobody reads any more: what was noted may be half of it."""
        self.slots = list(range(self._count))[::-1]
        self.pages.reset()

    def warm(self) -> None:
        """Compile everything, and learn what steps cost."""
        self._executor.warm()
        self._blank(1)
        self.costs.measure(self._blank)

    def _blank(self, tokens: int) -> int:
        """Execute a step of tokens that belong to no text; return its time in nanoseconds."""
        rows = min(tokens, self._executor.plan.rows)
        counts = [1] * (rows - 1) + [tokens - rows + 1]
        ids = [(7919 * i + 1) % self.known_ids for i in range(tokens)]
        parts = [(_request(ids[i : i + count]), count) for i, count in enumerate(counts)]
        began = self._now()
        self._executor.step(*self._inputs.stage(parts))
        self._executor.fetch("sampled", rows)
        return self._now() - began

    def close(self) -> None:
        """Release the buffers; before those are whose threads it uses."""
        self._executor.close()


class TextReader:
    """What a draft model has read of a text, and guessed.

    Args:
        model: guesses.
        ids: the prompt.
        sampling: how tokens are drawn.
        salt: see `DraftModel.reader`.

    Attributes:
        request: the text, and its keys; guesses are not in it.
        guesses: how it goes on after that. All but the last one have keys.
    """

    __slots__ = ("_is_lost", "_model", "guesses", "request")

    def __init__(
        self, model: DraftModel, ids: Sequence[int], sampling: Sampling, salt: bytes
    ) -> None:
        self._model = model
        self.request = _request([], _on_device(sampling), salt)
        self.request.made = -len(ids)
        self.guesses: list[int] = []
        self._is_lost = False

    def behind(self, ids: Sequence[int]) -> int:
        """Take note of the text so far; see `speculation.draft.Reader`."""
        request, model = self.request, self._model
        new = list(ids[len(request.ids) :])
        right = 0
        while right < min(len(self.guesses) - 1, len(new)) and self.guesses[right] == new[right]:
            right += 1
        self.guesses = []
        cells = len(request.ids) + right
        request.ids += new
        request.made += len(new)
        if len(ids) > model.longest or max(new, default=0) >= model.known_ids:
            self._is_lost = True
        if self._is_lost:
            self.leave()
            return 0
        if request.slot < 0:
            return request.waiting_tokens if model.admit(request) else 0
        if right:
            model.pages.commit(request, min(cells, len(ids) - 1))
        return request.waiting_tokens

    def take(self, drawn: list[int], vocabulary: int) -> None:
        """Take note of what the model drew after the text, as far as these are tokens."""
        end = next((i for i, t in enumerate(drawn) if not 0 <= t < vocabulary), len(drawn))
        self.guesses = drawn[:end]
        # A model that computes NaN would be asked again and again, and nothing learnt.
        self._is_lost = not end

    def leave(self) -> None:
        """Give slot and pages back; if the text goes on, it is read again."""
        request = self.request
        self.guesses = []
        if request.slot >= 0:
            self._model.slots.append(request.slot)
            self._model.pages.release(request)


def _on_device(sampling: Sampling) -> Sampling:
    """Return the part of a sampling that needs no host."""
    return Sampling(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        seed=sampling.seed,
    )


def _request(ids: list[int], sampling: Sampling | None = None, salt: bytes = b"") -> Request:
    chosen = sampling or Sampling()
    return Request(ids=ids, salt=salt, box=Mailbox(1), index=0, budget=1, sampling=chosen)
