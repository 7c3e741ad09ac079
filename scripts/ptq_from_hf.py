"""Quantise a Hugging Face checkpoint (safetensors) after training: write a q4 manifest."""

from clocher_runtime.checkpoints.hf.hub import local_or_fetched
from clocher_runtime.command.ptq import EXIT_CODES, ptq_script
from clocher_runtime.command.script_run import needed
from clocher_runtime.convert.to_iebin import open_source

EPILOG = f"""\b
Examples:
  python scripts/ptq_from_hf.py --hf-dir models/llama/hf --out quant/llama.json \\
      --bits 4 --weights-only 1
  python scripts/ptq_from_hf.py --hf-dir models/llama/hf --out quant/llama.json \\
      --calib-text calib.txt --gate held_out.txt
  python scripts/ptq_from_hf.py --hf-dir models/llama/hf --out quant/llama.json \\
      --rules quant/q4_manifest.json --method gptq --calib-text calib.txt
  python scripts/hf_to_iebin.py --hf-dir models/llama/hf --out-dir models/llama \\
      --q4-map quant/llama.json

{EXIT_CODES}"""


main = ptq_script(
    "ptq_from_hf",
    __doc__,
    EPILOG,
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
