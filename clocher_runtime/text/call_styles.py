"""How models write calls of functions: one table, for answers, prompts and constraints.

Sources: the chat templates and model cards of the models named.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

AnswerStyle = str
"""A key of `STYLES`."""
NAME, ARGUMENTS = "NAME", "ARGUMENTS"


class CallStyle(NamedTuple):
    """How calls stand in an answer: `begin`, calls with `between` between them, `end`.

    A call is `call`, where NAME and ARGUMENTS (JSON, or `parameter`s joined by `comma`) stand for
    what is called. `marks`: what may open calls -> what closes them, "" for the end or the next
    call.
    """

    sign: str  # a regular expression, found in the chat templates of these models
    call: str
    marks: Mapping[str, str]
    begin: str = ""
    between: str = ""
    end: str = ""
    parameter: tuple[str, str, str] = ("", "", "")  # before the key, before and after the value
    quote: str = ""  # around texts among the parameters
    comma: str = ""
    tokens: tuple[str, ...] = ()  # that the vocabulary has
    named: bool = False  # whether a name may stand before the arguments
    thinks: bool = False  # whether <think> may come first

    @property
    def pieces(self) -> tuple[str, str, str]:
        """What stands before the name of a call, before its arguments, and after them."""
        before, _, rest = self.call.partition(NAME)
        middle, _, after = rest.partition(ARGUMENTS)
        return before, middle, after

    def written(self, calls: Iterable[tuple[str, str]]) -> str:
        """Return an answer that makes some calls: names, and arguments as JSON."""
        before, middle, after = self.pieces
        made = (f"{before}{name}{middle}{arguments}{after}" for name, arguments in calls)
        return self.begin + self.between.join(made) + self.end


_JSON = f'{{"name": "{NAME}", "arguments": {ARGUMENTS}}}'
_HERMES = CallStyle(
    r"<tool_call>",
    f"<tool_call>\n{_JSON}\n</tool_call>",
    {"<tool_call>": "</tool_call>"},
    between="\n",
    thinks=True,
)
_DEEPSEEK = CallStyle(
    r"<｜tool▁sep｜>",
    f"<｜tool▁call▁begin｜>{NAME}<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>",
    {"<｜tool▁calls▁begin｜>": "<｜tool▁calls▁end｜>"},
    "<｜tool▁calls▁begin｜>",
    end="<｜tool▁calls▁end｜>",
    named=True,
    thinks=True,
)
_LIST = CallStyle(
    r"\[TOOL_CALLS\]", _JSON, {"[TOOL_CALLS]": ""}, "[TOOL_CALLS][", between=", ", end="]"
)
_HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
STYLES: Mapping[AnswerStyle, CallStyle] = {
    # gpt-oss; `harmony` reads it.
    "harmony": CallStyle("", f"to=functions.{NAME} {ARGUMENTS}", {}, tokens=_HARMONY),
    # Also Qwen3.5 and Nemotron 3.
    "qwen3_coder": CallStyle(
        r"<tool_call>[\s\S]*<parameter=",
        f"<tool_call>\n<function={NAME}>\n{ARGUMENTS}</function>\n</tool_call>",
        {"<tool_call>": "</tool_call>"},
        between="\n",
        parameter=("<parameter=", ">\n", "\n</parameter>\n"),
        thinks=True,
    ),
    # Hermes, Qwen 2.5 and 3, Granite 4.
    "hermes": _HERMES,
    # `LlamaCalls` reads it: no mark is certain.
    "llama3": CallStyle(
        '"parameters"',
        f'{{"name": "{NAME}", "parameters": {ARGUMENTS}}}',
        {},
        between="; ",
        tokens=("<|python_tag|>",),
    ),
    # Mistral from 2025 on, then up to 2024.
    "mistral": CallStyle(
        r"\[ARGS\]", f"[TOOL_CALLS]{NAME}[ARGS]{ARGUMENTS}", {"[TOOL_CALLS]": ""}, named=True
    ),
    "mistral_list": _LIST._replace(named=True),
    "deepseek_r1": _DEEPSEEK._replace(  # also V3
        sign=r"<｜tool▁sep｜>[\s\S]*```json",
        call=f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{NAME}\n```json\n{ARGUMENTS}\n```"
        "<｜tool▁call▁end｜>",
        between="\n",
    ),
    "deepseek": _DEEPSEEK,  # V3.1
    "phi4": _LIST._replace(
        sign=r"<\|/tool(_call)?\|>",
        marks={"<|tool_call|>": "<|/tool_call|>"},
        begin="<|tool_call|>[",
        end="]<|/tool_call|>",
    ),
    # Granite 3.
    "granite": _LIST._replace(
        sign=r"<\|tool_call\|>", marks={"<|tool_call|>": ""}, begin="<|tool_call|>[", thinks=True
    ),
    "function_gemma": CallStyle(
        r"<start_function_call>",
        f"<start_function_call>call:{NAME}{{{ARGUMENTS}}}<end_function_call>",
        {"<start_function_call>": "<end_function_call>"},
        parameter=("", ":", ""),
        quote="<escape>",
        comma=",",
        named=True,
    ),
    # Gemma 2 and 3 have no marks of their own: asked as Hermes, they may answer with a fence.
    "gemma": _HERMES._replace(
        sign=r"<start_of_turn>",
        marks={**_HERMES.marks, "```tool_code": "```", "```json": "```"},
        named=True,
        thinks=False,
    ),
    # All others are asked to write as Hermes.
    "plain": _HERMES._replace(sign="", thinks=False),
}
"""Style -> how it writes; the first one that fits a model is its style."""


def properties_of(schema: object) -> Mapping[str, Any]:
    """Return the schemas of the arguments of a function, by its JSON schema."""
    found = schema.get("properties") if isinstance(schema, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def takes_text(schema: object) -> bool:
    """Return whether the JSON schema of an argument allows text."""
    schemas = [schema]
    for key in ("anyOf", "oneOf"):
        either = schema.get(key) if isinstance(schema, Mapping) else None
        schemas += either if isinstance(either, list) else []
    for each in schemas:
        if isinstance(each, Mapping):
            kinds, values = each.get("type"), each.get("enum", [each.get("const")])
            if "string" in (kinds if isinstance(kinds, list) else [kinds]):
                return True
            if isinstance(values, list) and any(isinstance(value, str) for value in values):
                return True
    return False


def style_of(template: str, knows: Callable[[str], bool]) -> AnswerStyle:
    """Return the first style that fits a template and a vocabulary (`knows`: has a token)."""
    return next(
        name
        for name, style in STYLES.items()
        if re.search(style.sign, template) and all(map(knows, style.tokens))
    )
