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
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import numpy as np

from bench.cells import code_sha256
from bench.experiment import MODEL_DIR, NotMeasured, experiment
from bench.record import Row
from clocher_kernels.errors import UsageError
from clocher_kernels.ops.sampling import WORD_BITS, words_for
from clocher_runtime.api import load
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.checkpoints.locate import embedded_model
from clocher_runtime.command.flags import option
from clocher_runtime.command.parameters import PATH
from clocher_runtime.disk.kept import Kept
from clocher_runtime.engine.load import model_spec
from clocher_runtime.text.grammar import GrammarMaker
from clocher_runtime.text.tokenizer import Tokenizer
from clocher_runtime.text.tokenizer_library import inspect

_MOST = 400  # tokens of a text that is asked for


class _Masks:
    """Masks over the vocabulary of a model."""

    def __init__(self, checkpoint: Any) -> None:
        self.tokenizer = Tokenizer(checkpoint.tokenizer_source, checkpoint.tokenizer_config)
        spec = model_spec(checkpoint)
        self.ends, self.size = list(spec.eos_ids), spec.vocab_size
        self._maker = GrammarMaker(checkpoint.tokenizer_source, self.size, self.ends)
        self._mask = np.zeros(words_for(self.size), np.uint32)
        text = sha256(inspect(checkpoint.tokenizer_source).text.encode()).hexdigest()
        # What a result depends on beside the schema; the limits are in the code.
        self.settings = text, self.size, self.ends, code_sha256(), version("llguidance")

    def judge(self, suite: Mapping[str, Any]) -> Row:
        """Return why a schema is refused, or its times and which texts are judged rightly."""
        wish, start = {"kind": "json_schema", "value": suite["schema"]}, time.perf_counter()
        try:
            self._maker.check(wish)
            self._maker.compile(wish)
        except UsageError as error:
            return {"refused": re.sub(r"\d+", "N", str(error))[:80]}
        found: Row = {"compile_ms": 1e3 * (time.perf_counter() - start), "mask_us": [], "texts": []}
        for text in suite.get("tests", ()):
            ids = self.tokenizer.encode(json.dumps(text["data"], ensure_ascii=False))
            try:
                obeys = self._obeys(self._maker.compile(wish), ids, found["mask_us"])
            except UsageError:  # a limit while the text went on
                obeys = False
            found["texts"].append((text["valid"], obeys == text["valid"]))
        return found

    def _obeys(self, constraint: Any, ids: Sequence[int], mask_us: list[float]) -> bool:
        """Return whether the masks allow the ids and then an end; note the time of each mask."""

        def allows(tokens: Sequence[int]) -> bool:
            start = time.perf_counter_ns()
            constraint.fill(self._mask)
            mask_us.append((time.perf_counter_ns() - start) / 1e3)
            return any(self._mask[t // WORD_BITS] >> t % WORD_BITS & 1 for t in tokens)

        for token in ids:
            if not allows([token]):
                return False
            constraint.take(token)
        return constraint.is_over or allows(self.ends)


def _row(schemas: Sequence[Row]) -> Row:
    """Return the figures of some schemas."""
    compiled = [each for each in schemas if "refused" not in each]
    found: Row = {"n": len(schemas), "compiled": len(compiled)}
    compile_ms = [each["compile_ms"] for each in compiled]
    mask_us = [us for each in compiled for us in each["mask_us"]]
    for what, samples in (("compile_ms", compile_ms), ("mask_us", mask_us)):
        if samples:
            points = np.percentile(samples, (50, 99, 100)).tolist()
            found |= zip((f"{what}_{p}" for p in ("p50", "p99", "max")), points, strict=True)
    for obeys, key in ((True, "accepted"), (False, "rejected")):
        right = [right for each in compiled for valid, right in each["texts"] if valid == obeys]
        found |= {f"{key}_of": len(right), key: sum(right)}
    return found | {"refused": Counter(s["refused"] for s in schemas if "refused" in s)}


def _asked(path: Path | None, schemas: Sequence[Any]) -> Row:
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
    option("--keep", PATH, "keeps what is done, so that a run that ended goes on"),
    option("--texts", click.IntRange(0), "ask the model for so many", default=0),
    title="JSON schemas",
)
def main(asked: Any) -> Iterator[Row]:
    """Yield a row for all schemas, and one for each suite."""
    files = sorted(asked.data.glob("*.json"))[:: asked.every]
    if not files:
        raise NotMeasured(f"{asked.data} has no .json files; give maskbench/data")
    masks = _Masks(open_checkpoint(asked.model_dir or embedded_model()))
    kept = Kept(asked.keep, masks.settings)
    suites: dict[str, list[Row]] = {"all": []}
    taken: list[Any] = []
    for path in files:
        one = json.loads(path.read_text(encoding="utf-8"))
        if (found := kept.get(one)) is None:
            kept.add(one, found := masks.judge(one))
        taken += [] if "refused" in found else [one["schema"]]
        name = re.split(r"---|[-_]\d", path.stem)[0]
        for suite in ("all", name):
            suites.setdefault(suite, []).append(found)
    few = taken[:: max(1, len(taken) // (asked.texts or 1))][: asked.texts]
    made = _asked(asked.model_dir, few) if few else {}
    for name, schemas in suites.items():
        about = {"every": asked.every, "vocabulary": masks.size, "suite": name}
        yield about | _row(schemas) | made
        made = {}
