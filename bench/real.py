r"""Published files: what an engine's arithmetic costs on real text, beside llama.cpp.

\b
    python -m bench real --gguf FILE --text TEXT --turns JSONL --llama DIR --keep PARTS --json OUT

TEXT and the conversations of JSONL ({"messages": [...]} a line, by the model's template) are cut
into windows of 512 tokens, of which the last 255 are scored, as llama-perplexity does. The
reference is Clocher in fp32, the exact model of the file, whose logits are written as
llama-perplexity's --kl-divergence-base. transformers in fp32, Clocher's default and the
llama-perplexity in DIR are compared with it, on the same ids. PARTS keeps what is done, so that
--seconds may end a run early and the same command goes on. Errors are standard errors.
"""

import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count as naturals
from math import exp, sqrt
from pathlib import Path
from typing import Any

import click
import numpy as np

from bench.experiment import FILE, TEAM, NotMeasured, Row, experiment
from bench.record import SCHEMA, append_row, read_rows
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.command.loading import load
from clocher_runtime.config.engine import EngineConfig
from clocher_runtime.disk.files import read_text
from clocher_runtime.disk.strict_json import parse_object
from clocher_runtime.text.tokenizer import Tokenizer

WINDOW, FIRST, WINDOWS = 512, 256, 4
SCORED = WINDOW - 1 - FIRST
EXACT, DEFAULT, LLAMA, TRANSFORMERS = "Clocher fp32", "Clocher", "llama.cpp", "transformers fp32"
ENGINES = (TRANSFORMERS, EXACT, DEFAULT, LLAMA)
_LEAST = -16.0
"""Probabilities below exp of this do not count, and `--kl-divergence-base` has none."""
_AT_ONCE = 64
_SAID = {
    "ppl": r"Mean PPL\(Q\) +: +(\S+)",
    "ppl_base": r"Mean PPL\(base\) +: +(\S+)",
    "kld": r"Mean +KLD: +(\S+)",
    "kld_error": r"Mean +KLD: +\S+ ± +(\S+)",
    "same": r"Same top p: +(\S+)",
}
Windows = Sequence[list[int]]
Logits = Callable[[Sequence[int]], np.ndarray]
Sums = dict[str, float]


def windows_of(
    tokenizer: Tokenizer, text: Path | None, turns: Path | None, count: int
) -> dict[str, Windows]:
    """Return windows of a text, and of conversations if the model has a template."""
    chars = 8 * WINDOW * count
    first = [b for b in tokenizer.encode("a")[:1] if b == tokenizer.bos_id]
    ids = {"text": tokenizer.encode(read_text(text)[:chars], special=False)} if text else {}
    if turns and tokenizer.chat_template:
        chats = (
            parse_object(line.encode(), str(turns))
            for line in read_text(turns)[:chars].splitlines()[:-1]
        )
        said = (tokenizer.apply_chat_template(chat["messages"]) for chat in chats)
        ids["turns"] = [id for chat in said for id in tokenizer.encode(chat, special=False)]
    width = WINDOW - len(first)
    return {
        name: [first + of[at : at + width] for at in range(0, len(of) - width + 1, width)][:count]
        for name, of in ids.items()
    }


def write_base(path: Path, windows: Windows, logits: Logits) -> Sums:
    """Write logits as llama-perplexity's --kl-divergence-base; return their sums."""
    sums: Sums = {}
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        for number, ids in enumerate(windows):
            given = logits(ids)[FIRST : WINDOW - 1]
            if not number:
                sizes = np.array([WINDOW, given.shape[1], len(windows)], np.int32)
                file.write(b"_logits_" + sizes.tobytes() + np.array(windows, np.int32).tobytes())
            rows = np.zeros((SCORED, _width(given.shape[1])), np.uint16)
            top = given.max(axis=1, keepdims=True)
            least = np.maximum(given.min(axis=1, keepdims=True), top + np.float32(_LEAST))
            step = (top - least) / np.float32(65535)
            rows[:, 4 : 4 + given.shape[1]] = np.rint(np.maximum(given - least, 0) / step)
            ends = [step, least - top - np.log(np.exp(given - top).sum(1, np.float64))[:, None]]
            rows[:, :4] = np.concatenate(ends, axis=1).astype(np.float32).view(np.uint16)
            file.write(rows.tobytes())
            _add(sums, judge(rows, given, np.array(ids[FIRST + 1 :])))
    part.rename(path)
    return sums


