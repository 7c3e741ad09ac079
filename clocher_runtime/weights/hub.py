"""Getting a model from the Hugging Face hub, when its directory is not there."""

import re
from pathlib import Path

from clocher_kernels.errors import ModelNotFound

FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "LICENSE*")
"""What is downloaded. Weights in safetensors alone: the hub's pickled files are never needed."""

_REPO = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


def local_or_fetched(path: Path) -> Path:
    """Return a model's directory, downloading it if the path is the name of a repository.

    Args:
        path: a directory, or "owner/name" of a repository on the hub.

    Raises:
        ModelNotFound: neither is there, or the hub cannot be reached.
    """
    name = path.as_posix()
    if path.exists() or not _REPO.fullmatch(name):
        return path
    # Slow to import, and not needed by anybody who has the model.
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=list(FILES)))
    except Exception as error:  # whatever the network layers below raise
        reason = str(error).strip().split("\n")[0]
        raise ModelNotFound(
            f"{name}: no such directory, and the Hugging Face hub did not give a model of this "
            f"name ({type(error).__name__}: {reason:.200}); give the directory of a model, or "
            "check the name, the network, and for a gated model your login"
        ) from None
