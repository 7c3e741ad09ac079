"""Convert a checkpoint to IEBIN. The work is that of `clocher convert`."""

from clocher_runtime.subcommands.convert import Q4_MAP, converter

main = converter(
    "hf_to_iebin",
    """Convert a checkpoint to IEBIN: one file of weights, ready to be mapped.

    Tensors that are already quantised (MXFP4, BitNet, fp8) keep their exact bytes. Two tensors at
    a time are in memory.
    """,
    Q4_MAP,
    examples=(
        (
            "With a quantisation manifest",
            "python scripts/hf_to_iebin.py --hf-dir models/llama/hf --out-dir models/llama-q4 \\\n"
            "    --q4-map quant/q4_manifest.json --verify",
        ),
    ),
)

if __name__ == "__main__":
    main()
