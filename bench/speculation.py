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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from statistics import mean, median
from typing import Any

import click

from bench.experiment import MODEL_DIR, TEAM, experiment
from bench.real import Parts
from bench.record import Row
from clocher_runtime.api import LanguageModel, load
from clocher_runtime.command.flags import option
from clocher_runtime.command.parameters import COUNT, PATH, Listed
from clocher_runtime.engine.arguments import Sampling
from clocher_runtime.engine.timing import TimedWindow

_MODES = {"auto": "auto", "draft": "draft", "both": "auto"}


def _runs(
    models: Mapping[str, LanguageModel], prompt: str, sampling: Sampling, most: int
) -> dict[str, Row]:
    """Answer a prompt with each model; return ids, and tokens, forwards and time of decoding."""
    found = {}
    for name, model in models.items():
        text = model.tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
        ids, window = model.tokenizer.encode(text, special=False), TimedWindow("speculation")
        made = [token.id for token in model.session.generate([ids], most, sampling, window=window)]
        spans = [span for span in window.spans if span.kind == "decode"]
        tokens, ns = sum(span.tokens for span in spans), sum(span.ns for span in spans)
        found[name] = {"ids": made, "tokens": tokens, "forwards": len(spans), "ns": ns}
    return found


def _row(found: Sequence[Row], setting: str) -> Row:
    timed = [runs for runs in found if runs["off"]["ns"]]
    off, own = ([runs[name] for runs in timed] for name in ("off", setting))
    off_rates, rates = ([1e9 * r["tokens"] / r["ns"] for r in runs] for runs in (off, own))
    return {
        "setting": setting,
        "n": len(timed),
        "off_tok_s": median(off_rates),
        "tok_s": median(rates),
        "over_off": sum(run["ns"] for run in off) / sum(run["ns"] for run in own),
        "over_off_of_prompts": [round(a / b, 3) for a, b in zip(rates, off_rates, strict=True)],
        "tokens_per_pass": sum(r["tokens"] for r in own) / sum(r["forwards"] for r in own),
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
    option("--seconds", click.FloatRange(0)),
    option("--keep", PATH, "JSONL of the prompts that were measured"),
    TEAM,
    title="{model}, T = {temperature:g}, {threads} threads",
)
def main(asked: Any) -> Iterator[Row]:
    """Yield a row for each kind of text and setting, and one of all kinds."""
    settings = asked.settings
    if asked.draft_model is None and settings != ("auto",):
        raise click.UsageError("settings draft and both ask a draft model; give --draft-model")
    texts: dict[str, list[tuple[int, str]]] = {}
    for number, line in enumerate(asked.questions.read_text(encoding="utf-8").splitlines()):
        each = json.loads(line)
        texts.setdefault(each["category"], []).append((number, each["turns"][0]))
    lines = [of[i] for i in range(asked.prompts) for of in texts.values() if i < len(of)]
    named: Row = {"model": str(asked.model_dir), "draft_model": str(asked.draft_model)}
    named |= {"settings": settings, "threads": asked.threads, "most": asked.max_new}
    parts = Parts(asked.keep, asked.seconds, temperature=asked.temperature, **named)
    with ExitStack() as opened:
        models: dict[str, LanguageModel] = {}
        for name in ("off", *settings):
            how: Row = {"threads": asked.threads, "context": 2048}
            how |= {"draft_model": asked.draft_model} if name in ("draft", "both") else {}
            model = load(asked.model_dir, speculate=_MODES.get(name, "off"), **how)
            models[name] = opened.enter_context(model)
        spec, names = model.session, list(models)
        for turn, (number, prompt) in enumerate(lines):
            sampling = Sampling(temperature=asked.temperature, seed=number)
            order = names[turn % len(names) :] + names[: turn % len(names)]
            own = {name: models[name] for name in order}
            parts.do((number, prompt), partial(_runs, own, prompt, sampling, asked.max_new))
        said = {name: model.session.speculation().reason for name, model in models.items()}
    about = {"model": spec.model.checkpoint.path.name, "threads": asked.threads, "isa": spec.isa}
    about |= {"temperature": asked.temperature, "max_new": asked.max_new}
    done = {kind: [runs for each in of if (runs := parts.get(each))] for kind, of in texts.items()}
    for setting in settings:
        rows = [{"text": k, **about, **_row(found, setting)} for k, found in done.items() if found]
        yield from rows
        means = {key: mean(row[key] for row in rows) for key in ("over_off", "tokens_per_pass")}
        low, worst = min((row["over_off"], row["text"]) for row in rows)
        note = f"worst: {worst} {low:.2f}x; {said[setting]}"
        correct = all(row["correct"] for row in rows)
        mean_row = {"text": "mean of kinds", "setting": setting, "n": sum(r["n"] for r in rows)}
        yield {**mean_row, **about, **means, "correct": correct, "note": note}
