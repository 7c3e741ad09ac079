"""The vocabulary of a GGUF file: its tokens, what each is, and which have a role.

Source: llama.cpp's llama-vocab.cpp.
"""

import numpy as np

from clocher_kernels.errors import FormatError
from clocher_runtime.checkpoints.gguf.file import GgufFile, Strings

MODEL, TOKENS, TYPES = "tokenizer.ggml.model", "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_ENDS = ("eos", "eot", "eom")

# What ends a turn, by name, as in llama.cpp: a file has one id for it, chat models several.
_END_TEXTS = {
    "<eos>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<|call|>",
    "<|calls|>",
    "<|end|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|flush|>",
    "<|im_end|>",
    "<|return|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",  # DeepSeek
    "</s>",
}
# Where a message ends with "<|end|>" and a turn does not: Harmony, and Solar Open.
_MESSAGES_END = ({"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"})


def has_vocabulary(file: GgufFile) -> bool:
    """Return whether the file has one: files for benchmarks may do without."""
    return MODEL in file.keys and file.text(MODEL) not in ("no_vocab", "none")


def token_id(file: GgufFile, role: str) -> int | None:
    """Return the id of a special token, None where the file does not say it."""
    key = f"tokenizer.ggml.{ROLES.get(role, role)}_token_id"
    if file.value(key) is None:
        return None
    return file.integer(key)


def token_types(file: GgufFile, count: int) -> np.ndarray:
    """Return what each token is, `NORMAL` to `BYTE`; without the entry all are normal.

    Raises FormatError.
    """
    if TYPES not in file.keys:
        return np.full(count, NORMAL)
    types = file.numbers(TYPES)
    if len(types) != count:
        raise FormatError(f"{file.file.path}: {TYPES} has {len(types)} entries for {count} tokens")
    return types


def tokens(file: GgufFile) -> Strings:
    """Return the tokens, in the order of their ids; raises FormatError."""
    found = file.strings(TOKENS)
    if not len(found):
        raise FormatError(f"{file.file.path}: {TOKENS} is empty")
    return found


def stop_ids(file: GgufFile) -> list[int]:
    """Return the ids that end a turn: those that the file names, and control tokens known for it.

    Raises FormatError.
    """
    named = [token_id(file, role) for role in _ENDS]
    ids = [index for index in named if index is not None]
    if has_vocabulary(file):
        ids += _known_ends(file)
    return list(dict.fromkeys(ids))


def _known_ends(file: GgufFile) -> list[int]:
    texts = tokens(file)
    control = np.flatnonzero(token_types(file, len(texts)) == CONTROL).tolist()
    found = {text: index for index in control if (text := texts.text(index)) in _END_TEXTS}
    if any(ends <= found.keys() for ends in _MESSAGES_END):
        found.pop("<|end|>", None)
    return list(found.values())
