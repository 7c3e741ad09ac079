"""Quantise a Hugging Face checkpoint of pickled weights (pytorch_model*.bin): write a q4 manifest.

Only plain tensors are read, by torch's restricted unpickler.
"""

from clocher_runtime.checkpoints.hf.torch_bin import open_torch_bin
from clocher_runtime.command.script_run import needed
from clocher_runtime.subcommands.quantize import manifest_script

EXAMPLES = (
    (
        "Rules for 4 bits; hf_to_iebin_stream_pt.py, or clocher quantize, makes models",
        "python scripts/ptq_from_bin.py --hf-dir models/gpt-oss-20b/hf --out quant/q4.json \\\n"
        "    --bits 4 --weights-only 1",
    ),
)

main = manifest_script(
    "ptq_from_bin",
    __doc__,
    EXAMPLES,
    needed(
        "--hf-dir",
        "Directory with config.json and pytorch_model.bin, or its index and shards (or with them "
        "in hf/ or hf/original/).",
        name="source",
    ),
    open_torch_bin,
)

if __name__ == "__main__":
    main()
