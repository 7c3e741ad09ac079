"""Scripts for Q4_0 files: gen_q4_bytes_stream, append_q4_attn_from_hf and their indexes."""

import os
from pathlib import Path

from clocher_runtime.checkpoints.q4 import COMPAT_NAME
from clocher_runtime.command.console import Console
from clocher_runtime.command.flags import needed, script
from clocher_runtime.config.values import SWITCH, integer
from clocher_runtime.convert.q4_planes import CHUNK_ROWS, AppendJob, Q4Job, make_index
from clocher_runtime.convert.to_iebin import MAP_NAME, write_tensor_map

MAX_CHUNK_ROWS = 1_000_000


@script(
    "gen_q4_bytes_stream",
    needed("--hf-dir", "The checkpoint, as hf_to_iebin.py takes it. It is only read."),
    needed("--q4-bytes", "File for the codes, usually model.q4.bin."),
    needed("--scales", "File for the scales, usually model.q4.scales.fp16.bin."),
    needed("--manifest", "File for the expanded manifest, which hf_to_iebin.py --q4-map takes."),
    examples=(
        (
            "All projections and the head",
            "CHUNK_ROWS=128 IE_Q4_INCLUDE_LM_HEAD=1 python scripts/gen_q4_bytes_stream.py \\\n"
            "    --hf-dir models/llama/hf --q4-bytes models/llama/model.q4.bin \\\n"
            "    --scales models/llama/model.q4.scales.fp16.bin \\\n"
            "    --manifest quant/q4_manifest.expanded.json",
        ),
    ),
    epilog=f"""\b
Environment:
  IE_Q4_INCLUDE_LM_HEAD  1: the output head (lm_head.weight) too; default 0
  CHUNK_ROWS             rows that are encoded at a time, 1 to {MAX_CHUNK_ROWS} ({CHUNK_ROWS});
                         fewer take less memory, the bytes are the same

Killed at any moment, it leaves no manifest, and no files count without one. Run it again to go
on.""",
)
def generate(console: Console, hf_dir: Path, q4_bytes: Path, scales: Path, manifest: Path) -> None:
    """Encode the projections of a model (*_proj.weight, stored as floats) in Q4_0.

    Norms, biases, routers, embeddings and tensors that are already quantised are left out; the
    manifest says why, tensor by tensor.
    """
    head = SWITCH.read(*_variable("IE_Q4_INCLUDE_LM_HEAD", "0"))
    rows = integer(1, MAX_CHUNK_ROWS).read(*_variable("CHUNK_ROWS", str(CHUNK_ROWS)))
    job = Q4Job(hf_dir, q4_bytes, scales, manifest, head, rows)
    if head and "lm_head.weight" not in job.names:
        kept = job.kept.get("lm_head.weight", "the embedding is the output head")
        console.note(f"note: IE_Q4_INCLUDE_LM_HEAD=1, but there is none to encode: {kept}")
    console.disk(job.source.path, q4_bytes.parent, job.nbytes)
    resumed = console.progress(job.nbytes, job.run)
    taken_over = f" ({resumed} taken over from a killed run)" if resumed else ""
    console.say(
        f"wrote {len(job.names)} matrices{taken_over} to {q4_bytes} and {scales}; "
        f"{len(job.kept)} tensors are left as they are; all in {manifest}"
    )


def _variable(name: str, default: str) -> tuple[str, str]:
    """Return a variable and its value; an empty one counts as unset."""
    return name, os.environ.get(name) or default


@script(
    "append_q4_attn_from_hf",
    needed("--hf-dir", "The checkpoint that the model was made of. It is only read."),
    needed(
        "--compat-json", "model.ie.compat.json, as scripts/rebuild_dedup_and_quant.sh makes it."
    ),
    needed(
        "--q4-bin",
        "model.q4.bin in the same directory; the scales go to model.q4.scales.fp16.bin beside it.",
    ),
    examples=(
        (
            "An index of scripts/rebuild_dedup_and_quant.sh",
            "python scripts/append_q4_attn_from_hf.py --hf-dir models/llama/hf \\\n"
            "    --compat-json models/llama/model.ie.compat.json \\\n"
            "    --q4-bin models/llama/model.q4.bin",
        ),
        ("Run it", "clocher-run --model-json models/llama/model.ie.compat.json"),
    ),
    epilog="Killed at any moment, it leaves an index of the matrices that are finished. Run it "
    "again to go on.",
)
def append(console: Console, hf_dir: Path, compat_json: Path, q4_bin: Path) -> None:
    """Append to an index the attention projections (self_attn q, k, v, o) that it lacks in Q4_0."""
    job = AppendJob(hf_dir, compat_json, q4_bin)
    console.disk(job.source.path, compat_json.parent, job.nbytes)
    console.progress(job.nbytes, job.run)
    console.say(
        f"appended {len(job.names)} matrices to {q4_bin}; {len(job.present)} were there already"
    )


@script(
    "make_compat_index",
    needed(
        "--model-dir",
        "Directory with model.ie.json, model.ie.bin and the files of gen_q4_bytes_stream.py.",
    ),
    needed("--manifest", "The expanded manifest that gen_q4_bytes_stream.py wrote."),
    examples=(
        (
            "What gen_q4_bytes_stream.py has written",
            "python scripts/make_compat_index.py --model-dir models/llama \\\n"
            "    --manifest quant/q4_manifest.expanded.json",
        ),
        ("Run it", "clocher-run --model-json models/llama/model.ie.compat.json"),
    ),
)
def index(console: Console, model_dir: Path, manifest: Path) -> None:
    """Index a model that takes its Q4_0 matrices from model.q4.bin, all else from model.ie.bin."""
    names = make_index(model_dir, manifest)
    console.say(f"wrote {model_dir / COMPAT_NAME} with {len(names)} matrices in Q4_0")


@script(
    "make_tensor_map_from_iejson",
    needed("--model-dir", "Directory with model.ie.json; tensor_map.json is written beside it."),
    examples=(("Map", "python scripts/make_tensor_map_from_iejson.py --model-dir models/llama"),),
)
def tensor_map(console: Console, model_dir: Path) -> None:
    """Say in a plain JSON file where each tensor of model.ie.bin lies.

    The map is for other programs. Clocher itself does not need it and never reads it.
    """
    count = write_tensor_map(model_dir)
    console.say(f"wrote {count} tensors to {model_dir / MAP_NAME}")
