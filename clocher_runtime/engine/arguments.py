"""Checks of Python API arguments: numbers, token ids, sampling settings, constraints."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import numpy as np
from msgspec import Meta, Struct
from msgspec.structs import asdict

from clocher_kernels.errors import UsageError, counted
from clocher_kernels.ops.sampling import FORBIDDEN
from clocher_runtime.config.values import as_integer, as_number, integer, number, shown
from clocher_runtime.disk.strict_json import given, read_as
from clocher_runtime.models.builder import MOST_BIASES

if TYPE_CHECKING:
    from clocher_runtime.checkpoints.checkpoint import Checkpoint


def listed(value: object, expected: str) -> list[Any]:
    """Return a sequence's items; strings, bytes, mappings are refused. Raises UsageError."""
    sequence = hasattr(value, "__len__") and hasattr(value, "__getitem__")
    if sequence and not isinstance(value, str | bytes | bytearray | memoryview | Mapping):
        try:
            return list(value)  # type: ignore[call-overload, no-any-return]
        except TypeError:  # an array of no dimension
            pass
    raise UsageError(f"got {shown(value)}; expected {expected}")


def token_ids(prompt: object) -> list[int]:
    """Return a sequence or array [T] of token ids as Python integers. Raises UsageError."""
    items = listed(prompt, "a list of token ids")
    if set(map(type, items)) <= {int}:
        return items
    ids = []
    for at, item in enumerate(items):
        if isinstance(item, Mapping):
            raise UsageError("got a list of messages; give them to `chat` of the model")
        whole = as_integer(item)
        if whole is None:
            raise UsageError(f"token {at} is {shown(item)}; expected an integer")
        ids.append(whole)
    return ids


def prompt_ids(prompt: object, vocab_size: int, longest: int, what: str, most: int) -> list[int]:
    """Return the ids of a prompt that fits the context; see `token_ids`. Raises UsageError.

    `most`: the longest context that the model takes.
    """
    ids = token_ids(prompt)
    if not ids:
        raise UsageError("no tokens; give it at least one")
    if len(ids) > longest:
        step = "shorten it or raise --context"
        if len(ids) > most:
            step = f"shorten it: the model takes at most {most}"
        raise UsageError(f"{counted(len(ids), 'token')}, the {what} holds {longest}; {step}")
    last = vocab_size - 1
    if min(ids) < 0 or max(ids) > last:
        at = next(i for i, each in enumerate(ids) if not 0 <= each <= last)
        raise UsageError(f"token {at} is the id {shown(ids[at])}, outside 0..{last}")
    return list(ids)


def for_each_prompt(given: object, read: Callable[[Any], list[int]]) -> list[list[int]]:
    """Return one list of ids per prompt. Raises UsageError."""
    prompts = listed(given, "a list of prompts, each a list of token ids")
    if not prompts:
        raise UsageError("0 prompts; give at least one")
    found = []
    for at, prompt in enumerate(prompts):
        try:
            found.append(read(prompt))
        except UsageError as error:
            raise UsageError(f"prompt {at}: {error}") from None
    return found


Processor = Callable[[list[int], np.ndarray], np.ndarray]
"""Takes the ids so far and logits [V] fp32, which it may write to; returns logits."""

_PENALTY = number(-1e9, 1e9)
_NUMBERS = {
    "temperature": number(0, -FORBIDDEN),
    "top_k": integer(0, (1 << 31) - 1),
    "top_p": number(0, 1, above=True),
    "seed": integer(0, (1 << 64) - 1),
    "min_p": number(0, 1),
    "repetition_penalty": number(0.01, 100),
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
}
_TOKEN = integer(0, inf)
AT_LEAST_ONE = integer(1, inf)
REPEATED = "repeated"
"""Salt of prompts that are read more than once: no answer is drafted from the one before."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen; greedy (temperature 0) by default.

    Penalties, biases, processors act first. `top_k` 0 keeps all; `top_p` keeps the smallest set of
    that probability; `min_p` drops tokens below this share of the top-1's, before top_k.
    `repetition_penalty` divides positive logits of tokens in the sequence and multiplies negative
    ones; `presence_penalty` is subtracted once from generated tokens, `frequency_penalty` per
    occurrence. A seed draws the same tokens in any batch.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    processors: Sequence[Processor] = ()

    def __post_init__(self) -> None:
        adopt = partial(object.__setattr__, self)
        for name, takes in _NUMBERS.items():
            adopt(name, takes.check(name, getattr(self, name)))
        adopt("logit_bias", _biases(self.logit_bias))
        processors = tuple(listed(self.processors, "processors as a list of functions"))
        for process in processors:
            if not callable(process):
                raise UsageError(f"a logits processor is {shown(process)}; expected a function")
        adopt("processors", processors)

    @property
    def on_host(self) -> bool:
        """Whether it needs more than the Plan's sampling op does."""
        return bool(self.processors) or len(self.logit_bias) > MOST_BIASES

    @property
    def penalises(self) -> bool:
        """Whether logits of tokens of the sequence change."""
        return bool(self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty)


