r"""JSON schemas of a published suite: how many compile, what their masks allow, and in what time.

\b
    python -m bench schemas --model-dir FILE --data maskbench/data [--every 4] [--texts 200]

DATA holds MaskBench's files (of guidance-ai/jsonschemabench): a schema, and texts that obey it or
do not. A schema compiles if the server would take it, its trial with limits included. A text obeys
if the masks allow every one of its tokens and then an end. --texts asks the model for a text at
temperature 1 for so many schemas that compile, and jsonschema whether those that ended obey.
"""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np

from bench.experiment import MODEL_DIR, NotMeasured, experiment
from bench.record import Row
from clocher_kernels.errors import UsageError
from clocher_kernels.ops.sampling import WORD_BITS, words_for
from clocher_runtime.api import load
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.checkpoints.locate import embedded_model
from clocher_runtime.command.flags import option
from clocher_runtime.command.parameters import PATH
from clocher_runtime.engine.load import model_spec
from clocher_runtime.text.grammar import GrammarMaker
from clocher_runtime.text.tokenizer import Tokenizer

_MOST = 400  # tokens of a text that is asked for


class _Suite:
    """What was found of the schemas of a suite."""

    def __init__(self) -> None:
        self.schemas = 0
        self.compile_ms: list[float] = []
        self.mask_us: list[float] = []
        self.right = {True: 0, False: 0}  # of texts that obey, of those that do not
        self.texts = {True: 0, False: 0}
        self.refused: dict[str, int] = {}

    def row(self, name: str) -> Row:
        """Return the figures."""
        found: Row = {"suite": name, "n": self.schemas, "compiled": len(self.compile_ms)}
        for what, samples in (("compile_ms", self.compile_ms), ("mask_us", self.mask_us)):
            if samples:
                points = np.percentile(samples, (50, 99, 100)).tolist()
                found |= zip((f"{what}_{p}" for p in ("p50", "p99", "max")), points, strict=True)
        for obeys, key in ((True, "accepted"), (False, "rejected")):
            found |= {f"{key}_of": self.texts[obeys], key: self.right[obeys]}
        return found | {"refused": self.refused}


def _obeys(constraint: Any, ids: list[int], ends: list[int], mask: Any, mask_us: Any) -> bool:
    """Return whether the masks allow the ids and then an end; note the time of each mask."""

    def allows(tokens: list[int]) -> bool:
        start = time.perf_counter_ns()
        constraint.fill(mask)
        mask_us.append((time.perf_counter_ns() - start) / 1e3)
        return any(mask[t // WORD_BITS] >> t % WORD_BITS & 1 for t in tokens)

    for token in ids:
        if not allows([token]):
            return False
        constraint.take(token)
    return constraint.is_over or allows(ends)


def _asked(path: Path | None, schemas: list[Any]) -> Row:
    """Ask a model for a text for each schema; return how many ended, and how many of them obey."""
    from jsonschema.validators import validator_for

    ended = obeying = 0
    with load(path, context=4096) as model:
        for seed, schema in enumerate(schemas):
            wish = f"A JSON document of this schema: {json.dumps(schema)[:4000]}\nThe document: "
            how = {"temperature": 1.0, "seed": seed, "max_tokens": _MOST}
            try:
                made = model.complete(wish, json_schema=schema, **how)
            except UsageError:  # a limit while the text went on
                continue
            if made.finish_reason == "stop":
                ended += 1
                obeying += validator_for(schema)(schema).is_valid(json.loads(made.text))
    return {"asked": len(schemas), "ended": ended, "obeying": obeying}


@experiment(
    "schemas",
    __doc__,
    MODEL_DIR,
    option("--data", PATH, "directory of MaskBench's files", required=True),
    option("--every", click.IntRange(1), "take every Nth of them", default=1),
    option("--texts", click.IntRange(0), "ask the model for so many", default=0),
    title="JSON schemas",
)
def main(asked: Any) -> Iterator[Row]:
    """Yield a row for each suite, and one of all."""
    files = sorted(asked.data.glob("*.json"))[:: asked.every]
    if not files:
        raise NotMeasured(f"{asked.data} has no .json files; give maskbench/data")
    checkpoint = open_checkpoint(asked.model_dir or embedded_model())
    tokenizer = Tokenizer(checkpoint.tokenizer_source, checkpoint.tokenizer_config)
    spec = model_spec(checkpoint)
    ends, size = list(spec.eos_ids), spec.vocab_size
    maker = GrammarMaker(checkpoint.tokenizer_source, size, ends)
    taken: list[Any] = []
    mask, suites = np.zeros(words_for(size), np.uint32), {"all": _Suite()}
    for path in files:
        one = json.loads(path.read_text(encoding="utf-8"))
        name = re.split(r"---|[-_]\d", path.stem)[0]
        both = suites["all"], suites.setdefault(name, _Suite())
        wish, start = {"kind": "json_schema", "value": one["schema"]}, time.perf_counter()
        for suite in both:
            suite.schemas += 1
        try:
            maker.check(wish)
            maker.compile(wish)
        except UsageError as error:
            why = re.sub(r"\d+", "N", str(error))[:80]
            for suite in both:
                suite.refused[why] = suite.refused.get(why, 0) + 1
            continue
        taken.append(one["schema"])
        ms, times = 1e3 * (time.perf_counter() - start), list[float]()
        for suite in both:
            suite.compile_ms.append(ms)
        for text in one.get("tests", ()):
            ids = tokenizer.encode(json.dumps(text["data"], ensure_ascii=False))
            try:
                obeys = _obeys(maker.compile(wish), ids, ends, mask, times)
            except UsageError:  # a limit while the text went on
                obeys = False
            for suite in both:
                suite.texts[text["valid"]] += 1
                suite.right[text["valid"]] += obeys == text["valid"]
        for suite in both:
            suite.mask_us += times
    few = taken[:: max(1, len(taken) // asked.texts)][: asked.texts] if asked.texts else []
    made = _asked(asked.model_dir, few) if few else {}
    for name, suite in suites.items():
        yield {"every": asked.every, "vocabulary": size, **suite.row(name), **made}
        made = {}
