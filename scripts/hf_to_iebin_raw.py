"""Convert a checkpoint to IEBIN without quantising: hf_to_iebin.py without --q4-map."""

from clocher_runtime.subcommands.convert import converter

main = converter(
    "hf_to_iebin_raw",
    """Convert a checkpoint to IEBIN bit for bit.

    This is hf_to_iebin.py without --q4-map, for those who want to be sure that no weight changes;
    the result is the same, byte for byte.
    """,
)

if __name__ == "__main__":
    main()
