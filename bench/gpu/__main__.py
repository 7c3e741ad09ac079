"""Run one part of the GPU suite in this process: PART FILE [--dry-run] [TEXT...]."""

import gc
import json
import os
import pkgutil
import sys
from pathlib import Path
from typing import Any

LOST, NO_DEVICE = 3, 4
"""Exit codes: the GPU stopped answering (retry in a new process); there is no usable GPU."""

PARTS = {
    "machine": "smoke:machine_items",
    "smoke": "smoke:items",
    "ceilings": "smoke:ceiling_items",
    "steps": "steps:items",
    "ops": "ops:items",
    "peers": "ops:peer_items",
}
"""Part -> module and function that make its items."""


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a part's file, without a half-written last line."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def note(path: Path, *rows: dict[str, Any]) -> None:
    """Append rows to a part's file."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def main(part: str, path: Path, dry: bool, only: list[str]) -> int:
    """Run the items that the file does not list yet; return the exit code."""
    os.environ["TRITON_INTERPRET"] = str(int(dry))  # read when triton is imported
    done = {row["item"] for row in rows_of(path)}
    try:
        from bench.gpu.setting import make_setting, run_item

        items = pkgutil.resolve_name(f"bench.gpu.{PARTS[part]}")(dry)
        setting = make_setting(dry)
    except Exception as error:
        status = "failed" if isinstance(error, ImportError) else "not measured"
        note(path, {"item": "start", "status": status, "reason": str(error)})
        return NO_DEVICE
    for name, run in items:
        if name in done or (only and not any(text in name for text in only)):
            continue
        note(path, {"item": name, "status": "begun"})
        note(path, *run_item(setting, (name, run)))
        gc.collect()
        try:
            setting.timer.synchronize()
        except Exception:  # after an illegal access; tearing the context down may hang
            os._exit(LOST)
    return 0


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if word != "--dry-run"]
    sys.exit(main(words[0], Path(words[1]), "--dry-run" in sys.argv, words[2:]))
