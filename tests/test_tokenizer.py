"""Text to ids and back, and streams that never show half a character."""

import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, processors

from clocher_kernels.errors import FormatError, ModelNotFound, UsageError
from clocher_runtime.checkpoints.locate import embedded_model
from clocher_runtime.text.text_process import PROCESS
from clocher_runtime.text.tokenizer import TextStream, Tokenizer

MODEL = embedded_model()
CONFIG = json.loads((MODEL / "tokenizer_config.json").read_text(encoding="utf-8"))
VALID = (Path(__file__).parent / "data" / "valid.txt").read_text(encoding="utf-8")[:20_000]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(MODEL / "tokenizer.json", CONFIG)


def test_equals_transformers(tokenizer):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(MODEL)
    messages = [{"role": "system", "content": "é€😀"}, {"role": "user", "content": "a\n b"}]
    for text in (VALID, "", "é€😀\r\n\t\0", "<|start|>x<|end|>", " " * 50):
        ids = tokenizer.encode(text)
        assert ids == theirs.encode(text)
        assert tokenizer.decode(ids) == theirs.decode(ids) == text
        skipped = theirs.decode(ids, skip_special_tokens=True)
        assert tokenizer.decode(ids, skip_special=True) == skipped
    assert tokenizer.vocab_size == len(theirs)
    for prompt in (True, False):
        expected = theirs.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=prompt
        )
        got = tokenizer.apply_chat_template(messages, add_generation_prompt=prompt)
        assert got == expected


def test_templates_get_documents_as_transformers_passes_them():
    config = CONFIG | {"chat_template": "{{ documents is none }} {{ tools is none }}"}
    reads = Tokenizer(MODEL / "tokenizer.json", config)
    assert reads.apply_chat_template([{"role": "user", "content": "x"}]) == "True True"
    config = CONFIG | {"chat_template": "{{ documents[0].text }}"}
    reads = Tokenizer(MODEL / "tokenizer.json", config)
    given = {"documents": [{"title": "t", "text": "y"}]}
    assert reads.apply_chat_template([], variables=given) == "y"


def test_a_template_is_compiled_once(monkeypatch):
    asked, ask = [], PROCESS.ask

    def noted(operation, *given, **more):
        asked.append(operation)
        return ask(operation, *given, **more)

    monkeypatch.setattr(PROCESS, "ask", noted)
    named = [{"name": "default", "template": "once {{ messages[0].content }}"}]
    for _ in range(2):
        reads = Tokenizer(MODEL / "tokenizer.json", CONFIG | {"chat_template": named})
        assert reads.apply_chat_template([{"role": "user", "content": "x"}]) == "once x"
    assert asked == ["compile_template", "render", "render"]


def byte_ids(tokenizer):
    """The ids of the 256 single bytes: any byte string is a sequence of them."""
    alphabet = RawTokenizer.from_file(str(MODEL / "tokenizer.json")).get_vocab()
    return [i for token, i in alphabet.items() if len(token) == 1]


@settings(max_examples=100)
@given(st.lists(st.integers(0, 4095), max_size=40))
def test_pieces_joined_are_the_text_of_random_ids(tokenizer, ids):
    stream = tokenizer.stream()
    pieces = [stream.push(i) for i in ids] + [stream.flush()]
    assert "".join(pieces) == tokenizer.decode(ids)


def test_pieces_joined_are_the_text_of_random_bytes(tokenizer):
    singles = byte_ids(tokenizer)
    draw = random.Random(0)
    leads = [i for i in singles if tokenizer.decode([i]) == "\N{REPLACEMENT CHARACTER}"]
    for number in range(1000):
        ids = draw.choices(leads if number % 2 else singles, k=draw.randrange(12 + number % 30))
        stream = tokenizer.stream()
        pieces = [stream.push(i) for i in ids] + [stream.flush()]
        assert "".join(pieces) == tokenizer.decode(ids)


