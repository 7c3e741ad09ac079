"""Vocabularies of GGUF files: text to the ids that llama.cpp gives it."""

import json
import os
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import gguf
import pytest
import tokenizers
from fuzz.oracle import bounded_memory
from gguf_files import add_tokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from weight_files import LLAMA

from clocher_kernels.errors import FormatError, UnsupportedModel
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.checkpoints.gguf.file import GgufFile
from clocher_runtime.checkpoints.gguf.tokenizer import (
    PRE_TYPES,
    stop_ids,
    tokenizer_config,
    tokenizer_json,
)
from clocher_runtime.text.tokenizer import Tokenizer
from clocher_runtime.text.tokenizer_library import inspect

TEXTS = Path(__file__).parent / "data" / "valid.txt"
VOCABULARIES = "CLOCHER_TEST_LLAMA_CPP_MODELS"
"""Environment variable: the folder `models` of llama.cpp's sources."""


def vocabulary(path: Path, add: Callable[[gguf.GGUFWriter], None]) -> GgufFile:
    """Return a file with a vocabulary and no tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    add(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufFile(path)


def tokenizer_of(file: GgufFile) -> Tokenizer:
    return Tokenizer(tokenizer_json(file), tokenizer_config(file))


# --- byte-level BPE

HARD = (
    "I'M héllo  wORLDWide's 12345,67 don'T\r\n\n\tx=y/z //\n日本語 ١٢٣ "
    "<|start|>user<|end|> ﬁ\u200d😀 "
)


@pytest.mark.parametrize("pre", sorted(GGUF_PRE_TOKENIZER_SPLITS.keys() & PRE_TYPES.keys()))
def test_byte_level_ids_equal_the_models_own_tokenizer(pre: str, tmp_path: Path) -> None:
    file = vocabulary(tmp_path / "a.gguf", add_tokenizer(LLAMA, pre))
    tokenizer = tokenizer_of(file)
    document = json.loads((LLAMA / "tokenizer.json").read_text())
    split = {"Regex": GGUF_PRE_TOKENIZER_SPLITS[pre]}
    document["pre_tokenizer"]["pretokenizers"][0]["pattern"] = split
    oracle = tokenizers.Tokenizer.from_str(json.dumps(document))
    for text in (HARD, TEXTS.read_text()[:20_000]):
        ids = tokenizer.encode(text)
        assert ids == oracle.encode(text).ids
        assert tokenizer.decode(ids) == oracle.decode(ids, skip_special_tokens=False)
    source = open_checkpoint(LLAMA)
    own = Tokenizer(source.tokenizer_json, source.tokenizer_config)
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(messages) == own.apply_chat_template(messages)
    assert stop_ids(file)[0] == 0


SPLIT_TEXT = "I'll pay 1234+=5    日本  \nNow  "
SPLITS = {
    "gpt-2": r"I|'ll| pay| 1234|+=|5|   | 日本|  |\n|Now|  ",
    "default": r"I|'|ll| pay| |123|4|+=|5|   | 日本|  |\n|Now|  ",
    "llama-bpe": r"I|'ll| pay| |123|4|+=|5|   | 日本|  \n|Now|  ",
    "qwen2": r"I|'ll| pay| |1|2|3|4|+=|5|   | 日本|  \n|Now|  ",
    "gpt-4o": r"I'll| pay| |123|4|+=|5|   | 日本|  \n|Now|  ",
    "tekken": r"I|'ll| pay| |1|2|3|4|+=|5|   | 日本|  \n|Now|  ",
    "smollm": r"I|'ll| pay| |1|2|3|4|+=|5|   | 日本|  |\n|Now|  ",
    "falcon": r"I|'|ll| pay| |123|4|+=|5|   | 日本|  |\n|Now|  ",
    "deepseek-llm": r"I|'|ll| pay| |1234|+=|5|    |日本|  |\n|Now|  ",
    "deepseek-coder": r"I|'|ll| pay| |1|2|3|4|+=|5|   | |日本|  |\n|Now|  ",
    "deepseek-v3": r"I|'ll| pay| |123|4|+=|5|    |日本|  \n|Now|  ",
}


@pytest.mark.parametrize("pre", SPLITS)
def test_text_is_split_as_the_pre_type_says(pre: str, tmp_path: Path) -> None:
    file = vocabulary(tmp_path / "a.gguf", add_tokenizer(LLAMA, pre))
    splitter = tokenizers.Tokenizer.from_str(bytes(tokenizer_json(file)).decode()).pre_tokenizer
    assert splitter is not None
    pieces = [SPLIT_TEXT[a:b] for _, (a, b) in splitter.pre_tokenize_str(SPLIT_TEXT)]
    assert "|".join(pieces).replace("\n", r"\n") == SPLITS[pre]


@pytest.mark.parametrize("pre", PRE_TYPES)
def test_no_pre_type_needs_a_process_of_its_own(pre: str, tmp_path: Path) -> None:
    file = vocabulary(tmp_path / "a.gguf", add_tokenizer(LLAMA, pre))
    assert inspect(tokenizer_json(file), "x").plain


VOCABULARY_FILES = (
    *("command-r", "deepseek-coder", "deepseek-llm", "falcon", "gpt-2", "llama-bpe", "llama-spm"),
    *("mpt", "phi-3", "qwen2", "qwen35", "refact", "starcoder"),
)


@pytest.mark.skipif(VOCABULARIES not in os.environ, reason=f"{VOCABULARIES} is not set")
@pytest.mark.parametrize("name", VOCABULARY_FILES)
def test_ids_equal_those_that_llama_cpp_keeps_for_its_tests(name: str) -> None:
    path = Path(os.environ[VOCABULARIES]) / f"ggml-vocab-{name}.gguf"
    file = GgufFile(path)
    plain = {"add_bos_token": False, "add_eos_token": False}
    tokenizer = Tokenizer(tokenizer_json(file), tokenizer_config(file) | plain)
    texts = path.with_suffix(".gguf.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = path.with_suffix(".gguf.out").read_text().split("\n")
    for text, line in zip(texts, lines, strict=True):
        assert tokenizer.encode(text) == [int(word) for word in line.split()], text


@pytest.mark.parametrize("merge", ["a zz", "b a", "a b c", "ab"])
def test_a_merge_that_makes_no_token_is_named(merge: str, tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_list(["a", "b", "c", "ab"])
        writer.add_token_merges(["a b", merge])

    message = rf"tokenizer\.ggml\.merges\[1\] is '{merge}'; expected two tokens whose union"
    for use in (tokenizer_of, lambda file: bytes(tokenizer_json(file))):
        with pytest.raises(FormatError, match=message):
            use(vocabulary(tmp_path / "a.gguf", add))


def test_a_token_may_stay_whole_whatever_the_merges_say(tmp_path: Path) -> None:
    def add(pre: str) -> Callable[[gguf.GGUFWriter], None]:
        def entries(writer: gguf.GGUFWriter) -> None:
            writer.add_tokenizer_model("gpt2")
            writer.add_tokenizer_pre(pre)
            writer.add_token_list(["<s>", "a", "b", "c", "ab", "abc"])
            writer.add_token_merges(["a b"])
            writer.add_bos_token_id(0)

        return entries

    ids = {
        pre: tokenizer_of(vocabulary(tmp_path / "a.gguf", add(pre))).encode("abc")
        for pre in ("llama-bpe", "tekken", "dbrx", "glm4")
    }
    assert ids == {"llama-bpe": [0, 5], "tekken": [0, 5], "dbrx": [4, 3], "glm4": [5]}


# --- SentencePiece


def sentencepiece(tmp_path: Path, **flags: bool) -> tuple[Tokenizer, dict[str, int], list[float]]:
    """Return the tokenizer of a file with a small SentencePiece vocabulary, and what is in it."""
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=600, show_progress=False)
    trained.train_from_iterator([TEXTS.read_text()[:50_000]], trainer)
    pieces = sorted(trained.get_vocab(), key=trained.get_vocab().__getitem__)
    pieces.sort(key=lambda piece: len(piece) == 1)  # as in Llama: the characters come last
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    scores = [0.0] * 259 + [-float(i) for i in range(len(pieces))]
    kinds = [2, 3, 3] + [6] * 256 + [1] * len(pieces)

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores(scores)
        writer.add_token_types(kinds)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        for name, value in flags.items():
            writer.add_bool(f"tokenizer.ggml.{name}", value)

    tokenizer = tokenizer_of(vocabulary(tmp_path / "s.gguf", add))
    return tokenizer, {token: i for i, token in enumerate(tokens)}, scores


def llama_cpp_ids(text: str, vocab: dict[str, int], scores: list[float]) -> list[int]:
    """Merge the neighbours of the best score, the leftmost first (llm_tokenizer_spm)."""
    parts = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [
            (-scores[vocab[a + b]], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in vocab
        ]
        if not pairs:
            break
        _, i = min(pairs)
        parts[i : i + 2] = ["".join(parts[i : i + 2])]
    ids = []
    for part in parts:
        found = [vocab[part]] if part in vocab else [3 + byte for byte in part.encode()]
        ids += found
    return ids


def test_sentencepiece_ids_equal_llama_cpps_algorithm(tmp_path: Path) -> None:
    tokenizer, vocab, scores = sentencepiece(tmp_path)
    lines = [line for line in TEXTS.read_text().splitlines() if line][:150]
    for text in (*lines, " two  spaces", "日本 é", "tab\tand\nline"):
        ids = tokenizer.encode(text)
        assert ids == [1, *llama_cpp_ids(text, vocab, scores)], text
        assert tokenizer.decode(ids[1:]) == text


def powers(letters: str, longest: int) -> list[str]:
    """Return tokens that are made of each other in as many ways as they are long."""
    return [letter * count for letter in letters for count in range(1, longest + 1)]


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        (powers("abcdefghijklmno", 256), "made of each other in more than 8 ways each"),
        (["x" * 512 + str(i) for i in range(9)], "513 characters in the longest; the limit is 512"),
        (powers("abcdefghijklmno", 512), "squares of their lengths; the limit is"),
    ],
    ids=["merges", "longest", "work"],
)  # fmt: skip
def test_a_vocabulary_that_grows_when_it_is_merged_is_refused(
    pieces: list[str], message: str, tmp_path: Path
) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(["<unk>", *pieces])
        writer.add_token_scores([0.0] * (len(pieces) + 1))
        writer.add_token_types([2] + [1] * len(pieces))

    file = vocabulary(tmp_path / "s.gguf", add)
    with (
        bounded_memory((64 << 20) + 2 * file.file.nbytes),
        pytest.raises(FormatError, match=message),
    ):
        tokenizer_json(file)


def test_sentencepiece_flags(tmp_path: Path) -> None:
    tokenizer, vocab, _ = sentencepiece(tmp_path, add_bos_token=False, add_space_prefix=False)
    ids = tokenizer.encode("x</s>")
    assert ids == [vocab["x"], 2] and tokenizer.decode(ids) == "x</s>"


def test_spaces_after_a_token_of_phi_3_belong_to_it(tmp_path: Path) -> None:
    def add(name: str) -> Callable[[gguf.GGUFWriter], None]:
        def entries(writer: gguf.GGUFWriter) -> None:
            writer.add_name(name)
            writer.add_tokenizer_model("llama")
            writer.add_token_list(["<unk>", "<s>", "</s>", "<|user|>", "a", "▁", "<0x0A>"])
            writer.add_token_scores([0.0] * 7)
            writer.add_token_types([2, 3, 4, 3, 1, 1, 6])
            writer.add_bool("tokenizer.ggml.add_space_prefix", False)
            writer.add_bool("tokenizer.ggml.add_bos_token", False)

        return entries

    ids = [
        tokenizer_of(vocabulary(tmp_path / "a.gguf", add(name))).encode(
            "<|user|>\n a<s> a</s> a<unk>"
        )
        for name in ("Phi 3 Mini Instruct, phi-3", "another")
    ]
    assert ids == [[3, 4, 1, 5, 4, 2, 4, 0], [3, 6, 5, 4, 1, 5, 4, 2, 5, 4, 0]]


# --- what else a vocabulary says


def test_the_ends_of_a_turn_are_known_by_name(tmp_path: Path) -> None:
    def ends(*tokens: str) -> list[str]:
        def add(writer: gguf.GGUFWriter) -> None:
            writer.add_tokenizer_model("gpt2")
            writer.add_token_list(["a", *tokens])
            writer.add_token_types([1] + [3] * len(tokens))

        return [tokens[index - 1] for index in stop_ids(vocabulary(tmp_path / "a.gguf", add))]

    assert ends("<|end|>", "<|user|>", "<end_of_turn>") == ["<|end|>", "<end_of_turn>"]
    deepseek = "<\uff5cend\u2581of\u2581sentence\uff5c>"
    assert ends(deepseek, "</s>") == [deepseek, "</s>"]
    harmony = ("<|return|>", "<|call|>", "<|end|>", "<|start|>")
    assert ends(*harmony) == ["<|return|>", "<|call|>"]
    assert ends("<|user|>") == []


def test_named_chat_templates_stand_beside_the_default_one(tmp_path: Path) -> None:
    templates = [
        {"name": "default", "template": "{{ messages[0].content }}!"},
        {"name": "tool_use", "template": "tools"},
    ]

    def add(writer: gguf.GGUFWriter) -> None:
        add_tokenizer(LLAMA, "qwen2")(writer)
        writer.kv_data[0].pop("tokenizer.chat_template")
        writer.add_chat_template(templates)

    file = vocabulary(tmp_path / "a.gguf", add)
    assert tokenizer_config(file)["chat_template"] == templates
    message = {"role": "user", "content": "hi"}
    assert tokenizer_of(file).apply_chat_template([message]) == "hi!"


def test_unknown_vocabularies_are_named(tmp_path: Path) -> None:
    def opened(**values: str) -> GgufFile:
        base = add_tokenizer(LLAMA, values.get("pre", "qwen2"))

        def add(writer: gguf.GGUFWriter) -> None:
            base(writer)
            if model := values.get("model"):
                writer.kv_data[0]["tokenizer.ggml.model"].value = model
            if values.get("pre") == "":
                writer.kv_data[0].pop("tokenizer.ggml.pre", None)

        return vocabulary(tmp_path / "a.gguf", add)

    for values, message in (
        ({"pre": "kimi-k2"}, "tokenizer.ggml.pre is 'kimi-k2'; Clocher knows default, gpt-2,"),
        ({"pre": ""}, "tokenizer.ggml.pre is missing"),
        ({"model": "bert"}, "tokenizer.ggml.model is 'bert'; Clocher knows gpt2, llama"),
    ):
        with pytest.raises(UnsupportedModel, match=re.escape(message)):
            tokenizer_json(opened(**values))
