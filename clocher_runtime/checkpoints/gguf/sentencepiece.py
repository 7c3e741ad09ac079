"""From the vocabulary of a SentencePiece model to the JSON of the `tokenizers` library.

The merges follow from the scores of the tokens.

Source: llama.cpp's llama-vocab.cpp (llm_tokenizer_spm); transformers' generate_merges.
"""

from array import array
from typing import Any

import numpy as np

from clocher_kernels.errors import FormatError
from clocher_runtime.checkpoints.gguf.file import GgufFile
from clocher_runtime.checkpoints.gguf.vocabulary import (
    CONTROL,
    UNKNOWN,
    USER,
    token_id,
    token_types,
)

_SCORES = "tokenizer.ggml.scores"
_MAX_SPM_CHARS = 1 << 22
_MAX_TOKEN_CHARS = 512
_MAX_SPM_WORK = 1 << 28
_MERGES_PER_TOKEN = 8
_STRIDE = 1024
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


def sentencepiece(file: GgufFile, texts: list[str]) -> dict[str, Any]:
    """Return the parts of a tokenizer.json that this kind of vocabulary has.

    `texts`: its tokens, all of them different. Raises FormatError.
    """
    scores = file.numbers(_SCORES)
    if len(scores) != len(texts) or not np.isfinite(scores).all():
        raise FormatError(
            f"{file.file.path}: {_SCORES} has {len(scores)} numbers for {len(texts)} tokens; "
            "expected a finite one for each"
        )
    types = token_types(file, len(texts))
    unknown = token_id(file, "unk")
    if unknown is None and (marked := np.flatnonzero(types == UNKNOWN)).size:
        unknown = int(marked[0])
    prefix = file.flag("tokenizer.ggml.add_space_prefix", True)
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    before = [{"type": "Prepend", "prepend": _SPACE}] if prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    back = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    model = bpe_model(
        {text: index for index, text in enumerate(texts)},
        _merges(file, texts, scores.astype(np.float64), types),
        unk_token=texts[unknown] if unknown is not None and 0 <= unknown < len(texts) else None,
        fuse_unk=True,
        byte_fallback=True,
    )
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*before, replace]},
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip],
        },
        "model": model,
    }


def _merges(
    file: GgufFile, texts: list[str], scores: np.ndarray, types: np.ndarray
) -> list[tuple[str, str]]:
    """Return the pairs of tokens that make a token, that of the best score first."""
    lengths = np.array([len(text) for text in texts], np.int64)
    for what, size, limit in (
        ("characters in all", int(lengths.sum()), _MAX_SPM_CHARS),
        ("characters in the longest", int(lengths.max()), _MAX_TOKEN_CHARS),
        ("squares of their lengths", int((lengths**2).sum()), _MAX_SPM_WORK),
    ):
        if size > limit:
            raise FormatError(
                f"{file.file.path}: {len(texts)} tokens with {size} {what}; the limit is {limit}"
            )
    mergeable = (types != CONTROL) & (types != UNKNOWN) & (types != USER)
    # Text -> the same text, so that the parts of all merges are no more strings than there are.
    parts = {text: text for text, use in zip(texts, mergeable.tolist(), strict=True) if use}
    splits = array("q")
    for index, text in enumerate(texts):
        if text in parts:
            splits.extend(
                index * _STRIDE + at
                for at in range(1, len(text))
                if text[:at] in parts and text[at:] in parts
            )
        if len(splits) > _MERGES_PER_TOKEN * len(texts):
            raise FormatError(
                f"{file.file.path}: its {len(texts)} tokens are made of each other in more than "
                f"{_MERGES_PER_TOKEN} ways each; those of models are in 2 or 3"
            )
    whole, cuts = np.divmod(np.array(splits, np.int64), _STRIDE)
    order = np.lexsort((cuts - lengths[whole], -cuts, -scores[whole]))
    return [
        (parts[texts[one][:cut]], parts[texts[one][cut:]])
        for one, cut in zip(whole[order].tolist(), cuts[order].tolist(), strict=True)
    ]


def bpe_model(vocab: dict[str, int], merges: list[Any], **settings: Any) -> dict[str, Any]:
    """Return the model of a tokenizer.json that merges pairs."""
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        **settings,
        "vocab": vocab,
        "merges": merges,
    }
