"""How models write calls of functions: one table, for answers, prompts and constraints.

Sources: the chat templates and model cards of the models named.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

AnswerStyle = str
"""A key of `STYLES`."""


class CallStyle(NamedTuple):
    """How calls stand in an answer: `begin`, calls with `between` between them, `end`.

    A call is its name and its arguments, JSON, within the three pieces of `call`. `marks`: what
    may open calls -> what closes them, "" for the end or the next call.
    """

    sign: str  # a regular expression, found in the chat templates of these models
    call: tuple[str, str, str]
    marks: Mapping[str, str]
    begin: str = ""
    between: str = ""
    end: str = ""
    tokens: tuple[str, ...] = ()  # that the vocabulary has
    named: bool = False  # whether a call that is read may be a name before its arguments
    thinks: bool = False  # whether <think> may come first

    def written(self, calls: Iterable[tuple[str, str]]) -> str:
        """Return an answer that makes some calls: names, and arguments as JSON."""
        before, middle, after = self.call
        made = (f"{before}{name}{middle}{arguments}{after}" for name, arguments in calls)
        return self.begin + self.between.join(made) + self.end


_JSON = ('{"name": "', '", "arguments": ', "}")
_FENCE = {"```json": "```"}
# Hermes, Qwen 2.5 and 3, Granite 4; Qwen3-Coder writes XML between the same marks, and
# Qwen2.5-Coder a fence.
_HERMES = CallStyle(
    r"<tool_call>",
    (f"<tool_call>\n{_JSON[0]}", _JSON[1], f"{_JSON[2]}\n</tool_call>"),
    {"<tool_call>": "</tool_call>", **_FENCE},
    between="\n",
    thinks=True,
)
_LIST = CallStyle(
    r"\[TOOL_CALLS\]", _JSON, {"[TOOL_CALLS]": ""}, "[TOOL_CALLS][", ", ", "]", named=True
)
_HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
STYLES: Mapping[AnswerStyle, CallStyle] = {
    # gpt-oss; `HarmonyReader` reads it.
    "harmony": CallStyle("", ("to=functions.", " ", ""), {}, tokens=_HARMONY),
    "hermes": _HERMES,
    # `LlamaCalls` reads it: no mark is certain.
    "llama3": CallStyle(
        '"parameters"',
        (_JSON[0], '", "parameters": ', "}"),
        {},
        between="; ",
        tokens=("<|python_tag|>",),
    ),
    # Mistral from 2025 on, then up to 2024.
    "mistral": CallStyle(
        r"\[ARGS\]", ("[TOOL_CALLS]", "[ARGS]", ""), {"[TOOL_CALLS]": ""}, named=True
    ),
    "mistral_list": _LIST,
    # As in V3.1; the calls of V3 and R1 have a type and a fence.
    "deepseek": CallStyle(
        r"<｜tool▁sep｜>",
        ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        {"<｜tool▁calls▁begin｜>": "<｜tool▁calls▁end｜>"},
        begin="<｜tool▁calls▁begin｜>",
        end="<｜tool▁calls▁end｜>",
        named=True,
        thinks=True,
    ),
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
        ("<start_function_call>call:", "", "<end_function_call>"),
        {"<start_function_call>": "<end_function_call>"},
        named=True,
    ),
    # Gemma 2 and 3 have no marks of their own: asked as Hermes, they may answer with a fence.
    "gemma": _HERMES._replace(
        sign=r"<start_of_turn>",
        marks={**_HERMES.marks, "```tool_code": "```"},
        named=True,
        thinks=False,
    ),
    # All others are asked to write as Hermes.
    "plain": _HERMES._replace(sign="", thinks=False),
}
"""Style -> how it writes; the first one that fits a model is its style."""


def style_of(template: str, knows: Callable[[str], bool]) -> AnswerStyle:
    """Return the first style that fits a template and a vocabulary (`knows`: has a token)."""
    return next(
        name
        for name, style in STYLES.items()
        if re.search(style.sign, template) and all(map(knows, style.tokens))
    )