@pytest.mark.parametrize("count", [1, 2, 3], ids=["continuation", "two", "three"])
def test_bytes_that_are_never_text_are_shown_and_cost_the_same_each(tokenizer, count):
    """Also where an id has no text at all, as those beyond the vocabulary."""
    alphabet = RawTokenizer.from_file(str(MODEL / "tokenizer.json")).get_vocab()
    codes = [b"\x80", b"\xe2\x82", b"\xf0\x9f\x98"][count - 1]
    characters = {bytes([b]): c for b, c in byte_characters().items()}
    ids = [alphabet[characters[bytes([code])]] for code in codes] * 3000
    decoded = []

    def decode(part):
        decoded.append(len(part))
        return tokenizer.decode(part)

    stream = TextStream(decode)
    pieces = [stream.push(i) for i in ids]
    assert "".join(pieces) + stream.flush() == tokenizer.decode(ids)
    silent = max(len(run) for run in "".join("x" if p else " " for p in pieces).split("x"))
    assert silent <= 6
    assert max(decoded) <= 10
    assert sum(decoded) <= 40 * len(ids)


def test_ids_without_text_are_not_kept(tokenizer):
    decoded = []

    def decode(part):
        decoded.append(len(part))
        return tokenizer.decode(part)

    stream = TextStream(decode)
    nothing = tokenizer.vocab_size + 7
    assert [stream.push(nothing) for _ in range(1000)] == [""] * 1000
    assert max(decoded) <= 5
    euro = tokenizer.encode("€")
    assert "".join(stream.push(i) for i in euro) == "€"


