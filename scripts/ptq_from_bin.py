"""Quantise a Hugging Face checkpoint of pickled weights (pytorch_model*.bin): write a q4 manifest.

The pickles are followed and not run: only plain tensors are read. torch is not needed.
"""

from clocher_runtime.checkpoints.hf.torch_bin import open_torch_bin
from clocher_runtime.command.ptq import EXIT_CODES, ptq_script
from clocher_runtime.command.script_run import needed

EPILOG = f"""\b
Examples:
  python scripts/ptq_from_bin.py --hf-dir models/gpt-oss-20b/hf --out quant/q4.json \\
      --bits 4 --weights-only 1
  python scripts/hf_to_iebin_stream_pt.py --help

{EXIT_CODES}"""


main = ptq_script(
    "ptq_from_bin",
    __doc__,
    EPILOG,
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
