"""Convert pytorch_model*.bin weights to IEBIN. The work is in clocher_runtime.checkpoints."""

from clocher_runtime.checkpoints.hf.torch_bin import open_torch_bin
from clocher_runtime.subcommands.convert import Q4_MAP, converter

main = converter(
    "hf_to_iebin_stream_pt",
    """Convert a checkpoint with pickled weights to IEBIN, without running what is in the pickle.

    torch's restricted unpickler reads it (pip install '.[torch]'). Files that hold more than plain
    tensors are refused.
    """,
    Q4_MAP,
    weights="pytorch_model*.bin weights (or with them in hf/ or hf/original/)",
    opener=open_torch_bin,
)

if __name__ == "__main__":
    main()
