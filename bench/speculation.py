r"""Speculation on texts of several kinds, beside no drafts, prompt by prompt in one process.

\b
    python -m bench speculation --model-dir FILE --questions question.jsonl [--draft-model FILE]
        [--settings auto,draft,both] [--prompts 8] [--temperature 1] [--seconds 200 --keep FILE]

Lines of --questions have a `category` and `turns`, as Spec-Bench's; the first turn of the first
--prompts of each kind is asked through the chat template. Settings: auto (drafts from the text),
draft (a draft model alone), both. Only forwards without prompt tokens are timed. What --keep has is
not measured again; --seconds ends early, with rows of what there is.
"""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from statistics import mean, median
from typing import Any

import click

from bench.experiment import MODEL_DIR, TEAM, experiment
from bench.record import Row, append_row
from clocher_runtime.api import LanguageModel, load
from clocher_runtime.command.flags import option
from clocher_runtime.command.parameters import COUNT, PATH, Listed
from clocher_runtime.engine.arguments import Sampling
from clocher_runtime.engine.timing import TimedWindow

_MODES = {"auto": "auto", "draft": "draft", "both": "auto"}


def _run(model: LanguageModel, prompt: str, sampling: Sampling, most: int) -> Row:
    """Answer a prompt; return its ids, and tokens, forwards and time of decoding."""
    text = model.tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
    ids, window = model.tokenizer.encode(text, special=False), TimedWindow("speculation")
    made = [token.id for token in model.session.generate([ids], most, sampling, window=window)]
    spans = [span for span in window.spans if span.kind == "decode"]
    tokens, ns = sum(span.tokens for span in spans), sum(span.ns for span in spans)
    return {"ids": made, "tokens": tokens, "forwards": len(spans), "ns": ns}


def _row(found: Sequence[Row], setting: str) -> Row:
    timed = [runs for runs in found if runs["off"]["ns"]]
    rates = {
        name: [1e9 * runs[name]["tokens"] / runs[name]["ns"] for runs in timed]
        for name in ("off", setting)
    }
    ns = {name: sum(runs[name]["ns"] for runs in timed) for name in rates}
    tokens, forwards = (sum(r[setting][key] for r in timed) for key in ("tokens", "forwards"))
    return {
        "setting": setting,
        "n": len(timed),
        "off_tok_s": median(rates["off"]),
        "tok_s": median(rates[setting]),
        "over_off": ns["off"] / ns[setting],
        "over_off_of_prompts": [
            round(own / off, 3) for own, off in zip(rates[setting], rates["off"], strict=True)
        ],
        "tokens_per_pass": tokens / forwards,
        "correct": all(runs[setting]["ids"] == runs["off"]["ids"] for runs in found),
    }


@experiment(
    "speculation",
    __doc__,
    MODEL_DIR,
    option("--questions", PATH, "JSONL with `category` and `turns`", required=True),
    option("--draft-model", PATH),
    option("--settings", Listed.of(_MODES), default="auto"),
    option("--prompts", COUNT, default=8),
    option("--max-new", click.IntRange(2), default=96),
    option("--temperature", click.FloatRange(0), default=0.0),
    option("--seconds", click.FloatRange(0), default=float("inf")),
    option("--keep", PATH, "JSONL of the prompts that were measured"),
    TEAM,
    title="{model}, T = {temperature:g}, {threads} threads",
)
def main(asked: Any) -> Iterator[Row]:
    """Yield a row for each kind of text and setting, and one of all kinds."""
    settings, keep = asked.settings, asked.keep
    if asked.draft_model is None and settings != ("auto",):
        raise click.UsageError("settings draft and both ask a draft model; give --draft-model")
    ends = time.monotonic() + asked.seconds
    texts: dict[str, list[tuple[int, str]]] = {}
    for number, line in enumerate(asked.questions.read_text(encoding="utf-8").splitlines()):
        each = json.loads(line)
        texts.setdefault(each["category"], []).append((number, each["turns"][0]))
    kept = keep.read_text(encoding="utf-8").splitlines() if keep and keep.exists() else []
    done = {each["number"]: each["runs"] for each in map(json.loads, kept)}
    with ExitStack() as opened:
        models: dict[str, LanguageModel] = {}
        for name in ("off", *settings):
            how: Row = {"threads": asked.threads, "context": 2048}
            how |= {"draft_model": asked.draft_model} if name in ("draft", "both") else {}
            model = load(asked.model_dir, speculate=_MODES.get(name, "off"), **how)
            models[name] = opened.enter_context(model)
        spec, names = model.session, list(models)
        for turn, kind in ((i, kind) for i in range(asked.prompts) for kind in texts):
            for number, prompt in texts[kind][turn : turn + 1]:
                if number in done or time.monotonic() > ends:
                    continue
                sampling = Sampling(temperature=asked.temperature, seed=number)
                first = len(done) % len(names)
                order = names[first:] + names[:first]
                done[number] = {n: _run(models[n], prompt, sampling, asked.max_new) for n in order}
                if keep:
                    append_row(keep, {"kind": kind, "number": number, "runs": done[number]})
        said = {name: model.session.speculation().reason for name, model in models.items()}
    about = {"model": spec.model.checkpoint.path.name, "threads": asked.threads, "isa": spec.isa}
    about |= {"temperature": asked.temperature, "max_new": asked.max_new}
    for setting in settings:
        rows = []
        for kind, lines in texts.items():
            if found := [done[number] for number, _ in lines if number in done]:
                rows.append({"text": kind, **about, **_row(found, setting)})
        yield from rows
        means = {key: mean(row[key] for row in rows) for key in ("over_off", "tokens_per_pass")}
        low, worst = min((row["over_off"], row["text"]) for row in rows)
        note = f"worst: {worst} {low:.2f}x; {said[setting]}"
        correct = all(row["correct"] for row in rows)
        mean_row = {"text": "mean of kinds", "setting": setting, "n": sum(r["n"] for r in rows)}
        yield {**mean_row, **about, **means, "correct": correct, "note": note}
