"""What a text may be, as rules that llguidance reads: schemas, expressions, answers, tool calls.

Rules are one string, so they go from process to process. What is written here is bounded and
spelled correctly; whether a schema or an expression makes sense, `grammar` finds out.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from clocher_kernels.errors import UsageError
from clocher_runtime.config.values import shown
from clocher_runtime.engine.arguments import listed, one_of
from clocher_runtime.text.schema_bounds import without_open_integers

STYLES = ("plain", "harmony", "hermes", "llama3")
"""How a model's answers are marked up: gpt-oss; Hermes and Qwen; Llama 3."""

MAX_SCHEMA_CHARS = 1 << 17
MAX_GRAMMAR_CHARS = 1 << 16
MAX_REGEX_CHARS = 1 << 14
MAX_TOOLS = 128

_SPACE = {"whitespace_pattern": r"[ \n\r\t]{1,32}"}
"""Between the pieces of JSON: no model shall go on with blanks for ever."""
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")

Part = Mapping[str, Any]
Mark = Callable[[str], str]


def rules_of(spec: Mapping[str, Any], special: Collection[str]) -> str:
    """Return the rules of an answer.

    Args:
        spec: its "kind" says what its "value" is. "json_schema": a schema, as an object.
            "json_object", True: any object. "regex": an expression that the whole answer matches.
            "grammar": a grammar in Lark's notation as llguidance knows it, or in GBNF. "choice": a
            list of texts. "tools": a list of functions, `{"name": ..., "parameters": a schema}`
            each, one of which is to be called.
            "style" is how the model marks its answers; "plain" if there is none. The whole text is
            the answer. But of "harmony" the last message is, behind an analysis, and of "hermes"
            what follows a block of thoughts; "opened" says that the prompt ends in such a block.
        special: the tokenizer's special tokens.

    Raises:
        UsageError: it is something else, or too long, or the tokenizer lacks what the style needs.
    """
    kind = one_of("structured output", spec.get("kind"), (*_PARTS, "tools"))
    style = one_of("style", spec.get("style", "plain"), STYLES)
    value, mark = spec.get("value"), _marker(special, style)
    if kind == "tools":
        return _calls(value, style, mark, spec.get("opened") is True)
    parts = {"answer": _PARTS[kind](value)}
    if style == "harmony":
        is_json = kind in ("json_schema", "json_object")
        constrain = f'(" "? {mark("<|constrain|>")} "json")?' if is_json else ""
        return _joined(_harmony(f'"final" {constrain} {mark("<|message|>")} @answer', mark), parts)
    if style == "hermes":
        return _joined(_hermes("@answer", mark, spec.get("opened") is True), parts)
    return _joined("start: @answer", parts)


def _calls(value: object, style: str, mark: Mark, opened: bool) -> str:
    """Return the rules of one call of one of some functions."""
    if style == "plain":
        raise UsageError("this model has no known form of tool calls; leave tool_choice out")
    calls, parts = [], {}
    for number, (name, parameters) in enumerate(_functions(value).items()):
        parts[f"tool{number}"] = parameters
        calls.append(_CALLS[style](name, f"@tool{number}", mark))
    either = f"({' | '.join(calls)})"
    if style == "harmony":
        return _joined(_harmony(f'"commentary to=functions." {either}', mark), parts)
    if style == "hermes":
        return _joined(_hermes(either, mark, opened), parts)
    return _joined(f"start: {either}", parts)


def _harmony(start: str, mark: Mark) -> str:
    """Return the rules of a message in a channel, which an analysis may come before."""
    channel, message = mark("<|channel|>"), mark("<|message|>")
    again = f'{mark("<|end|>")} {mark("<|start|>")} "assistant"'
    return (
        f"start: analysis? {channel} {start}\n"
        f'analysis: {channel} "analysis" {message} /(.|\\n)*/ {again}'
    )


def _hermes(start: str, mark: Mark, opened: bool) -> str:
    """Return the rules of something that a block of thoughts may come before, or one goes on."""
    end = mark("</think>")
    is_special = end.startswith("<")
    before = "rest blank" if opened else "(think blank)?"
    rules = [f"start: {before} {start}", f"think: {mark('<think>')} rest", "blank: /\\s*/"]
    if opened:
        del rules[1]
    # Without an end of its own the expression would take in everything that follows.
    rules.append(f"rest: /(.|\\n)*/ {end}" if is_special else f"rest[suffix={end}]: /(.|\\n)*/")
    return "\n".join(rules)


def _harmony_call(name: str, arguments: str, mark: Mark) -> str:
    return (
        f'{json.dumps(name)} " " {mark("<|constrain|>")} "json" {mark("<|message|>")} {arguments}'
    )