def byte_characters():
    """Byte -> the character that stands for it in a byte-level vocabulary."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [b for b in range(256) if b not in kept]
    return {b: chr(b) for b in kept} | {b: chr(256 + n) for n, b in enumerate(moved)}


def test_bytes_of_a_sentencepiece_vocabulary(tmp_path):
    vocab = {"<0xF0>": 0, "<0x9F>": 1, "<0x98>": 2, "<0x80>": 3, "?": 4}
    raw = RawTokenizer(models.WordLevel(vocab, "?"))
    raw.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    raw.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path / "tokenizer.json", {})
    stream = tokenizer.stream()
    assert [stream.push(i) for i in (0, 1, 2, 3) * 3] == ["", "", "", "😀"] * 3
    assert [stream.push(i) for i in (3,) * 40].count("") <= 36


@settings(max_examples=100)
@given(st.text(), st.lists(st.integers(0, 4095), max_size=9))
def test_bytes_of_tokens_joined_are_the_text(tokenizer, text, ids):
    found = b"".join(map(tokenizer.token_bytes, tokenizer.encode(text)))
    assert found == text.encode()
    raw = b"".join(map(tokenizer.token_bytes, ids))
    assert raw.decode("utf-8", "replace") == tokenizer.decode(ids)


def test_tokens_by_name(tokenizer):
    ends = tokenizer.token_id("<|end|>")
    assert tokenizer.encode("<|end|>") == [ends]
    assert tokenizer.token_bytes(ends) == b"<|end|>"
    assert tokenizer.token_id("<|nothing|>") is None
    assert [tokenizer.token_bytes(i) for i in (-1, tokenizer.vocab_size + 9, 1 << 40)] == [b""] * 3


def test_bytes_of_tokens_that_are_not_byte_level(tmp_path):
    vocab = {"<0xF0>": 0, "<0x0A>": 1, "▁é": 2, "Ġ": 3, "?": 4}
    raw = RawTokenizer(models.WordLevel(vocab, "?"))
    raw.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    raw.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path / "tokenizer.json", {})
    found = [tokenizer.token_bytes(i) for i in range(4)]
    assert found == [b"\xf0", b"\n", " é".encode(), "Ġ".encode()]


def test_stream_never_shows_half_a_character(tokenizer):
    text = "naïve 😀 € end"
    stream = tokenizer.stream()
    pieces = [stream.push(i) for i in tokenizer.encode(text)]
    assert "".join(pieces) == text
    assert stream.flush() == ""
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_stream_shows_an_unfinished_character_at_the_end(tokenizer):
    ids = tokenizer.encode("😀")
    stream = tokenizer.stream()
    assert [stream.push(i) for i in ids[:-1]] == [""] * (len(ids) - 1)
    assert stream.flush() == "\N{REPLACEMENT CHARACTER}"
    assert stream.flush() == ""


def metaspace_tokenizer(path, template=None):
    """A SentencePiece-like tokenizer: its decoder drops the space before the first word."""
    raw = RawTokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "▁a": 2, "▁b": 3, "?": 4}, "?"))
    raw.decoder = decoders.Metaspace()
    if template is not None:
        raw.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    raw.save(str(path))
    return path


def test_stream_keeps_the_space_between_words(tmp_path):
    tokenizer = Tokenizer(metaspace_tokenizer(tmp_path / "tokenizer.json"), {})
    stream = tokenizer.stream()
    assert [stream.push(i) for i in (2, 3, 2)] == ["a", " b", " a"]
    assert tokenizer.decode([2, 3, 2]) == "a b a"


BOS_EOS = {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}}


@pytest.mark.parametrize(
    ("template", "config", "ids"),
    [
        (None, {}, [2]),
        (None, BOS_EOS, [2]),
        ("<s> $A", {}, [0, 2]),
        ("<s> $A", BOS_EOS | {"add_bos_token": False}, [2]),
        (None, BOS_EOS | {"add_bos_token": True}, [0, 2]),
        ("<s> $A", BOS_EOS | {"add_bos_token": True}, [0, 2]),
        ("<s> $A", BOS_EOS | {"add_eos_token": True}, [2, 1]),
        (None, {"add_bos_token": True}, [2]),
    ],
    ids=[
        "nothing",
        "tokens-known",
        "by-file",
        "config-says-no",
        "config-says-yes",
        "not-twice",
        "config-says-eos",
        "no-such-token",
    ],
)
def test_configuration_decides_what_surrounds_a_text(tmp_path, template, config, ids):
    tokenizer = Tokenizer(metaspace_tokenizer(tmp_path / "tokenizer.json", template), config)
    assert tokenizer.encode("▁a") == ids
    assert tokenizer.encode("▁a", special=False) == [2]


def test_truncation_and_padding_of_the_file_are_not_applied(tmp_path):
    raw = RawTokenizer.from_file(str(MODEL / "tokenizer.json"))
    raw.enable_truncation(3)
    raw.enable_padding(length=10)
    raw.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path / "tokenizer.json", CONFIG)
    assert len(tokenizer.encode("a" * 2)) < 10
    assert len(tokenizer.encode("one two three four five six")) > 3


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"{}", b"[]", b"\xff\xfe", b'{"model": {"type": "BPE"}}', b"[" * 100_000],
    ids=["empty", "cut", "object", "list", "not-utf8", "partial", "deep"],
)
def test_bad_file_is_a_format_error(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=r"tokenizer\.json: not a tokenizer"):
        Tokenizer(path, {})


def test_damaged_files_are_refused_or_load_but_never_crash(tmp_path):
    whole = metaspace_tokenizer(tmp_path / "whole.json", "<s> $A").read_bytes()
    path = tmp_path / "tokenizer.json"
    draw = random.Random(0)
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(draw.randrange(1, 4)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        path.write_bytes(data)
        try:
            Tokenizer(path, BOS_EOS)
        except FormatError:
            continue


def test_missing_file_is_not_found(tmp_path):
    with pytest.raises(ModelNotFound):
        Tokenizer(tmp_path / "tokenizer.json", {})


def test_special_token_of_a_wrong_type_is_a_format_error():
    with pytest.raises(FormatError, match="bos_token is 7"):
        Tokenizer(MODEL / "tokenizer.json", {"bos_token": 7})


@pytest.mark.parametrize("template", [7, [{"name": "x", "template": "y"}]])
def test_a_template_that_is_no_text_is_a_format_error(template):
    with pytest.raises(FormatError, match="expected text, or a list with one named 'default'"):
        _ = Tokenizer(MODEL / "tokenizer.json", {"chat_template": template}).chat_template


def test_text_that_is_not_unicode_is_a_usage_error(tokenizer):
    with pytest.raises(UsageError, match="not valid Unicode"):
        tokenizer.encode("\udcff")


def test_model_without_a_template_says_so():
    with pytest.raises(UsageError, match="no chat template"):
        Tokenizer(MODEL / "tokenizer.json", {}).apply_chat_template([])
