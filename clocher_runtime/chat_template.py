"""Chat templates: Jinja programs from model files, run in a sandbox with bounded work.

Time and output are bounded; memory is bounded for a single operation, not for a chain of them.
"""

import datetime
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from types import FrameType
from typing import Any, NoReturn

import jinja2
from jinja2.exceptions import SecurityError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from clocher_kernels.errors import FormatError, UsageError

MAX_TEMPLATE_BYTES = 64 << 10
MAX_STEPS = 1_000_000
MAX_OUTPUT_CHARS = 16 << 20
MAX_ARGUMENT = 1 << 16


class ChatTemplate:
    """A template, with the settings and functions that transformers gives to its templates.

    Args:
        source: the template, or a list of `{"name", "template"}` with one called "default".

    Raises:
        FormatError: it is too large or not valid Jinja.
    """

    def __init__(self, source: object) -> None:
        text = _choose(source)
        if len(text.encode("utf-8", errors="replace")) > MAX_TEMPLATE_BYTES:
            raise FormatError(
                f"chat template of {len(text)} characters; the limit is {MAX_TEMPLATE_BYTES} bytes"
            )
        try:
            self._template = _Sandbox().from_string(text)
        except (jinja2.TemplateError, SyntaxError, RecursionError, ValueError) as error:
            raise FormatError(f"chat template: {error}") from None

    def render(self, **variables: Any) -> str:
        """Return the text that the template makes of its variables.

        Raises:
            UsageError: the template refuses its variables, or needs ones that are not there.
            FormatError: it does what the sandbox forbids, or does not come to an end.
        """
        pieces: list[str] = []
        size = 0
        try:
            with _bounded_steps():
                for piece in self._template.generate(**variables):
                    pieces.append(piece)
                    size += len(piece)
                    if size > MAX_OUTPUT_CHARS:
                        raise SecurityError(f"more than {MAX_OUTPUT_CHARS} characters of output")
        except (SecurityError, RecursionError, OverflowError) as error:
            raise FormatError(f"chat template stopped: {error}") from None
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise UsageError(f"chat template refused the messages: {error}") from None
        return "".join(pieces)


class _Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox of Jinja, without the ways to build a huge value in one operation."""

    intercepted_binops = frozenset(("*", "**", "%"))

    def __init__(self) -> None:
        # The optimizer would evaluate constant expressions while the template is compiled.
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols], optimized=False
        )
        self.filters = {name: _guarded(f) for name, f in self.filters.items() if name != "format"}
        self.filters["tojson"] = _guarded(_tojson)
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function or a method of a value."""
        _check_arguments(args, kwargs)
        return super().call(context, function, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Apply an intercepted operator: to numbers only, and powers of small ones only."""
        numbers = isinstance(left, int | float) and isinstance(right, int | float)
        if not numbers or (operator == "**" and max(abs(left), abs(right)) > 64):
            raise SecurityError(f"operator {operator} is allowed for small numbers only")
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Any:
        """Refuse `str.format`, which takes widths of any size."""
        if super().wrap_str_format(value) is not None:
            raise SecurityError("str.format is not allowed")
        return None


def _guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that refuses what `_check_arguments` refuses."""

    # `wraps` also copies the mark that makes Jinja pass its context to the filter.
    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        _check_arguments(args[1:], kwargs)
        return function(*args, **kwargs)

    return checked


def _check_arguments(args: Iterable[object], kwargs: Mapping[str, object]) -> None:
    """Refuse widths, counts and the like that would build a huge value."""
    for argument in (*args, *kwargs.values()):
        if isinstance(argument, int) and abs(argument) > MAX_ARGUMENT:
            raise SecurityError(f"a number above {MAX_ARGUMENT} was passed to a function")


@contextmanager
def _bounded_steps() -> Iterator[None]:
    """Stop Python code that executes more than `MAX_STEPS` lines."""
    steps = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal steps
        steps += 1
        if steps > MAX_STEPS:
            raise SecurityError(f"more than {MAX_STEPS} steps")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def _choose(source: object) -> str:
    if isinstance(source, list):
        named = {
            entry.get("name"): entry.get("template")
            for entry in source
            if isinstance(entry, Mapping)
        }
        source = named.get("default")
    if not isinstance(source, str):
        raise FormatError("chat template: expected text, or a list with one named 'default'")
    return source


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().astimezone().strftime(format)
