"""What a step of a replica costs, from files of measurements and from nothing else."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from clocher_kernels.errors import UsageError

_MAKE = "python -m bench.pass_cost --what sequences,prompt --context C --json FILE"
_KINDS = ("sequences", "prompt")


def rows_of(path: Path, kind: str) -> list[dict[str, Any]]:
    """Return the rows of a kind in a result file.

    Raises:
        UsageError: it cannot be read, or has none.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        rows = [row for row in found if row["kind"] == kind]
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise UsageError(f"{path}: expected a result file, a JSON list: {error}") from None
    if not rows:
        raise UsageError(f"{path}: no row of bench.{kind} in it")
    return rows


def start_seconds(path: Path) -> float:
    """Return how long a replica takes from its command to its first token, the file being cold.

    Raises:
        UsageError: the file does not say so.
    """
    for row in rows_of(path, "start"):
        if (row["engine"], row["cache"]) == ("clocher", "cold"):
            return float(row["s"])
    raise UsageError(f"{path}: no cold start of clocher in it; make it with python -m bench.start")


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Milliseconds of a step. Between sizes that were measured they are on a straight line.

    Attributes:
        decode: [n + 1], of a step of that many sequences that decode, behind `context` keys each.
        prompt: [n + 1], of that many tokens of prompts without output rows, behind as many.
        key: more of it for each key and token of `decode`, of `prompt`.
        context: keys before each token in the tables.
        source: what was measured: model, format, threads, ISA.
    """

    decode: np.ndarray
    prompt: np.ndarray
    key: tuple[float, float]
    context: int
    source: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path, most: int) -> "StepCosts":
        """Return the costs in a result file, for steps of up to `most` tokens.

        Raises:
            UsageError: it lacks what is needed, or holds more than one model or machine.
        """
        return cls.of(rows_of(path, "pass_cost"), most, str(path))

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]], most: int, name: str) -> "StepCosts":
        """Return the costs in rows of `bench.pass_cost`; see `read`."""
        about = ("model", "format", "threads", "isa")
        sources = {tuple(row[key] for key in about) for row in rows}
        found = {
            (row["test"], row["context"]): dict(zip(row["tokens"], row["ms"], strict=True))
            for row in rows
        }
        contexts = sorted({context for _, context in found})
        missing = [k for k in _KINDS for c in contexts[:1] + contexts[-1:] if (k, c) not in found]
        if len(sources) != 1 or len(contexts) < 2 or missing:
            raise UsageError(
                f"{name}: expected passes of one model, of the kinds {' and '.join(_KINDS)}, at "
                f"two contexts at least; got {len(sources)} models, contexts {contexts}, missing "
                f"{sorted(set(missing))}. Make it with {_MAKE}, and join the lists"
            )
        near, far = contexts[0], contexts[-1]
        tables, keys = [], []
        for kind in _KINDS:
            low, high = found[kind, near], found[kind, far]
            tables.append(_table(low, most))
            both = sorted(low.keys() & high.keys())
            # The largest passes say most of it: what a key costs is little beside the weights.
            slopes = [(high[m] - low[m]) / (m * (far - near)) for m in both]
            keys.append(max(0.0, median(slopes[-3:])))
        source = dict(zip(about, next(iter(sources)), strict=True))
        return cls(*tables, (keys[0], keys[1]), near, source)

    def times(self, factor: float) -> "StepCosts":
        """Return the costs of a machine that takes so many times as long."""
        keys = (factor * self.key[0], factor * self.key[1])
        return replace(self, decode=factor * self.decode, prompt=factor * self.prompt, key=keys)

    def ms(self, decodes: int, decode_keys: int, prompt: int, prompt_keys: int, ends: int) -> float:
        """Return the time of a step.

        Args:
            decodes: sequences that decode, a token each.
            decode_keys: keys before these tokens, added up.
            prompt: tokens of prompts.
            prompt_keys: keys before these, added up.
            ends: prompts of which the step computes the last token, which draw one.
        """
        more = self.key[0] * (decode_keys - decodes * self.context)
        if not prompt:
            return max(0.0, float(self.decode[decodes]) + more)
        more += self.key[1] * (prompt_keys - prompt * self.context)
        rows = decodes + ends  # what these cost beside tokens without a row
        head = max(0.0, float(self.decode[rows] - self.prompt[rows]))
        return max(0.0, float(self.prompt[decodes + prompt]) + head + more)


def _table(known: Mapping[int, float], most: int) -> np.ndarray:
    """Return milliseconds by tokens, 0 for none; beyond the largest the last slope goes on."""
    sizes = sorted(known)
    table = np.interp(np.arange(most + 1), [0, *sizes], [0.0, *(known[size] for size in sizes)])
    if most > sizes[-1]:
        before = sizes[-2] if len(sizes) > 1 else 0
        slope = (known[sizes[-1]] - known.get(before, 0.0)) / (sizes[-1] - before)
        beyond = np.arange(sizes[-1] + 1, most + 1)
        table[sizes[-1] + 1 :] = known[sizes[-1]] + slope * (beyond - sizes[-1])
    return np.maximum.accumulate(table)  # noise must not make a larger step cheaper