class Edits:
    """What penalties (CTRL, OpenAI) and biases do to the logits after a sequence, as it grows.

    The first `count` of `ids` and `values` are what `ops.sampling.edited` takes.
    """

    def __init__(self, sampling: Sampling, ids: Sequence[int], prompt: int) -> None:
        self._sampling, self._made, self._places = sampling, list[int](), dict[int, int]()
        self.ids, self.values = np.empty(64, np.int32), np.empty((64, 3), np.float32)
        self._prompt = set(ids[:prompt]) if sampling.repetition_penalty != 1 else set()
        for token, bias in sampling.logit_bias.items():
            place = self._place(token)
            self.values[place, 2] = max(bias, FORBIDDEN)
        for token in self._prompt:
            place = self._place(token)
            self.values[place, 0] = sampling.repetition_penalty
        for token in ids[prompt:]:
            self.take(token)

    @property
    def count(self) -> int:
        """Tokens with an edit."""
        return len(self._made)

    def _place(self, token: int) -> int:
        place = self._places.setdefault(token, self.count)
        if place == self.count:
            if place == len(self.ids):
                self.ids = np.concatenate([self.ids, self.ids])
                self.values = np.concatenate([self.values, self.values])
            self.ids[place], self.values[place] = token, (1, 0, 0)
            self._made.append(0)
        return place

    def take(self, token: int, times: int = 1) -> None:
        """Note that a token was generated; -1 `times`: that it was not, after all."""
        sampling = self._sampling
        if sampling.penalises:
            place = self._place(token)
            self._made[place] = made = self._made[place] + times
            seen = made or token in self._prompt
            frequency = np.float32(sampling.frequency_penalty) * np.float32(made)
            minus = np.float32(sampling.presence_penalty) + frequency if made else 0
            self.values[place, :2] = sampling.repetition_penalty if seen else 1, minus

    def write(self, ids: np.ndarray, values: np.ndarray, at: int, draft: Sequence[int]) -> int:
        """Write lists for the next token and after each draft token; return the edits of each."""
        known = self.count
        size = known + len(draft)
        for place in range(len(draft) + 1):
            begin, count = at + place * size, self.count
            ids[begin : begin + count] = self.ids[:count]
            ids[begin + count : begin + size] = -1
            values[begin : begin + count] = self.values[:count]
            if place < len(draft):
                self.take(draft[place])
        for token in draft:
            self.take(token, -1)
        while self.count > known:
            self._places.popitem()
            self._made.pop()
        return size


def check_biases(biases: Mapping[int, float], vocab_size: int) -> None:
    """Refuse biases of ids outside the vocabulary. Raises UsageError."""
    for token in biases:
        if token >= vocab_size:
            raise UsageError(f"logit_bias of token {token}; the last one is {vocab_size - 1}")


def _biases(value: object) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise UsageError(f"logit_bias is {shown(value)}; expected token ids with numbers")
    biases = {}
    for token, bias in value.items():
        real = as_number(bias)
        if real is None or not real <= -FORBIDDEN:
            raise UsageError(f"logit_bias of {shown(token)} is {shown(bias)}; expected a number")
        biases[_TOKEN.check("a token of logit_bias", token)] = real
    return biases


def check_functions(**functions: object) -> None:
    """Refuse anything but functions and None. Raises UsageError."""
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise UsageError(f"{name} is {shown(function)}; expected a function or None")


class Constraint(Protocol):
    """Follows the generated tokens of one prompt; its exceptions end that call only."""

    def fill(self, mask: np.ndarray) -> None:
        """Write the allowed tokens to `mask` [W] u32, all of it; see `ops.sampling.sample`."""

    def take(self, token: int) -> None:
        """Advance by a token that was drawn, which may be one that ends the sequence."""

    def undo(self, count: int) -> None:
        """Take back the last tokens, which were only tried."""

    @property
    def is_over(self) -> bool:
        """Whether nothing may follow: the sequence ends without a stop token."""


def one_for_each(
    given: Sequence[Constraint | None] | None, prompts: int, masks: np.ndarray
) -> list[Constraint | None]:
    """Return a constraint or None per prompt; `masks` [C, W] u32. Raises UsageError."""
    if given is None:
        return [None] * prompts
    found: list[Constraint | None] = listed(given, "a list of constraints, one for each prompt")
    if len(found) != prompts:
        both = counted(len(found), "constraint"), counted(prompts, "prompt")
        raise UsageError(f"{both[0]} for {both[1]}; give each its own, or None")
    if not masks.size and any(each is not None for each in found):
        raise UsageError("this back end draws what it wants; leave constraints out")
    return found


# A model's own sampling defaults, from a generation_config.json with `do_sample`. Explicit settings
# override single fields; a temperature of 0 overrides all. As in vLLM, absent fields have no hidden
# defaults.
FILE = "generation_config.json"


class _Sampling(Struct):
    temperature: Annotated[float, Meta(ge=0, le=100)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=1 << 30)] = 0
    top_p: Annotated[float, Meta(ge=1e-6, le=1)] = 1.0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] = 1.0


NAMES = _Sampling.__struct_fields__


class _Settings(Struct):
    do_sample: bool = False


def sampling_defaults(checkpoint: "Checkpoint") -> dict[str, float]:
    """Return a model's sampling defaults by name; {} for greedy. Raises FormatError."""
    settings = given(checkpoint.generation_config)
    if not read_as(settings, _Settings, FILE).do_sample:
        return {}
    wanted = read_as(settings, _Sampling, FILE)
    if wanted.temperature == 0:
        return {}
    said: dict[str, float] = asdict(wanted) | {"top_k": max(wanted.top_k, 0)}
    usual = asdict(_Sampling())
    return {n: value for n, value in said.items() if n == "temperature" or value != usual[n]}


def taken(defaults: Mapping[str, float], said: Mapping[str, Any]) -> dict[str, float]:
    """Return the model's defaults that a caller does not override."""
    if said.get("temperature") == 0:
        return {}
    return {name: value for name, value in defaults.items() if said.get(name) is None}


def sampling_note(values: Mapping[str, float]) -> str:
    """Return the message about values taken from the file, "" for none."""
    if not values:
        return ""
    listed = ", ".join(f"{name} {value:g}" for name, value in values.items())
    return f"{FILE} of the model: {listed}; --generation-config none does without"
