"""The text process, inside; `text_process` starts it.

A request is [operation, CPU seconds, bytes of memory, arguments]; a reply is an object with
`value`, or `error` as kind and message. Both are JSON.
"""

import datetime
import json
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from math import ceil
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import jinja2
from jinja2 import meta
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from clocher_kernels.errors import UsageError
from clocher_runtime.text import Refused
from clocher_runtime.text.text_process import from_bytes, to_bytes
from clocher_runtime.text.tokenizer_library import LibraryTokenizer, tried

_loaded: list[Any] = []  # a LibraryTokenizer or LibraryGrammars, which operations work with
MAX_OUTPUT_CHARS = 16 << 20
_STACK_BYTES = 1 << 20
"""Stack of a trial; the real work has eight times as much."""


class _OutOfTime(BaseException):
    """No template catches it: it is no Exception."""


def main(descriptor: int) -> None:
    """Serve requests until the pipe is closed."""
    pipe = Connection(descriptor)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, _stop)
    with suppress(EOFError, ConnectionError):
        while True:
            pipe.send_bytes(to_bytes(_reply(from_bytes(pipe.recv_bytes()))))


def _reply(request: list[Any]) -> dict[str, Any]:
    operation, seconds, memory, arguments = request
    usage = resource.getrusage(resource.RUSAGE_SELF)
    limits = {resource.RLIMIT_CPU: ceil(usage.ru_utime + usage.ru_stime + seconds) + 1}
    if mapped := _pages(0):
        limits[resource.RLIMIT_AS] = mapped * resource.getpagesize() + memory
    try:
        # Python code is interrupted; a library that continues ends the process.
        with _at_most(limits):
            signal.setitimer(signal.ITIMER_PROF, seconds)
            try:
                reply = {"value": _OPERATIONS[operation](**arguments)}
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
    except (Refused, UsageError) as error:
        reply = {"error": [getattr(error, "kind", "refused"), str(error)[:1000]]}
    except _OutOfTime:
        reply = {"error": ["time", f"more than {seconds:g} s of CPU time"]}
    except MemoryError:
        reply = {"error": ["memory", f"more than {memory >> 20} MiB of memory"]}
    except Exception:  # a bug here
        reply = {"defect": traceback.format_exc()}
    return {**reply, "size": _pages(1) * resource.getpagesize()}


@contextmanager
def _at_most(limits: Mapping[int, int]) -> Iterator[None]:
    """Limit resources of this process while the context is open."""
    kept = {kind: resource.getrlimit(kind) for kind in limits}
    for kind, (_, most) in kept.items():
        value = limits[kind]
        resource.setrlimit(kind, (min(value, most) if most >= 0 else value, most))
    try:
        yield
    finally:
        for kind, pair in kept.items():
            resource.setrlimit(kind, pair)


def _pages(field: int) -> int:
    """Return mapped (0) or resident (1) pages; 0 if unknown."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[field]) if statm.exists() else 0


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise _OutOfTime


def load(text: str, **of_grammars: Any) -> None:
    """Load a tokenizer.json, or grammars by it if there are their other arguments."""
    _loaded.clear()
    if of_grammars:
        from clocher_runtime.text.grammar_library import LibraryGrammars

        _loaded.append(LibraryGrammars(text, **of_grammars))
    else:
        _loaded.append(LibraryTokenizer(text))


def _check_rules(rules: str) -> None:
    with _at_most({resource.RLIMIT_STACK: _STACK_BYTES}):
        _loaded[0].follow(rules)


def _of_tokenizer(name: str) -> Callable[..., Any]:
    return lambda **arguments: getattr(_loaded[0], name)(**arguments)


# Jinja, as transformers sets it up for chat templates.


@lru_cache(maxsize=8)
def compiled(source: str) -> jinja2.Template:
    """Compile a template; raises Refused if it is not valid Jinja."""
    template: jinja2.Template = tried(_environment().from_string, source)
    return template


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


_OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "compile_template": variables_of,
    "render": render,
    **{n: _of_tokenizer(n) for n in ("encode", "decode", "token_to_id", "id_to_token")},
    "load": load,
    "vocab_size": lambda: _loaded[0].vocab_size,
    "check_rules": _check_rules,
}

if __name__ == "__main__":
    main(int(sys.argv[1]))
