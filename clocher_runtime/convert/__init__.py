"""A checkpoint in, a file out."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_PRESETS = Path(__file__).parents[1] / "assets" / "presets.json"
PRESETS: Mapping[str, Mapping[str, Any]] = json.loads(_PRESETS.read_text(encoding="utf-8"))
"""Models without weights: a `summary`, and the whole `config` of each."""

LINEARS = r"model\.layers\.[0-9]+\..*_proj\.weight"
"""The matrices made block-sparse by default."""

PRECISIONS = ("bf16", "int8w", "int4", "ternary", "mxfp4", "native")
"""How the matrices of a preset may be stored."""
