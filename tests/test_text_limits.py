"""Tokenizers and texts made to take long or much memory: refused or ended, with a typed error."""

import copy
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fuzz import text_seeds
from tokenizers import Regex, pre_tokenizers

from clocher_kernels.errors import FormatError, OutOfMemory, UsageError
from clocher_runtime.checkpoints.locate import embedded_model
from clocher_runtime.command.loading import StubTokenizer
from clocher_runtime.models.split_patterns import KNOWN
from clocher_runtime.text import Refused, text_process, tokenizer_library
from clocher_runtime.text.prompts import Line, Preparation
from clocher_runtime.text.text_process import PROCESS
from clocher_runtime.text.tokenizer import LONG_TEXT_CHARS, MAX_TEXT_CHARS, Tokenizer
from clocher_runtime.text.tokenizer_library import (
    MAX_ADDED,
    MAX_FILE_BYTES,
    LibraryTokenizer,
    TokenizerApart,
    inspect,
)

ROOT = Path(__file__).parents[1]
LLAMA = ROOT / "tests" / "data" / "clocher-tiny-llama"
SOUND = json.loads((embedded_model() / "tokenizer.json").read_text(encoding="utf-8"))
SMALL = [json.loads(seed["tokenizer.json"]) for seed in text_seeds.tokenizers()]


def tokenizer(document) -> Tokenizer:
    return Tokenizer(json.dumps(document).encode(), {})


def changed(document=SMALL[1], **parts):
    return {**copy.deepcopy(document), **parts}


def sequence(within, steps):
    return {"type": "Sequence", within: steps}


def is_plain(document) -> bool:
    return inspect(json.dumps(document).encode(), "x").plain


@pytest.fixture
def strict(monkeypatch):
    """Little time and memory for what runs apart, so that these tests do not wait for it."""
    monkeypatch.setattr(tokenizer_library, "BASE_SECONDS", 0.5)
    monkeypatch.setattr(tokenizer_library, "BASE_BYTES", 128 << 20)


# What runs where


@pytest.mark.parametrize("folder", [embedded_model(), LLAMA, LLAMA.parent / "clocher-tiny-bitnet"])
def test_the_models_here_are_tokenised_without_another_process(folder):
    PROCESS.close()
    made = Tokenizer(folder / "tokenizer.json", {})
    assert made.decode(made.encode("text " * 1000)) == "text " * 1000
    assert PROCESS._process is None


@pytest.mark.parametrize("index", range(len(SMALL)))
def test_another_process_gives_the_same_ids_and_text(index):
    text = json.dumps(SMALL[index])
    here, apart = LibraryTokenizer(text), TokenizerApart(text)
    assert here.vocab_size == apart.vocab_size
    assert here.token_to_id("ab") == apart.token_to_id("ab")
    for token in (-1, 0, 3, 1 << 40):
        assert here.id_to_token(token) == apart.id_to_token(token)
    for special in (True, False):
        for given in ("", "a", "ab ba \n é😀 <s> 12", text_seeds.TEXT):
            ids = here.encode(given, special)
            assert apart.encode(given, special) == ids
            assert apart.decode(ids, special) == here.decode(ids, special)


