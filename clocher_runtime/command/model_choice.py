"""Which model a run uses: directory, GGUF file or cached Hub repository. Nothing is downloaded."""

import os
from dataclasses import dataclass
from pathlib import Path

from clocher_kernels.errors import ModelNotFound
from clocher_runtime.checkpoints import Checkpoint, open_checkpoint
from clocher_runtime.checkpoints.iebin import BIN_NAME, JSON_NAME
from clocher_runtime.checkpoints.locate import EMBEDDED, embedded_model, locate
from clocher_runtime.config.engine import EngineConfig
from clocher_runtime.config.setting import Given

DEDUP_INDEX = "model.dedup.json"


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """A model, not opened yet.

    `source`: the flag or variable that chose it, "current directory" or "embedded". `path`:
    directory, GGUF file, or metadata file of an IEBIN pair, whose data file is `data`.
    """

    name: str
    source: str
    path: Path
    data: Path | None = None

    def open(self) -> Checkpoint:
        """Open the checkpoint; raises ModelError."""
        if self.data is not None:
            from clocher_runtime.checkpoints.q4 import open_index

            return open_index(self.path, self.data)
        return open_checkpoint(self.path)

    def open_for(self, config: EngineConfig) -> tuple[Checkpoint, tuple[str, ...]]:
        """Open it, with deduplicated weights and LoRA if set; raises ModelError, UsageError."""
        directory: Path | None = self.path if self.data is None else self.path.parent
        if config.model_bin is not None or (self.data and self.path.name != JSON_NAME):
            directory = None
        checkpoint, unmet = self._weights(config, directory)
        if config.lora is None:
            return checkpoint, unmet
        from clocher_runtime.checkpoints.hf.lora import with_lora

        how = config.given.get("lora", Given("--lora", str(config.lora)))
        return with_lora(checkpoint, locate(how.raw, how.source)), unmet

    def _weights(
        self, config: EngineConfig, directory: Path | None
    ) -> tuple[Checkpoint, tuple[str, ...]]:
        asked = config.dedup or any(name.startswith("dedup") for name in config.given)
        if not asked and (directory is None or not os.path.isfile(directory / DEDUP_INDEX)):
            return self.open(), ()
        from clocher_runtime.command.dedup_weights import open_weights

        return open_weights(config, directory, self.open)


def choose_model(config: EngineConfig, cwd: Path | None = None) -> ModelChoice:
    """Return the model of a run; raises ModelNotFound.

    In order: `--model-json` and `--model-bin`; `--model-dir`; an IEBIN pair in the current
    directory; the embedded model (not with IE_REQUIRE_MODEL=1). The unnamed file of a pair has its
    usual name, in the model directory if given, else beside the other file.
    """
    source, raw = config.given.get("model_dir", ("", str(config.model_dir)))
    model_dir = None if config.model_dir is None else locate(raw, source)
    named = config.model_json or config.model_bin
    if named is not None:
        directory = model_dir or named.parent
        json = config.model_json or directory / JSON_NAME
        data = config.model_bin or directory / BIN_NAME
        source = "--model-json" if config.model_json else "--model-bin"
        return ModelChoice(str(json), source, json, data)
    if model_dir is not None:
        return ModelChoice(str(config.model_dir), source, model_dir)
    cwd = cwd or _current_directory()
    if cwd is not None and os.path.isfile(cwd / JSON_NAME):
        return ModelChoice(str(cwd), "current directory", cwd)
    if config.require_model:
        raise ModelNotFound(
            f"IE_REQUIRE_MODEL=1, but no model is named and the current directory "
            f"has no {JSON_NAME}; "
            "give --model-dir, or unset IE_REQUIRE_MODEL to use the embedded model"
        )
    return ModelChoice(EMBEDDED, "embedded", embedded_model())


def _current_directory() -> Path | None:
    try:
        return Path.cwd()
    except OSError:
        return None


def converses(path: Path, template: object) -> bool:
    """Return whether a model has a chat template; that of the embedded model is for tests."""
    return bool(template) and not path.samefile(embedded_model())
