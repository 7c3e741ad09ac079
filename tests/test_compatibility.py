"""Families in the formats of quantisers, files of other libraries, and the page about all of it."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import transformers
from compatibility import Row, Seen
from random_models import reference_logits
from sessions import make_session
from stored_families import CONFIGS, LAYOUTS, write_stored
from test_hf_quantised import CASES

from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.checkpoints.gguf.blocks import TYPES
from clocher_runtime.checkpoints.hf.checkpoint import _METHODS
from clocher_runtime.engine.load import load_model
from clocher_runtime.models.families import FAMILIES, Family, family_of

ROOT = Path(__file__).parents[1]
ROWS = [Row(**row) for row in json.loads((ROOT / "docs" / "compatibility.json").read_text())]
PAGE = (ROOT / "docs/compatibility.md").read_text(encoding="utf-8")
NOT_TRIED = set(re.findall(r"`(\w+)`", PAGE.partition("## Not covered")[2]))
MADE = "CLOCHER_TEST_MADE_BY_LIBRARIES"
"""Environment variable: the directory that tests/other_libraries.py has filled."""
FP32_RMS = 1e-4
BF16_RMS = 1e-2

Saw = Callable[..., None]


def logits(folder: Path, ids: list[int]) -> np.ndarray:
    model = load_model(open_checkpoint(folder))
    options = {"chunk": 11, "all_logits": True, "act_prec": "fp32", "kv_dtype": "f32"}
    session = make_session(model, backend="cpu", threads=2, **options)
    try:
        return session.logits(ids)
    finally:
        session.close()


def rms(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.sqrt(np.mean((got - expected) ** 2) / np.mean(expected**2)))


# --- families in the formats of quantisers

PAIRS = [
    pytest.param(
        family,
        layout,
        # One for each family, and each layout twice, where there is no time for all.
        marks=() if j == i % len(LAYOUTS) else pytest.mark.slow,
        id=f"{family}-{LAYOUTS[layout]}",
    )
    for i, family in enumerate(CONFIGS)
    for j, layout in enumerate(LAYOUTS)
]


@pytest.mark.parametrize(("family", "layout"), PAIRS)
def test_family_in_the_format_of_a_quantiser(
    family: str, layout: str, tmp_path: Path, saw: Saw
) -> None:
    folder, model = write_stored(family, layout, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    by, reference = "the test, in the layout", f"transformers {transformers.__version__}, decoded"
    key = config["architectures"][0], CASES[LAYOUTS[layout]].settings["quant_method"], layout, by
    ids = np.random.default_rng(5).integers(3, 96, 40).tolist()
    difference = rms(logits(folder, ids), reference_logits(model, ids))
    saw(*key, reference, difference=difference)
    assert difference <= FP32_RMS


# --- files of other libraries


def limit(reference: str) -> float:
    """Return the limit for a reference, which may have rounded its weights."""
    return BF16_RMS if reference.endswith("to bf16") else FP32_RMS


def made() -> list[Path]:
    return sorted(
        path.parent for path in Path(os.environ.get(MADE, "/nowhere")).glob("*/made.json")
    )


@pytest.mark.slow
@pytest.mark.skipif(MADE not in os.environ, reason=f"{MADE} does not name what libraries have made")
def test_files_of_other_libraries(saw: Saw) -> None:
    from other_libraries import IDS

    assert made(), f"{os.environ[MADE]} holds no made.json"
    far = {}
    for folder in made():
        about = json.loads((folder / "made.json").read_text())
        config = json.loads((folder / "config.json").read_text())
        method = config["quantization_config"]["quant_method"]
        difference = rms(logits(folder, IDS), np.load(folder / "expected.npy"))
        key = config["architectures"][0], method, about["format"], about["writer"]
        saw(*key, about["reference"], difference=difference, variable=MADE)
        if difference > limit(about["reference"]):
            far[folder.name] = difference
    assert not far


# --- the page


def family(name: str) -> Family:
    return family_of({"architectures": [name]})


def readers() -> set[str]:
    return {"float", *_METHODS, *(f"gguf {kind.name}" for kind in TYPES.values())}


def test_every_reader_and_family_has_a_row_or_a_reason() -> None:
    """Families that are the same but for their name count once."""
    tried = {id(family(row.family)) for row in ROWS if row.reader in ("float", "bitnet")}
    missing = {name for name in FAMILIES if id(family(name)) not in tried}
    missing |= readers() - {row.reader for row in ROWS}
    assert missing == NOT_TRIED


def test_rows_are_of_what_is_there_and_within_the_limits() -> None:
    assert {row.reader for row in ROWS} <= readers()
    for row in ROWS:
        assert isinstance(family(row.family), Family)
        assert row.date and row.isa and row.command.count("pytest tests/") == 1, row
        assert (row.difference is None) == bool(row.refused), row
        within = 2e-2 if "int8 activations" in row.format else limit(row.reference)
        assert row.difference is None or row.difference <= within, row
    whole = [row for row in ROWS if row.reader == "float"]
    assert all(row.models >= 20 and row.same_ids == row.models for row in whole)


def test_rows_add_up(tmp_path: Path) -> None:
    key = ("LlamaForCausalLM", "float", "float", "a", "b")
    seen, other = Seen(), Seen()
    seen.add(Row(*key, difference=1e-6, same_ids=1))
    seen.add(Row(*key, difference=3e-6, same_ids=0))
    seen.add(Row(*key[:-1], "c", difference=2e-6))
    path = tmp_path / "rows.json"
    seen.write(path)
    other.add(Row(*key, difference=9e-7, same_ids=1))
    other.merge(seen.dump()[1:])
    other.write(path)
    rows = [Row(**row) for row in json.loads(path.read_text())]
    assert [(r.reference, r.models, r.difference, r.same_ids) for r in rows] == [
        ("b", 1, 9e-7, 1),
        ("c", 1, 2e-6, None),
    ]
    with pytest.raises(AssertionError, match="refused, or not"):
        other.add(Row(*key, refused="no"))