def test_a_long_text_gets_the_ids_of_a_short_one():
    made = Tokenizer(LLAMA / "tokenizer.json", {})
    line = "a line of text, and é.\n"
    long = line * (LONG_TEXT_CHARS // len(line) + 1)
    assert made.encode(long, special=False) == made.encode(line, special=False) * (
        LONG_TEXT_CHARS // len(line) + 1
    )
    assert PROCESS._process is not None


def test_two_tokenizers_apart_do_not_mix():
    one, two = (TokenizerApart(json.dumps(SMALL[i])) for i in (3, 5))
    here = [LibraryTokenizer(json.dumps(SMALL[i])).encode("ab a", True) for i in (3, 5)]
    for _ in range(3):
        assert [one.encode("ab a", True), two.encode("ab a", True)] == here


@pytest.mark.parametrize("pattern", sorted(KNOWN))
@pytest.mark.one_in(3)
def test_time_of_a_known_expression_grows_with_the_text(pattern):
    """Ten times the text may take thirty times as long; a square would take a hundred."""
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    atoms = (" ", "\n", "a", "A", "1", "'", "\u0301", "日", "!", "\r", "ǅ")

    def seconds(size):
        worst = 0.0
        for text in (one * size + two for one in atoms for two in ("", " ", "x", "\n")):
            begun = time.process_time()
            split.pre_tokenize_str(text)
            worst = max(worst, time.process_time() - begun)
        return worst

    seconds(100)
    # The other work of this machine is in some of the figures; least is nearest to the truth.
    short, long = (min(seconds(size) for _ in range(2)) for size in (1_000, 10_000))
    assert long < 30 * max(short, 1e-3)


# Texts


def test_a_text_that_cannot_fit_is_refused_before_work_on_it():
    made = Tokenizer(LLAMA / "tokenizer.json", {})
    begun = time.process_time()
    with pytest.raises(UsageError, match=r"12582912 characters are too many: .* holds 512 tokens"):
        made.encode("A" * (12 << 20), room=512)
    assert time.process_time() - begun < 0.5
    with pytest.raises(UsageError, match=f"at most {MAX_TEXT_CHARS} are taken; shorten"):
        made.encode("A" * (MAX_TEXT_CHARS + 1))


def test_a_prompt_of_the_longest_tokens_is_not_refused():
    found = inspect((LLAMA / "tokenizer.json").read_bytes(), "x")
    longest = max(SOUND["model"]["vocab"], key=len)
    made = Tokenizer(LLAMA / "tokenizer.json", {})
    assert len(longest) == found.longest
    text = made.decode([SOUND["model"]["vocab"][longest]]) * 20
    assert made.encode(text, special=False, room=20)


def test_preparation_passes_the_context_on():
    made = Tokenizer(LLAMA / "tokenizer.json", {})

    class Source:
        jsonl = False

        def where(self, line):
            return f"line {line.number}"

    prepare = Preparation(Source(), made.encode, lambda ids: None, 8)
    assert prepare(Line(1, "short")).error is None
    found = prepare(Line(2, "long " * 200))
    assert found.error.startswith("line 2: 1000 characters are too many") and found.ids == ()


def test_the_stub_refuses_what_cannot_fit():
    assert StubTokenizer().encode("abc", room=3) == [97, 98, 99]
    with pytest.raises(UsageError, match="4 characters; at most 3 are taken"):
        StubTokenizer().encode("abcd", room=3)


def test_spaces_that_the_library_panics_at_are_a_usage_error(capfd):
    """Its engine gives up after ten million steps back, which the library does not expect."""
    document = json.loads((LLAMA / "tokenizer.json").read_bytes())
    document["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"\s*\s*[\r\n]+"
    with pytest.raises(UsageError, match=r"cannot be tokenised: .*retry-limit-in-match over"):
        tokenizer(document).encode(" " * 100_000 + "x\n")
    assert "panicked" not in capfd.readouterr().err
    # The shipped expression does, too, at 12 MB of spaces, which are refused; so many are not.
    made = Tokenizer(LLAMA / "tokenizer.json", {})
    assert made.decode(made.encode(" " * (MAX_TEXT_CHARS // 16))) == " " * (MAX_TEXT_CHARS // 16)


def test_a_panic_in_this_process_is_typed_too(capfd):
    panicking = LibraryTokenizer(json.dumps(changed(pre_tokenizer=FIXED)))
    with pytest.raises(Refused, match="chunk size must be non-zero"):
        panicking.encode("ab", True)
    assert "panicked" in capfd.readouterr().err  # so no such file is loaded in this process
    assert not is_plain(changed(pre_tokenizer=FIXED))


def test_a_run_with_far_too_much_on_standard_input_ends_with_a_line():
    text = b" " * (12 << 20)
    done = subprocess.run(
        [sys.executable, "-m", "clocher_runtime.cli", "--model-dir", str(LLAMA), "--prompt", "-"],
        input=text,
        capture_output=True,
        timeout=500,
        check=False,
    )
    line = json.loads(done.stdout)
    assert (done.returncode, line["type"]) == (2, "UsageError"), done.stderr[-2000:]
    assert "characters are too many" in line["message"]
    assert b"Traceback" not in done.stderr and b"panicked" not in done.stderr


INTERRUPTED = """
import signal, sys, threading, time
from pathlib import Path
from clocher_runtime.text.text_process import PROCESS
from clocher_runtime.text.tokenizer import Tokenizer

signal.signal(signal.SIGINT, signal.default_int_handler)
made = Tokenizer(Path(sys.argv[1]), {})
plain = made.encode("a")
main = threading.main_thread().ident
threading.Timer(1, signal.pthread_kill, (main, signal.SIGINT)).start()
begun = time.monotonic()
try:
    made.encode("A" * int(sys.argv[2]))
except KeyboardInterrupt:
    assert time.monotonic() - begun < 8
    assert PROCESS._process is None
    assert made.encode("a") == plain
    print("interrupted")
"""


def test_tokenising_a_long_text_can_be_interrupted():
    """In a process of its own: a signal that comes too late would end the one of the tests."""
    command = [sys.executable, "-c", INTERRUPTED, LLAMA / "tokenizer.json", str(MAX_TEXT_CHARS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout == "interrupted\n", done.stderr


# Tokenizers that are no files of models

GROWING = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa" * 8}
SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
TEMPLATE = SMALL[1]["post_processor"]
FIXED = {"type": "FixedLength", "length": 0}


@pytest.mark.parametrize(
    "document",
    [
        changed(normalizer=sequence("normalizers", [GROWING] * 9)),
        changed(decoder=sequence("decoders", [GROWING] * 9)),
        changed(pre_tokenizer={**SPLIT, "pattern": {"Regex": "(a{900}){900}|(b{900}){900}"}}),
        changed(pre_tokenizer=FIXED),
        changed(pre_tokenizer={**SPLIT, "pattern": {"Regex": r"(\w*)*!"}}),
        changed(normalizer={"type": "Prepend", "prepend": "a" * 10_000_000}),
        changed(SMALL[4]),
        changed(model={**SMALL[1]["model"], "continuing_subword_prefix": "x" * 1_000_000}),
        changed(post_processor={**TEMPLATE, "special_tokens": {}}),
        changed(decoder={"type": "Strip", "content": " ", "start": 0, "stop": 1}),
        changed(model={**SMALL[1]["model"], "merges": [["▁", "▁ab"]]}),
        changed(post_processor={**TEMPLATE, "single": TEMPLATE["pair"]}),
    ],
    ids=["chain", "decoders", "compile", "fixed", "backtracks", "prepend", "charsmap", "prefix",
         "template", "strip", "merge", "pair"],
)  # fmt: skip
def test_hostile_tokenizers_run_apart_and_end(document, strict, capfd):
    assert not is_plain(document)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begun = time.monotonic()
    try:
        made = tokenizer(document)
        ids = made.encode("a" * 100 + "aaa \n" * 30)
        made.decode(ids)
    except (FormatError, UsageError, OutOfMemory) as error:
        assert len(str(error)) < 400
    assert time.monotonic() - begun < 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10
    assert "panicked" not in capfd.readouterr().err


def test_a_chain_that_makes_gigabytes_is_refused(strict):
    document = changed(normalizer=sequence("normalizers", [GROWING] * 9))
    with pytest.raises(OutOfMemory, match="cannot be tokenised: it needs too much memory"):
        tokenizer(document).encode("a")


def test_an_expression_that_goes_on_for_ever_is_ended(strict):
    document = changed(pre_tokenizer={**SPLIT, "pattern": {"Regex": r"\w*\w*\w*[!?]+"}})
    made = tokenizer(document)
    with pytest.raises(UsageError, match=r"cannot be tokenised: it takes too long"):
        made.encode(("a" * 250 + " ") * 50 + "!")
    assert tokenizer(changed(SMALL[3])).encode("a")


def test_a_text_that_tokens_cannot_have_is_no_text_of_theirs():
    grow = {**GROWING, "content": "b" * 5000}
    made = tokenizer(changed(decoder=sequence("decoders", [grow])))
    with pytest.raises(UsageError, match="1 tokens with a text of 5000 characters"):
        made.decode([0])


def added(count, text="<{}>"):
    token = SMALL[1]["added_tokens"][0]
    return [{**token, "id": 7 + i, "content": text.format(i)} for i in range(count)]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (changed(added_tokens=added(MAX_ADDED + 1)), "65537 added tokens; the limit is 65536"),
        (changed(added_tokens=added(300, "x" * 4000 + "{}")), "characters of added tokens"),
        (changed(added_tokens=added(1, "x" * 5000)), "5000 characters in a token"),
        (changed(model={**SMALL[1]["model"], "vocab": {"x" * 5000: 0}}), "5000 characters in"),
        (changed(model={"type": "?", "vocab": [["x" * 5000, 1]]}), "5000 characters in a token"),
    ],
    ids=["count", "characters", "added", "token", "unigram"],
)  # fmt: skip
def test_a_file_beyond_the_limits_is_refused_before_it_is_built(document, message):
    with pytest.raises(FormatError, match=message):
        tokenizer(document)


def test_a_key_that_is_there_twice_is_refused():
    text = json.dumps(SMALL[1]).replace('"decoder":', '"pre_tokenizer": null, "decoder":', 1)
    with pytest.raises(FormatError, match="appears twice"):
        Tokenizer(text.encode(), {})


def test_a_large_file_is_counted_before_it_is_parsed():
    with pytest.raises(FormatError, match="of memory"):
        Tokenizer(b'{"model": [' + b"[]," * (1 << 20) + b"[]]}", {})
    with pytest.raises(FormatError, match="the limit for this file"):
        Tokenizer(b" " * (MAX_FILE_BYTES + 1), {})


def test_the_message_of_the_library_is_cut():
    text = json.dumps(changed(normalizer={"type": "x" * 500_000}))
    with pytest.raises(FormatError) as caught:
        Tokenizer(text.encode(), {})
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("ids", [[-1], [1 << 40], ["a"], [None]], ids=str)
@pytest.mark.parametrize("index", [0, 4], ids=["here", "apart"])
def test_what_is_no_token_id_has_no_text(index, ids):
    with pytest.raises(UsageError, match="the token ids have no text"):
        tokenizer(SMALL[index]).decode(ids)


def test_a_vocabulary_of_a_large_model_is_taken():
    vocab = {f"t{i}é": i for i in range(262_144)}
    merges = [["t", str(i)] for i in range(1000)]
    document = changed(model={**SMALL[0]["model"], "vocab": {**vocab, "t": 262_144}, "merges": []})
    assert merges and inspect(json.dumps(document, ensure_ascii=False).encode(), "x").plain


# The process


def test_the_process_ends_with_this_one(tmp_path):
    code = (
        "from clocher_runtime.text.text_process import PROCESS\n"
        "from clocher_runtime.text.chat_template import ChatTemplate\n"
        "ChatTemplate('x').render()\n"
        "print(PROCESS._process.pid)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    end = time.monotonic() + 10
    while Path(f"/proc/{int(done.stdout)}").exists():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_process_that_died_is_started_again():
    made = TokenizerApart(json.dumps(SMALL[1]))
    ids = made.encode("ab", True)
    os.kill(PROCESS._process.pid, signal.SIGKILL)
    with pytest.raises(Refused):
        made.encode("ab", True)
    assert made.encode("ab", True) == ids


def test_a_process_that_says_nothing_is_not_waited_for(monkeypatch):
    made = TokenizerApart(json.dumps(SMALL[1]))
    monkeypatch.setattr(text_process, "BASE_PATIENCE", 0.5)
    monkeypatch.setattr(text_process, "PATIENCE", 0.0)
    os.kill(PROCESS._process.pid, signal.SIGSTOP)
    with pytest.raises(Refused, match=r"no answer within 0\.5 s"):
        made.encode("ab", True)
    assert PROCESS._process is None


def test_a_defect_of_the_process_is_no_fault_of_the_user():
    with pytest.raises(RuntimeError, match="KeyError"):
        PROCESS.ask("no such operation", 1.0, 1 << 20)


def test_after_a_fork_each_has_a_process_of_its_own():
    made = TokenizerApart(json.dumps(SMALL[1]))
    ids = made.encode("ab", True)
    child = os.fork()
    if child == 0:
        os._exit(0 if made.encode("ab", True) == ids else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert made.encode("ab", True) == ids
