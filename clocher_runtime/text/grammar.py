"""Structured output: constraints by a JSON schema, a regular expression or a grammar.

A constraint becomes llguidance rules, one string, that a process with limits tries first.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clocher_kernels.errors import UsageError
from clocher_runtime.checkpoints.checkpoint import Checkpoint, MadeTokenizer
from clocher_runtime.config.values import one_of, shown
from clocher_runtime.engine.arguments import Constraint, listed
from clocher_runtime.text import Refused
from clocher_runtime.text.call_styles import STYLES, CallStyle
from clocher_runtime.text.text_process import TextProcess
from clocher_runtime.text.tokenizer_library import inspect, loading_limits

if TYPE_CHECKING:
    from clocher_runtime.text.grammar_library import LibraryGrammars

CHECK_SECONDS, CHECK_BYTES = 2.0, 512 << 20
"""Limits of trying rules: CPU seconds, bytes."""
_PROCESS = TextProcess()
"""Separate from the prompts' process: hostile rules must not delay prompts."""
MAX_CALLS = 16
"""Calls of one answer that has to call: a small model may never stop."""
MAX_SCHEMA_CHARS, MAX_GRAMMAR_CHARS, MAX_REGEX_CHARS = 1 << 17, 1 << 16, 1 << 14
_SPACE = {"whitespace_pattern": r"[ \n\r\t]{1,32}"}
"""Whitespace within JSON, bounded so that a model cannot emit blanks forever."""
_BRACKETED = re.compile(r"<.*>", re.DOTALL)
"""Added tokens that llguidance takes for special, not for text, even if the tokenizer does not."""
_FORMATS = {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"}
_FORMATS |= {"uri", "unknown"}
"""Formats of strings that llguidance follows."""
_LITERAL = {"const", "enum", "default", "examples"}  # keywords whose values are no schemas
_BY_NAME = {"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"}
_LEAST, _LARGEST = 1e-6, 1 << 31  # up to here doubles resolve such a difference

Part = Mapping[str, Any]
Mark = Callable[[str], str]


class GrammarMaker:
    """Makes constraints for the texts of a model, by specs of `rules_of`; thread-safe.

    A server checks specs in one process and compiles them in another. Raises FormatError, or
    UsageError if llguidance is missing or cannot load the tokenizer.
    """

    def __init__(
        self, tokenizer_json: Path | bytes | MadeTokenizer, vocab_size: int, eos_ids: Sequence[int]
    ) -> None:
        if find_spec("llguidance") is None:
            raise UsageError(
                "structured output needs llguidance: pip install '.[serve]' in a clone of Clocher, "
                "or leave it out"
            )
        found = inspect(tokenizer_json)
        if not eos_ids or not found.plain:
            raise UsageError(
                "structured output needs a token that ends a text, and a tokenizer whose steps are "
                "all known; this model has no such; leave it out"
            )
        added: list[dict[str, Any]] = found.document.get("added_tokens") or []
        text = found.text
        self._source: dict[str, Any] = {
            "text": text,
            "vocab_size": vocab_size,
            "known": 1 + max(found.tokens(), default=-1),
            "eos_ids": list(eos_ids),
        }
        self._load = *loading_limits(text), self._source
        control = {t["content"] for t in added if t.get("special") is True}
        ids = {t["content"]: f"<[{t['id']}]>" for t in added if t["content"] in control}
        bracketed = [t["content"] for t in added if _BRACKETED.fullmatch(t["content"])]
        self._special = ids | {name: name for name in bracketed}
        # Forced text is tokenized, and becomes such a token where the text is one's name.
        self._no_forcing = self._special.keys() != control
        self._checked = ""

    def check(self, spec: Mapping[str, Any]) -> None:
        """Try a spec in a process with limits; raises UsageError if invalid or too complex."""
        rules = rules_of(spec, self._special, self._no_forcing)
        if rules == self._checked:
            return
        try:
            _PROCESS.ask("check_rules", CHECK_SECONDS, CHECK_BYTES, self._load, rules=rules)
        except Refused as error:
            if error.kind == "refused":
                raise UsageError(str(error)) from None
            raise UsageError(f"this structure is too complex: {error}; make it smaller") from None
        self._checked = rules

    def compile(self, spec: Mapping[str, Any]) -> Constraint:
        """Return the constraint of one text of a checked spec (others may end this process)."""
        return self._library.follow(rules_of(spec, self._special, self._no_forcing))

    @cached_property
    def _library(self) -> "LibraryGrammars":
        from clocher_runtime.text.grammar_library import LibraryGrammars

        return LibraryGrammars(**self._source)


class Grammars:
    """A model's grammars, made in a thread: a difficult one delays only its own request."""

    def __init__(self, model: Checkpoint, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._maker = cache(lambda: GrammarMaker(model.tokenizer_source, vocab_size, eos_ids))
        self._thread = ThreadPoolExecutor(1, "grammar")

    def close(self) -> None:
        """Stop the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def checked(self, spec: Mapping[str, Any]) -> Future[None]:
        """Check a constraint; the future raises UsageError if it is invalid."""
        return self._thread.submit(lambda: self._maker().check(spec))

    def compiled(self, spec: Mapping[str, Any]) -> Future[Constraint]:
        """Return the constraint of one sequence, from a checked spec."""
        return self._thread.submit(lambda: self._maker().compile(spec))


def rules_of(spec: Mapping[str, Any], special: Mapping[str, str], no_forcing: bool = False) -> str:
    """Return the rules of an answer; raises UsageError.

    "kind" and "value" of a spec: "json_schema" (an object), "json_object" (True), "regex" (matches
    the whole answer), "grammar" (Lark's notation of llguidance, or GBNF), "choice" (a list of
    texts), "tools" (functions `{"name", "parameters"}`, one of which is called; "several": up to
    `MAX_CALLS`). "style" is one of `STYLES`: of "harmony" the last message is constrained, of
    those that think the text after the reasoning; "opened": the prompt ends within reasoning.
    `special`: the tokens that are no text for llguidance -> how its rules name them. `no_forcing`:
    the model chooses the tokens of a text that must follow, instead of the tokenizer.
    """
    kind = one_of(*_PARTS, "tools").check("structured output", spec.get("kind"))
    style = one_of(*STYLES).check("style", spec.get("style", "plain"))
    value = spec.get("value")

    def mark(name: str) -> str:
        if name not in special and style == "harmony":
            raise UsageError(f"the tokenizer has no special token {name}, which harmony needs")
        return special.get(name) or json.dumps(name)

    if kind == "tools":
        functions = _functions(value)
        parts = {f"tool{number}": each for number, each in enumerate(functions.values())}
        if style == "harmony":
            json_of = f'{mark("<|constrain|>")} "json" {mark("<|message|>")}'
            calls = (f'{json.dumps(f)} " " {json_of} @tool{n}' for n, f in enumerate(functions))
            harmony = f'"commentary to=functions." ({" | ".join(calls)})'
        else:
            answer = _calls(STYLES[style], list(functions), special, spec.get("several") is True)
    else:
        parts, answer, constrain = {"answer": _PARTS[kind](value)}, "@answer", ""
        if style == "harmony" and kind in ("json_schema", "json_object"):
            constrain = f'(" "? {mark("<|constrain|>")} "json")?'
        harmony = f'"final" {constrain} {mark("<|message|>")} @answer' if style == "harmony" else ""
    if style == "harmony":
        start = _harmony(harmony, mark)
    elif STYLES[style].thinks or spec.get("opened") is True:
        start = _after_thoughts(answer, mark, spec.get("opened") is True)
    else:
        start = f"start: {answer}"
    if no_forcing:
        start = f'%llguidance {{"no_forcing": true}}\n{start}'
    named = [{"name": name, **part} for name, part in parts.items()]
    return json.dumps({"grammars": [{"lark_grammar": start}, *named]})


def _harmony(start: str, mark: Mark) -> str:
    channel, message = mark("<|channel|>"), mark("<|message|>")
    again = f'{mark("<|end|>")} {mark("<|start|>")} "assistant"'
    return (
        f"start: analysis? {channel} {start}\n"
        f'analysis: {channel} "analysis" {message} /(.|\\n)*/ {again}'
    )


def _after_thoughts(start: str, mark: Mark, opened: bool) -> str:
    end = mark("</think>")
    rules = [f"start: rest blank {start}"] if opened else [f"start: (think blank)? {start}"]
    rules += [] if opened else [f"think: {mark('<think>')} rest"]
    # Without a terminator the expression would match everything that follows.
    special = end.startswith("<")
    rest = f"rest: /(.|\\n)*/ {end}" if special else f"rest[suffix={end}]: /(.|\\n)*/"
    return "\n".join([*rules, "blank: /\\s{0,32}/", rest])


def _calls(style: CallStyle, names: list[str], special: Mapping[str, str], several: bool) -> str:
    """Return an answer that calls one of some functions, or `several` of them."""

    def spelled(text: str, first: bool = False) -> str:
        marks = sorted((mark for mark in special if mark in text), key=len, reverse=True)
        pieces = re.split(f"({'|'.join(map(re.escape, marks))})", text) if marks else [text]
        pieces = list(filter(None, pieces))
        made = [special.get(each) or json.dumps(each) for each in pieces]
        if first and pieces[0] in special:
            # As text too: a model that begins with "<" must not be left with only "<think>".
            made[0] = f"({made[0]} | {json.dumps(pieces[0])})"
        return " ".join(made)

    before, middle, after = style.call
    begin, middle, after = spelled(style.begin + before, True), spelled(middle), spelled(after)
    either = " | ".join(f"{json.dumps(name)} {middle} @tool{n}" for n, name in enumerate(names))
    if several:
        again = f"({spelled(style.between + before)} ({either}) {after}){{0,{MAX_CALLS - 1}}}"
        # A line break that ends the answer must not have to begin another call.
        after += f" {again}" if style.end else f" {again} {json.dumps(style.between)}?"
    return f"{begin} ({either}) {after} {spelled(style.end)}"


def _schema(source: object) -> Part:
    if not isinstance(source, Mapping):
        raise UsageError(f"the JSON schema is {shown(source)}; expected an object")
    try:
        text = json.dumps(dict(source), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"the JSON schema is not JSON: {error!s:.200}") from None
    _check_length("the JSON schema", text, MAX_SCHEMA_CHARS)
    try:
        adapted = _adapted(json.loads(text))
    except RecursionError:
        raise UsageError("the JSON schema is nested too deeply; make it flatter") from None
    # Ours overrides the client's: a schema must not disable its own checks.
    return {"json_schema": {**adapted, "x-guidance": _SPACE}}


def _adapted(schema: Any, by_name: bool = False) -> Any:
    """Return a schema as llguidance 1.9 has to read it; `by_name`: an object of schemas.

    Exclusive integer bounds move inwards by 10^-6: if the bounds of a number are less than 1 apart
    it allows the bound itself, 20 for numbers above 20 and below 20.5. Formats that it does not
    know, which it refuses, are left out, as validators ignore them (JSON Schema 2020-12, 7.2.3).
    """
    if isinstance(schema, list):
        return [_adapted(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {
        key: value if key in _LITERAL and not by_name else _adapted(value, key in _BY_NAME)
        for key, value in schema.items()
    }
    return made if by_name else _rewritten(made)


def _rewritten(made: dict[str, Any]) -> dict[str, Any]:
    if isinstance(made.get("format"), str) and made["format"] not in _FORMATS:
        del made["format"]
    if made.get("uniqueItems") is False:  # which asks for nothing
        del made["uniqueItems"]
    for open_, closed, inwards in (
        ("exclusiveMinimum", "minimum", 1),
        ("exclusiveMaximum", "maximum", -1),
    ):
        bound: Any = made.get(open_)
        other = made.get(closed)
        if not _is_number(bound) or abs(bound) > _LARGEST or bound != int(bound):
            continue
        if other is None or _is_number(other):  # else an error that llguidance names
            moved = made.pop(open_) + inwards * _LEAST
            both = [moved] if other is None else [moved, other]
            made[closed] = inwards * max(inwards * each for each in both)
    return made


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _object(source: object) -> Part:
    if source is not True:
        raise UsageError(f"json_object is {shown(source)}; expected True")
    return _schema({"type": "object"})


def _regex(source: object) -> Part:
    text = _text("the regular expression", source, MAX_REGEX_CHARS)
    if not text:
        return {"lark_grammar": 'start: ""'}
    # Escapes are kept; characters that would end the expression or its line are escaped.
    escaped = {"/": r"\/", "\n": r"\n", "\r": r"\r"}
    spelled = re.sub(
        r"\\(.)|/|\n|\r", lambda found: escaped.get(found[0], found[0]), text, flags=re.DOTALL
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


def _text(what: str, source: object, most: int) -> str:
    if not isinstance(source, str):
        raise UsageError(f"{what} is {shown(source)}; expected text")
    _check_length(what, source, most)
    return source


def _check_length(what: str, text: str, most: int) -> None:
    if len(text) > most:
        raise UsageError(f"{what} has {len(text)} characters; the limit is {most}")


def _functions(tools: Any) -> dict[str, Part]:
    found = {each["name"]: _schema(each.get("parameters") or {"type": "object"}) for each in tools}
    _check_length("the schemas of the functions", json.dumps(found), MAX_SCHEMA_CHARS)
    return found
