"""A setting in a TOML file does what its flag and its variable do; none is accepted and dropped."""

import ast
import json
import os
from pathlib import Path
from typing import Any

import pytest
from commands import clocher, here
from weight_files import LLAMA, ROOT

import clocher_runtime
from clocher_kernels.errors import UsageError
from clocher_runtime.config.commands import ALL, SETTINGS, RunConfig, ServeConfig, resolve, settle
from clocher_runtime.config.engine import HINTS
from clocher_runtime.engine.backends import hand_on

# Setting -> a value that is not its default, as TOML has it.
OTHER: dict[str, Any] = {
    "model_dir": "models/a",
    "model_json": "a/model.ie.json",
    "model_bin": "a/model.ie.bin",
    "require_model": True,
    "yes": True,
    "verify_weights": True,
    "stub": True,
    "precision": "int8w",
    "kv_dtype": "i8",
    "act_sparsity": "topk:0.75",
    "act_calibration": "sample.txt",
    "context": 96,
    "prompt": "import",
    "prompt_ids": [1, 2],
    "prompts_file": "prompts.txt",
    "max_new": 3,
    "temperature": 0.5,
    "top_k": 4,
    "top_p": 0.9,
    "min_p": 0.1,
    "repetition_penalty": 1.5,
    "generation_config": "none",
    "lora": "adapter",
    "seed": 7,
    "ignore_eos": True,
    "device": "cpu",
    "fast_batch": True,
    "isa": "generic",
    "threads": 1,
    "batch": 2,
    "speculate": "suffix",
    "attn": "topk:256",
    "diffusion": "static:2",
    "draft_model": "draft",
    "rounds": 2,
    "warmup": 1,
    "prefetch": 3,
    "json": True,
    "aggregate": True,
    "outputs": "outputs.jsonl",
    "trace_ids": "trace.jsonl",
    "trace_topk": 2,
    "bytes_per_token": 4096,
    "stride_bytes": 64,
    "verify_touch": True,
    "act_prec": "fp32",
    "pretranspose": "none",
    "affinity": "compact",
    "use_affinity": True,
    "numa_policy": "compact",
    "hot_replicate": True,
    "hot_repl_limit_mb": 1,
    "prefetch_distance": 512,
    "stream_block_bytes": 65536,
    "dedup": True,
    "dedup_strict": True,
    "dedup_policy": "cache",
    "dedup_cache_mb": 5,
    "dedup_hot_bytes": 1,
    "dedup_hot_list": "a,b",
    "nt_loads": 1,
    "nt_ratio": 50,
    "nt_threshold_ratio": 1.5,
    "l3_bytes": 4096,
    "reuse_guard_windows": 2,
}
READ_BY_BACK_ENDS = {"isa"}


def toml(path: Path, **settings: object) -> dict[str, str]:
    lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
    path.write_text("\n".join(lines), encoding="utf-8")
    return {"config": str(path)}


def test_every_setting_but_the_file_itself_has_a_value_to_try() -> None:
    assert set(OTHER) == set(ALL) - {"config"}


@pytest.mark.parametrize("name", OTHER)
def test_the_file_decides_what_the_variable_would(name: str, tmp_path: Path) -> None:
    setting, value = ALL[name], OTHER[name]
    config = resolve(toml(tmp_path / "a.toml", **{name: value}), {})
    if name in HINTS:
        assert config.hints_ignored == (f"{tmp_path / 'a.toml'}: {name}={value}",)
        return
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    text = str(int(value)) if isinstance(value, bool) else text
    variable = resolve({}, {setting.env[0]: text})
    assert getattr(config, name) == getattr(variable, name) != getattr(RunConfig(), name)
    assert config.given[name].raw == text


def attributes_read() -> set[str]:
    """Return what is read of objects anywhere in the program, but in the table of settings."""
    table = ROOT / "clocher_runtime" / "command" / "settings.py"
    found = set()
    for path in (ROOT / "clocher_runtime").rglob("*.py"):
        if path != table:
            tree = ast.parse(path.read_text(encoding="utf-8"))
            found |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return found


def test_no_setting_is_unread() -> None:
    handed_on_as_given = {"config", "dedup_strict"}
    assert set(SETTINGS) - attributes_read() - handed_on_as_given == set()


def test_back_ends_read_no_other_variable_of_the_table() -> None:
    of_table = {variable: name for name, each in ALL.items() for variable in each.env}
    found = set()
    for room in ("clocher_kernels", "cpu_fallback"):
        for path in (ROOT / room).rglob("*.py"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            texts = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)}
            found |= {of_table[text] for text in texts if text in of_table}
    assert found == READ_BY_BACK_ENDS


def line_of(tmp_path: Path, **settings: object) -> tuple[int, dict[str, Any]]:
    flags = toml(tmp_path / "run.toml", model_dir=str(LLAMA), prompt="im", max_new=2, **settings)
    code, out, _ = clocher("run", "--config", flags["config"])
    return code, json.loads(out)


def test_isa_of_a_file_reaches_the_back_end(tmp_path: Path) -> None:
    code, line = line_of(tmp_path, isa="generic", device="cpu")
    assert (code, line["isa"]) == (0, "generic")


def test_a_process_has_one_instruction_set() -> None:
    from cpu_fallback.lanes import isa

    other = next(name for name in isa.ISAS if name != isa.CURRENT.name)
    with pytest.raises(UsageError, match=f"isa {other}: this process has compiled kernels for"):
        hand_on(other)


def test_perplexity_obeys_the_variables_of_a_run(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("import os\n" * 40, encoding="utf-8")
    words = ("perplexity", "--text", str(text), "--window", "16", "--limit", "1")
    given = {"CLOCHER_MODEL_DIR": str(LLAMA), "IE_PRECISION": "int8w", "CLOCHER_KV_DTYPE": "i8"}
    code, out, _ = here(*words, env=given)
    line = json.loads(out)
    shown = (line["model"], line["precision"], line["kv_dtype"], line["act_prec"])
    assert (code, shown) == (0, (str(LLAMA), "int8_row_f32+bf16", "i8", "int8"))
    code, out, _ = here(*words, "--precision", "bf16", env={**given, "IE_ACT_PREC": "fp32"})
    assert (json.loads(out)["precision"], json.loads(out)["act_prec"]) == ("bf16", "fp32")
    assert here(*words, env={"IE_ACT_PREC": "int5"})[0] == 2


def test_a_path_in_a_file_holds_no_nul(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text('outputs = "a\\u0000b"\n', encoding="utf-8")
    code, _, err = here("run", "--config", str(path))
    assert (code, len(err.splitlines())) == (2, 1)
    assert "outputs: got 'a\\x00b', expected a path" in err


def test_what_is_no_regular_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for name in ("fifo", "."):
        with pytest.raises(UsageError, match="not a regular file; give a TOML file"):
            resolve({"config": str(tmp_path / name)}, {})


@pytest.mark.parametrize(("given", "dtype"), [("int8", "i8"), ("fp8", "e4m3")])
def test_a_cache_has_the_names_that_others_give_it(given: str, dtype: str, tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text(f'kv_dtype = "{given}"\n', encoding="utf-8")
    assert resolve({"kv_dtype": given}, {}).kv_dtype == dtype
    assert resolve({}, {"CLOCHER_KV_DTYPE": given}).kv_dtype == dtype
    assert resolve({"config": str(path)}, {}).kv_dtype == dtype
    assert settle(ServeConfig, {"kv_dtype": given}, {}).kv_dtype == dtype
    assert clocher_runtime.KVCacheConfig(given).memory_usage_mb() > 0