def _hermes_call(name: str, arguments: str, mark: Mark) -> str:
    begin, end = mark("<tool_call>"), mark("</tool_call>")
    opened = json.dumps(f'\n{{"name": "{name}", "arguments": ')
    return f'{begin} {opened} {arguments} "}}\\n" {end}'


def _llama3_call(name: str, arguments: str, mark: Mark) -> str:
    opened = json.dumps(f'{{"name": "{name}", "parameters": ')
    return f'{opened} {arguments} "}}"'


_CALLS: Mapping[str, Callable[[str, str, Mark], str]] = {
    "harmony": _harmony_call,
    "hermes": _hermes_call,
    "llama3": _llama3_call,
}


def _marker(special: Collection[str], style: str) -> Mark:
    """Return what spells a mark: as the special token of this name, or else as text."""

    def mark(name: str) -> str:
        if name in special:
            return name
        if style == "harmony":
            raise UsageError(f"the tokenizer has no special token {name}, which harmony needs")
        return json.dumps(name)

    return mark


def _joined(start: str, parts: Mapping[str, Part]) -> str:
    named = [{"name": name, **part} for name, part in parts.items()]
    return json.dumps({"grammars": [{"lark_grammar": start}, *named]})


def _schema(source: object) -> Part:
    if not isinstance(source, Mapping):
        raise UsageError(f"the JSON schema is {shown(source)}; expected an object")
    try:
        text = json.dumps(dict(source), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"the JSON schema is not JSON: {error!s:.200}") from None
    _check_length("the JSON schema", text, MAX_SCHEMA_CHARS)
    # Ours, and no one else's: a schema must not switch off that its keywords are obeyed.
    return {"json_schema": {**without_open_integers(json.loads(text)), "x-guidance": _SPACE}}


def _object(source: object) -> Part:
    if source is not True:
        raise UsageError(f"json_object is {shown(source)}; expected True")
    return _schema({"type": "object"})


def _regex(source: object) -> Part:
    text = _text("the regular expression", source, MAX_REGEX_CHARS)
    if not text:
        return {"lark_grammar": 'start: ""'}
    # What is escaped stays so; what would end the expression, or its line, is escaped.
    spelled = re.sub(
        r"\\(.)|/|\n|\r",
        lambda found: {"/": r"\/", "\n": r"\n", "\r": r"\r"}.get(found[0], found[0]),
        text,
        flags=re.DOTALL,
    )
    return {"lark_grammar": f"start: /{spelled}/"}


def _grammar(source: object) -> Part:
    text = _text("the grammar", source, MAX_GRAMMAR_CHARS)
    if "::=" in text:
        from clocher_runtime.text.grammar_library import lark_of

        text = lark_of(text)
    return {"lark_grammar": text}


def _choice(source: object) -> Part:
    texts = listed(source, "a list of texts to choose from")
    if not texts or not all(isinstance(text, str) for text in texts):
        raise UsageError(f"the choice is {shown(source)}; expected one text or more")
    either = " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
    _check_length("the choice", either, MAX_GRAMMAR_CHARS)
    return {"lark_grammar": f"start: {either}"}


_PARTS: Mapping[str, Callable[[object], Part]] = {
    "json_schema": _schema,
    "json_object": _object,
    "regex": _regex,
    "grammar": _grammar,
    "choice": _choice,
}
KINDS = tuple(_PARTS)
"""What an answer can be held to."""


def _text(what: str, source: object, most: int) -> str:
    if not isinstance(source, str):
        raise UsageError(f"{what} is {shown(source)}; expected text")
    _check_length(what, source, most)
    return source


def _check_length(what: str, text: str, most: int) -> None:
    if len(text) > most:
        raise UsageError(f"{what} has {len(text)} characters; the limit is {most}")


def _functions(tools: object) -> dict[str, Part]:
    """Return the schema of each function by its name."""
    given: Sequence[Any] = listed(tools, "a list of functions")
    if not 0 < len(given) <= MAX_TOOLS:
        raise UsageError(f"{len(given)} functions; expected 1 to {MAX_TOOLS}")
    found: dict[str, Part] = {}
    for number, function in enumerate(given):
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
            raise UsageError(
                f"function {number} is {shown(function)}; expected one with a name of letters, "
                "digits, '_', '-' and '.', at most 64"
            )
        if name in found:
            raise UsageError(f"two functions have the name {name}")
        parameters = function.get("parameters")
        found[name] = _schema({"type": "object"} if parameters is None else parameters)
    _check_length("the schemas of the functions", json.dumps(found), MAX_SCHEMA_CHARS)
    return found
