"""KVCacheConfig: the memory that it foretells is what a run takes."""

import json
from pathlib import Path
from typing import Any

import pytest
from commands import run_subcommand
from weight_files import GPTOSS, LLAMA, copy_model

import clocher_runtime
from clocher_kernels.errors import ClocherError, ModelNotFound, UsageError
from clocher_runtime import KVCacheConfig
from clocher_runtime.checkpoints.locate import embedded_model
from clocher_runtime.config.engine import EngineConfig
from clocher_runtime.convert.synthetic import preset_config
from clocher_runtime.engine.footprint import kv_cache_bytes, sizes_of
from clocher_runtime.models.families import spec_from_config


@pytest.mark.parametrize("path", [None, GPTOSS, LLAMA], ids=["embedded", "windows", "dense"])
@pytest.mark.parametrize(
    "config",
    [
        KVCacheConfig(),
        KVCacheConfig("i8", 300, 3),
        KVCacheConfig("f32", context=64, batch=2, pages=2),
    ],
    ids=["default", "i8", "pages"],
)
def test_a_loaded_model_takes_what_was_foretold(path: Path | None, config: KVCacheConfig) -> None:
    expected = config.memory_usage_mb(path, "cpu")
    with clocher_runtime.load(path, device="cpu", threads=1, kv_cache=config) as model:
        assert model.kv_cache_mb == expected > 0
        assert model.session.config.batch == config.batch
        assert config.context in (None, model.session.context)
        assert config.dtype in (None, model.session.sizes.cache_dtype)


def test_windows_have_room_for_blocks_of_all_sequences(tmp_path: Path) -> None:
    folder = copy_model(embedded_model(), tmp_path / "blocks")
    config = json.loads((folder / "config.json").read_text())
    config["block_diffusion"] = {"block_size": 64, "mask_token_id": 1}
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    many = KVCacheConfig(batch=8)
    assert many.memory_usage_mb(folder, "cpu") > many.memory_usage_mb(None, "cpu")
    test_a_loaded_model_takes_what_was_foretold(folder, many)


def test_the_json_line_says_the_same() -> None:
    sizes = ("--kv-dtype", "e4m3", "--context", 200, "--device", "cpu")
    done = run_subcommand("run", LLAMA, *sizes, "--max-new", 1, "--prompt", "a")
    assert done.returncode == 0, done.stderr
    config = KVCacheConfig("e4m3", 200)
    assert json.loads(done.stdout)["kv_cache_mb"] == config.memory_usage_mb(LLAMA, "cpu")


def test_a_byte_is_half_of_two() -> None:
    one, two = (KVCacheConfig(kind, 1024).memory_usage_mb(LLAMA) for kind in ("e4m3", "f16"))
    assert 0.5 <= one / two < 0.52  # tables are beside them


def test_windows_take_little_of_a_long_context() -> None:
    spec = spec_from_config(preset_config("gpt-oss-20b", 24))
    sizes = sizes_of(spec, EngineConfig(context=32768))
    full = sum(not window for window in spec.windows)
    cells = full * sizes.context + (len(spec.windows) - full) * (max(spec.windows) + sizes.tokens)
    line = 2 * spec.num_kv_heads * spec.head_dim * 2  # keys and values, fp16
    assert full == 12
    assert 1 <= kv_cache_bytes(spec, sizes) / (cells * line) < 1.02


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (KVCacheConfig("int9"), "kv_dtype"),
        (KVCacheConfig(context=0), "context"),
        (KVCacheConfig(batch=0), "batch"),
        (KVCacheConfig(pages=-1), "kv_pages"),
        (KVCacheConfig(context=1 << 20), "this model takes 1 to"),
    ],
)
def test_what_cannot_be_is_refused_by_both(config: KVCacheConfig, message: str) -> None:
    for ask in (config.memory_usage_mb, lambda: clocher_runtime.load(kv_cache=config)):
        with pytest.raises(UsageError, match=message):
            ask()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache": {"dtype": "i8"}}, "expected a KVCacheConfig"),
        ({"kv_cache": KVCacheConfig(), "batch": 2}, "got batch and kv_cache"),
        ({"kv_cache": KVCacheConfig("i8"), "kv_dtype": "i8"}, "got kv_dtype and kv_cache"),
    ],
)
def test_nothing_is_accepted_and_dropped(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        clocher_runtime.load(**options)


def test_errors_about_the_model_are_typed(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        KVCacheConfig().memory_usage_mb(tmp_path / "none")
    with pytest.raises(ClocherError):
        KVCacheConfig().memory_usage_mb(device="abacus")