def judge(base: np.ndarray, logits: np.ndarray, ids: np.ndarray) -> Sums:
    """Return the sums of llama-perplexity over tokens `ids` [T], of logits [T, V] fp32.

    `base` [T, _width(V)] uint16: rows of a --kl-divergence-base.
    """
    sums: Sums = {}
    for at in range(0, len(ids), _AT_ONCE):
        here, wanted = logits[at : at + _AT_ONCE], ids[at : at + _AT_ONCE, None]
        rows = base[at : at + _AT_ONCE]
        scale, least = np.ascontiguousarray(rows[:, :4]).view(np.float32).T[..., None]
        own = rows[:, 4 : 4 + here.shape[1]] * scale + least
        top = here.max(axis=1, keepdims=True)
        log = here - top
        log -= np.log(np.exp(log).sum(axis=1, dtype=np.float64, keepdims=True)).astype(np.float32)
        kld = (np.where(own > _LEAST, np.exp(own), 0) * (own - log)).sum(axis=1, dtype=np.float64)
        _add(
            sums,
            {
                "tokens": len(kld),
                "kld": kld.sum(),
                "kld2": (kld * kld).sum(),
                "same": np.count_nonzero(own.argmax(axis=1) == here.argmax(axis=1)),
                "nll": -np.take_along_axis(log, wanted, 1).sum(dtype=np.float64),
                "nll_base": -np.take_along_axis(own, wanted, 1).sum(dtype=np.float64),
            },
        )
    return {name: float(value) for name, value in sums.items()}


def compared(path: Path, windows: Windows, logits: Logits) -> Sums:
    """Return the sums of an engine's logits beside a base."""
    sums: Sums = {}
    start = 20 + 4 * WINDOW * len(windows)
    for number, ids in enumerate(windows):
        given = logits(ids)[FIRST : WINDOW - 1]
        shape = len(windows), SCORED, _width(given.shape[1])
        base = np.memmap(path, np.uint16, "r", start, shape)[number]
        _add(sums, judge(base, given, np.array(ids[FIRST + 1 :])))
    return sums


def by_llama(program: Path, gguf: Path, base: Path, tokens: int, threads: int) -> Sums:
    """Return the sums that llama-perplexity prints."""
    command = [program, "-m", gguf, "--kl-divergence-base", base, "--kl-divergence"]
    command += ["-c", str(WINDOW), "-b", str(WINDOW), "-t", str(threads)]
    run = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    found = {name: re.search(shown, run.stdout) for name, shown in _SAID.items()}
    if run.returncode or not all(found.values()):
        raise NotMeasured(f"{program}: {(run.stderr.splitlines() or ['printed nothing'])[-1]}")
    said = {name: float(match[1]) for name, match in found.items() if match}
    return {
        "tokens": tokens,
        "kld": tokens * said["kld"],
        "kld2": tokens * (said["kld_error"] ** 2 * (tokens - 1) + said["kld"] ** 2),
        "same": tokens * said["same"] / 100,
        "nll": tokens * np.log(said["ppl"]),
        "nll_base": tokens * np.log(said["ppl_base"]),
    }


def summary(sums: Sums) -> Row:
    """Return the fields of a row."""
    n = sums["tokens"]
    kld, same = sums["kld"] / n, sums["same"] / n
    return {
        "tokens": int(n),
        "kld": kld,
        "kld_error": sqrt(max(sums["kld2"] / n - kld * kld, 0) / (n - 1)),
        "same_top": same,
        "same_top_error": sqrt(same * (1 - same) / (n - 1)),
        "perplexity": exp(sums["nll"] / n),
        "ppl_ratio": exp((sums["nll"] - sums["nll_base"]) / n),
    }


