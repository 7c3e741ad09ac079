"""Jinja, as transformers sets it up for chat templates; runs in the text process only."""

import datetime
import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import meta
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from clocher_runtime.text import Refused

MAX_OUTPUT_CHARS = 16 << 20


@lru_cache(maxsize=8)
def compiled(source: str) -> jinja2.Template:
    """Compile a template; raises Refused if it is not valid Jinja."""
    try:
        return _environment().from_string(source)
    except MemoryError:
        raise
    except Exception as error:  # any error of compiling an invalid template
        raise Refused("refused", str(error)) from None


def variables_of(source: str) -> list[str]:
    """Return the variables that a template reads and does not set; raises Refused."""
    compiled(source)
    return sorted(meta.find_undeclared_variables(_environment().parse(source)))


def render(source: str, variables: Mapping[str, Any]) -> str:
    """Return the text; raises Refused: rejected, forbidden or over `MAX_OUTPUT_CHARS`."""
    template = compiled(source)
    pieces: list[str] = []
    size = 0
    try:
        for piece in template.generate(**variables):
            pieces.append(piece)
            size += len(piece)
            if size > MAX_OUTPUT_CHARS:
                raise SecurityError(f"more than {MAX_OUTPUT_CHARS} characters of output")
    except (SecurityError, RecursionError, OverflowError) as error:
        raise Refused("forbidden", str(error)) from None
    except MemoryError:
        raise
    except Exception as error:  # any error of a foreign template
        raise Refused("refused", str(error)) from None
    return "".join(pieces)


class _Generation(Extension):
    """`{% generation %}` marks assistant text for training; here it has no effect."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it so

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        """Return the nodes between the marks, in a scope of their own as in transformers."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return [jinja2.nodes.CallBlock(self.call_method("_as_it_is"), [], [], body, lineno=line)]

    def _as_it_is(self, caller: Callable[[], str]) -> str:
        return caller()


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    del environment.globals["lipsum"]
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    more: dict[str, Any] = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
    return json.dumps(value, ensure_ascii=ensure_ascii, **more)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    # In local time and without a zone, as in transformers.
    return datetime.datetime.now().astimezone().replace(tzinfo=None).strftime(format)
