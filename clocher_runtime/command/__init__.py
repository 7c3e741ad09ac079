"""The commands: settings, a run, its one line; here, what the programs of scripts/ call."""

import os
import pkgutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

_SERVE = "-m clocher_runtime serve --port 30000 --diffusion"
_PULL = "command.fetching:pull --repo openai/gpt-oss-20b"
SCRIPTS: Mapping[str, str] = {
    "append_q4_attn_from_hf": "subcommands.q4:append",
    "convert_to_block_sparse": "subcommands.compress:sparsify",
    "direct_bitnet_inference": "-m bench linear --formats ternary",
    "direct_inference_full": "-m clocher_runtime run",
    "dlm_server": f"{_SERVE} auto",
    "download_gpt_oss_20b": f"{_PULL} --out-dir models/gpt-oss-20b/hf",
    "gen_q4_bytes_stream": "subcommands.q4:generate",
    "hf_to_iebin": "subcommands.convert:convert",
    "hf_to_iebin_raw": "subcommands.convert:convert",
    "hf_to_iebin_stream": "subcommands.convert:convert",
    "hf_to_iebin_stream_pt": "subcommands.convert:convert --pickled",
    "kv_cache_bench": "-m bench.harness --sweep kv_quant=none,fp16,fp8,int8",
    "make_baseline_md": "-m bench.report baseline",
    "make_compat_index": "subcommands.q4:index",
    "make_synthetic": "subcommands.convert:synthesize",
    "make_tensor_map_from_iejson": "subcommands.q4:tensor_map",
    "metrics_exporter": "monitoring.command:export",
    "profile_bitnet_ops": "-m bench linear --formats ternary",
    "profile_forward_pass": "-m bench profile",
    "profile_sglang_overhead": "-m bench profile",
    "ptq_from_bin": "subcommands.quantize:ptq --pickled",
    "ptq_from_hf": "subcommands.quantize:ptq",
    "ptq_from_source": "subcommands.quantize:ptq",
    "run_harness_report": "-m bench.report run",
    "sglang_direct_test": "command.verify_hf:verify_ids",
    "sglang_model_direct": "-m bench profile",
    "sparsity_benchmark": "-m bench.harness --sweep act_sparsity=default,topk:0.6,adaptive",
    "update_performance_md": "-m bench.report update",
    "verify_hf_generation_ids": "command.verify_hf:verify_ids",
    "wf_server": f"{_SERVE} off",
}
"""Name -> module:function of this package, or a module of the repository, and its first words."""


def start(file: str) -> NoReturn:
    """Run a script with this process's arguments, from any directory."""
    path = Path(file).resolve()
    target = SCRIPTS[path.stem]
    if not target.startswith("-m "):
        where, *first = target.split()
        sys.argv[1:1] = first
        sys.exit(pkgutil.resolve_name(f"clocher_runtime.{where}")())
    given = sys.argv[1:]
    if target.startswith(_SERVE):
        given = [word.replace("--model-path", "--model-dir", 1) for word in given]
    paths = filter(None, (str(path.parents[1]), os.environ.get("PYTHONPATH")))
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    os.execve(sys.executable, [sys.executable, *target.split(), *given], environ)
