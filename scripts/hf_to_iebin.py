"""Convert a checkpoint to IEBIN. The work is in clocher_runtime.convert.to_iebin."""

from clocher_runtime.command.script_run import PATH, converter, option

EXAMPLES = """\b
Examples:
  python scripts/hf_to_iebin.py --hf-dir models/llama/hf --out-dir models/llama
  python scripts/hf_to_iebin.py --hf-dir models/llama/hf --out-dir models/llama-int4 \\
      --q4-map quant/q4_manifest.json --verify
"""

main = converter(
    "hf_to_iebin",
    """Convert a checkpoint to IEBIN: one file of weights, ready to be mapped.

    Tensors that are already quantised (MXFP4, BitNet, fp8) keep their exact bytes. Two tensors at
    a time are in memory.
    """,
    option(
        "--q4-map",
        PATH,
        "Quantisation manifest (JSON): which matrices become int4 or int8, or where they lie "
        "already quantised. Without it every tensor is copied bit for bit.",
    ),
    examples=EXAMPLES,
)

if __name__ == "__main__":
    main()
