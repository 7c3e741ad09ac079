r"""Tool calls of a published suite, asked of servers of OpenAI's API in turns.

\b
    python -m bench tools --data bfcl --url clocher=http://127.0.0.1:8000 \
        --url llama.cpp=http://127.0.0.1:8080 [--limit 50] [--choice required] [--keep FILE]

DATA is the `data` directory of the package bfcl-eval (the Berkeley Function-Calling Leaderboard,
version 4). Answers are judged by the rules of its `ast_checker` for Python: the right functions in
any order, each argument one of those that count as right, texts without regard to case, spaces and
punctuation. `parseable`: all calls name a tool and have arguments that are a JSON object. Greedy;
what --keep has is not asked again. A question that a server refuses is answered wrongly, and is one
of `refused`.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import sqrt
from pathlib import Path
from typing import Any

import click

from bench.experiment import Refused, answer_of, experiment
from bench.real import Parts
from bench.record import Row
from clocher_runtime.command.flags import option
from clocher_runtime.command.parameters import COUNT, PATH, Listed

_CATEGORIES = {"simple": "simple_python", "multiple": "multiple", "parallel": "parallel"}
_KINDS = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}
_MOST = 512  # tokens of an answer


def _schema(given: Any) -> Any:
    """Return a description of parameters as a JSON schema."""
    if isinstance(given, list):
        return [_schema(each) for each in given]
    if not isinstance(given, dict):
        return given
    made = {key: _schema(value) for key, value in given.items()}
    if isinstance(kind := made.get("type"), str):
        made["type"] = _KINDS.get(kind, kind)
    return made


def _named(name: str) -> str:
    return re.sub(r"\W", "_", name)


def _plain(text: str) -> str:
    return re.sub(r"[ ,./\-_*^]", "", text).lower().replace("'", '"')


def same(value: Any, answer: Any) -> bool:
    """Return whether an argument is a right one; that of a dict has lists of right values."""
    if isinstance(answer, dict):
        return isinstance(value, dict) and fits(value, answer)
    if isinstance(answer, list):
        return (
            isinstance(value, list) and len(value) == len(answer) and all(map(same, value, answer))
        )
    if isinstance(answer, str):
        return isinstance(value, str) and _plain(value) == _plain(answer)
    return isinstance(value, bool) == isinstance(answer, bool) and bool(value == answer)


def fits(values: Mapping[str, Any], answers: Mapping[str, Sequence[Any]]) -> bool:
    """Return whether each value is a right one, and those are there that may not be missing."""
    given = all(any(same(values[key], each) for each in answers.get(key, ())) for key in values)
    return given and all(key in values or "" in answers[key] for key in answers)


def is_right(calls: Sequence[tuple[str, Any]], truth: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether calls (name, arguments) are the true ones, in any order."""
    left = [(_named(name), answers) for each in truth for name, answers in each.items()]
    for name, values in calls:
        found = [
            i for i, (own, answers) in enumerate(left) if own == name and fits(values, answers)
        ]
        if not found:
            return False
        del left[found[0]]
    return not left


def _calls(message: Mapping[str, Any], tools: Sequence[str]) -> list[tuple[str, Any]] | None:
    """Return the calls of an answer, None unless all can be parsed."""
    found = []
    for each in message.get("tool_calls") or ():
        try:
            values = json.loads(each["function"]["arguments"])
        except ValueError:
            return None
        if not isinstance(values, dict) or each["function"]["name"] not in tools:
            return None
        found.append((each["function"]["name"], values))
    return found


def _asked(url: str, model: str, item: Mapping[str, Any], truth: Sequence[Any], choice: str) -> Row:
    tools = [
        {"type": "function", "function": {**_schema(each), "name": _named(each["name"])}}
        for each in item["function"]
    ]
    wish = {"messages": item["question"][0], "tools": tools, "tool_choice": choice}
    wish |= {"model": model, "temperature": 0, "max_tokens": _MOST}
    try:
        message = answer_of(f"{url}/v1/chat/completions", wish)["choices"][0]["message"]
    except Refused:
        return {"parseable": False, "right": False, "refused": True}
    calls = _calls(message, [tool["function"]["name"] for tool in tools])
    return {"parseable": bool(calls), "right": calls is not None and is_right(calls, truth)}


def _lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@experiment(
    "tools",
    __doc__,
    option("--data", PATH, "directory of the suite's files", required=True),
    option("--url", None, "NAME=URL of a server", name="urls", multiple=True, required=True),
    option("--categories", Listed.of(_CATEGORIES), default=",".join(_CATEGORIES)),
    option("--limit", COUNT, "questions of a category", default=1000),
    option("--choice", click.Choice(["auto", "required"]), "tool_choice", default="auto"),
    option("--keep", PATH, "JSONL of the questions that were asked"),
    title="tool calls, tool_choice {choice}",
)
def main(asked: Any) -> Iterator[Row]:
    """Yield a row for each category and server."""
    urls, choice = dict(each.partition("=")[::2] for each in asked.urls), asked.choice
    models = {name: answer_of(f"{url}/v1/models")["data"][0]["id"] for name, url in urls.items()}
    parts = Parts(asked.keep, None, choice=choice)
    for category in asked.categories:
        file = f"BFCL_v4_{_CATEGORIES[category]}.json"
        items, truths = _lines(asked.data / file), _lines(asked.data / "possible_answer" / file)
        pairs = list(zip(items, truths, strict=True))[: asked.limit]
        for number, (item, truth) in enumerate(pairs):
            for engine in sorted(urls, reverse=bool(number % 2)):
                server, right = (urls[engine], models[engine]), truth["ground_truth"]
                measure = partial(_asked, *server, item, right, choice)
                parts.do([engine, models[engine], item["id"]], measure)
        for engine in urls:
            rows = [parts.get([engine, models[engine], item["id"]]) for item, _ in pairs]
            share = sum(row["right"] for row in rows) / len(rows)
            yield {
                "suite": f"bfcl {category}",
                "engine": engine,
                "choice": choice,
                "n": len(rows),
                "right": 100 * share,
                "error": 100 * sqrt(share * (1 - share) / len(rows)),
                "parseable": 100 * sum(row["parseable"] for row in rows) / len(rows),
                "refused": 100 * sum(row.get("refused", False) for row in rows) / len(rows),
                "seconds": sum(row["seconds"] for row in rows),
            }
