"""Plans of rules, and tokens of the calibration text, for the tests of quantisation."""

from pathlib import Path
from typing import Any

from weight_files import DATA

from clocher_runtime.checkpoints.checkpoint import Checkpoint
from clocher_runtime.convert.q4_map import parse_q4_map
from clocher_runtime.quantize.plan import QuantPlan, build_plan
from clocher_runtime.text.tokenizer import Tokenizer


def make_plan(checkpoint: Checkpoint, *rules: dict[str, Any], **more: bool) -> QuantPlan:
    """Return the plan of a q4 map with these rules."""
    document = {"version": 1, "rules": list(rules), **more}
    return build_plan(checkpoint, parse_q4_map(document, Path("rules.json")))


def sequences(
    checkpoint: Checkpoint, count: int, length: int, name: str = "calib.txt"
) -> list[list[int]]:
    """Return `count` sequences of `length` tokens, the first of a text."""
    tokenizer = Tokenizer(checkpoint.tokenizer_json, checkpoint.tokenizer_config)
    text = (DATA / name).read_text(encoding="utf-8")
    ids = tokenizer.encode(text[: 8 * count * length])
    return [ids[i * length : (i + 1) * length] for i in range(count)]
