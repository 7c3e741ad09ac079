"""Convert a checkpoint to IEBIN in small pieces: the one converter, which always does."""

from clocher_runtime.subcommands.convert import converter

main = converter(
    "hf_to_iebin_stream",
    """Convert a checkpoint to IEBIN without ever holding the model in memory.

    Every Clocher converter streams: two tensors at a time are in memory, and the disk gets pieces
    of 4 MiB. This is hf_to_iebin.py without --q4-map under the name that guides use; the result is
    the same, byte for byte.
    """,
)

if __name__ == "__main__":
    main()
