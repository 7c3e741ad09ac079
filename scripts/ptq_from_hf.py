"""Quantise a Hugging Face checkpoint (safetensors) after training: write a q4 manifest."""

from clocher_runtime.checkpoints.hf.hub import local_or_fetched
from clocher_runtime.command.script_run import needed
from clocher_runtime.convert.to_iebin import open_source
from clocher_runtime.subcommands.quantize import manifest_script

SELF = "python scripts/ptq_from_hf.py --hf-dir models/llama/hf --out quant/llama.json"
EXAMPLES = (
    ("Rounding to 4 bits", f"{SELF} --bits 4 --weights-only 1"),
    ("Better, and judged", f"{SELF} \\\n    --calib-text calib.txt --gate held_out.txt"),
    (
        "GPTQ where rules say",
        f"{SELF} \\\n    --rules quant/q4_manifest.json --method gptq --calib-text calib.txt",
    ),
    (
        "Then the model; clocher quantize does both steps at once",
        "python scripts/hf_to_iebin.py --hf-dir models/llama/hf --out-dir models/llama \\\n"
        "    --q4-map quant/llama.json",
    ),
)

main = manifest_script(
    "ptq_from_hf",
    __doc__,
    EXAMPLES,
    needed(
        "--hf-dir",
        "Directory of the model (or with it in hf/ or hf/original/), or the name of a repository "
        "on the Hugging Face hub, which is then downloaded.",
        name="source",
    ),
    lambda path: open_source(local_or_fetched(path)),
)

if __name__ == "__main__":
    main()