def _width(vocab: int) -> int:
    return 2 * ((vocab + 1) // 2) + 4


def _add(sums: Sums, more: Mapping[str, float]) -> None:
    for name, value in more.items():
        sums[name] = sums.get(name, 0.0) + value


def _tokenizer(gguf: Path) -> Tokenizer:
    checkpoint = open_checkpoint(gguf)
    return Tokenizer(checkpoint.tokenizer_source, checkpoint.tokenizer_config)


def _clocher(gguf: Path, threads: int, **settings: Any) -> Logits:
    """Return the logits of a session; without settings, of the default."""
    config = EngineConfig(model_dir=gguf, context=WINDOW, chunk=256, threads=threads, **settings)
    return load(replace(config, speculate="off", all_logits=True)).session().logits


def _transformers(gguf: Path, threads: int) -> Logits:
    """Return transformers' logits of a file, its weights decoded to fp32."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, local_files_only=True
    ).eval()

    def logits(ids: Sequence[int]) -> np.ndarray:
        with torch.inference_mode():
            found: np.ndarray = model(torch.tensor([ids])).logits[0].numpy()
        return found

    return logits


@experiment("real", __doc__)
@click.option("--gguf", "files", type=FILE, multiple=True, required=True)
@click.option("--text", type=FILE)
@click.option("--turns", type=FILE)
@click.option("--tokens", type=click.IntRange(1), default=20_000, show_default=True)
@click.option("--engine", "engines", type=click.Choice(ENGINES), multiple=True, default=ENGINES)
@click.option("--llama", type=FILE, help="Where llama-perplexity is.")
@click.option("--keep", type=FILE, required=True)
@click.option("--seconds", type=click.IntRange(1), help="Begin no part after that.")
@TEAM
def main(
    files: Sequence[Path],
    text: Path | None,
    turns: Path | None,
    tokens: int,
    engines: Sequence[str],
    llama: Path | None,
    keep: Path,
    seconds: int | None,
    threads: int,
) -> Iterator[Row]:
    """Measure the parts that are missing, and yield the rows of all of them."""
    count = -(-tokens // SCORED)
    end = time.monotonic() + (seconds or 1e9)
    found = {(each["key"], each["run"]): each["line"] for each in _kept(keep)}
    for gguf in files:
        tokenizer = _tokenizer(gguf)
        makers: dict[str, Callable[[], Logits]] = {
            EXACT: partial(_clocher, gguf, threads, kv_dtype="f32", act_prec="fp32"),
            DEFAULT: partial(_clocher, gguf, threads),
            TRANSFORMERS: partial(_transformers, gguf, threads),
        }
        made: dict[str, Logits] = {}
        for kind, windows in windows_of(tokenizer, text, turns, count).items():
            for run in range(-(-count // WINDOWS)):
                part = windows[run * WINDOWS : (run + 1) * WINDOWS]
                base = keep.with_name(f"{gguf.stem}.{kind}.{run}.base")
                for name in (EXACT, *(each for each in engines if each != EXACT)):
                    key = f"{gguf.stem} {kind} {name}"
                    done = (key, run) in found if name != EXACT else base.exists()
                    if done or not part or time.monotonic() > end:
                        continue
                    began = time.monotonic()
                    if name != LLAMA and name not in made:
                        made[name] = makers[name]()
                    if name == EXACT:
                        sums = write_base(base, part, made[name])
                    elif name == LLAMA:
                        assert llama is not None
                        of = len(part) * SCORED
                        sums = by_llama(llama / "llama-perplexity", gguf, base, of, threads)
                    else:
                        sums = compared(base, part, made[name])
                    sums["seconds"] = time.monotonic() - began
                    about = {"schema": SCHEMA, "key": key, "label": name, "run": run}
                    append_row(keep, {**about, "status": "ok", "line": sums})
                    found[key, run] = sums
            for name in ENGINES:
                sums = {}
                for run in naturals():
                    if (line := found.get((f"{gguf.stem} {kind} {name}", run))) is None:
                        break
                    _add(sums, line)
                if sums:
                    yield {
                        "op": "real",
                        "model": gguf.stem,
                        "text": kind,
                        "engine": name,
                    } | summary(sums)


def _kept(keep: Path) -> Sequence[Row]:
    return read_rows(keep) if keep.exists() else ()
