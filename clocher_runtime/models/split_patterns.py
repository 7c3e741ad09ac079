"""The regular expressions that split text before it is tokenised, of the models that are known.

The library's engine backtracks. These take time that grows with the text and not with its square,
which was measured on the worst texts for them; any other expression is taken for hostile, and runs
where it can be ended (see `text_process`).

Source: the tokenizer.json files of the models; llama.cpp's llama-vocab.cpp for a pre-type.
"""

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_AFTER = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = _ENDINGS + "|" + _WORDS + r"|\p{N}{1,3}" + _REST
QWEN2 = _ENDINGS + "|" + _WORDS + r"|\p{N}" + _REST
GPT4O = rf"{_CASED[0]}{_ENDINGS}?|{_CASED[1]}{_ENDINGS}?|\p{{N}}{{1,3}}{_AFTER}"
DEFAULT = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)

KNOWN = frozenset(
    (
        GPT2,
        LLAMA3,
        QWEN2,
        GPT4O,
        *DEFAULT,
        f"{_CASED[0]}|{_CASED[1]}|" + r"\p{N}" + _AFTER,  # Mistral since Nemo
        _WORDS + r"|\p{N}{1,3}" + _REST,  # Clocher's own models
        r"\p{N}{1,3}",  # DeepSeek V3, in three steps
        "[一-龥\u3040-ゟ\u30a0-ヿ]+",
        "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\\r\\n\\p{L}\\p{P}\\p{S}]?"
        "[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
    )
)
"""Texts of expressions, compared as they are."""
