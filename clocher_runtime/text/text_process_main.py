"""The text process, inside; `text_process` starts it.

A request is [operation, CPU seconds, bytes of memory, arguments]; a reply is an object with
`value`, or `error` as kind and message. Both are JSON.
"""

import resource
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from math import ceil
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from clocher_kernels.errors import UsageError
from clocher_runtime.text import Refused
from clocher_runtime.text.text_process import from_bytes, to_bytes
from clocher_runtime.text.tokenizer_library import LibraryTokenizer

if TYPE_CHECKING:
    from clocher_runtime.text.grammar_library import LibraryGrammars

_tokenizers: list[LibraryTokenizer] = []  # the last tokenizer loaded
_grammars: list["LibraryGrammars"] = []  # grammars made with it, if requested
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
    try:
        _bound(seconds, memory)
        try:
            reply = {"value": _operation(operation)(**arguments)}
        finally:
            _unbound()
    except (Refused, UsageError) as error:
        reply = {"error": [getattr(error, "kind", "refused"), str(error)[:1000]]}
    except _OutOfTime:
        reply = {"error": ["time", f"more than {seconds:g} s of CPU time"]}
    except MemoryError:
        reply = {"error": ["memory", f"more than {memory >> 20} MiB of memory"]}
    except Exception:  # a bug here
        reply = {"defect": traceback.format_exc()}
    return {**reply, "size": _pages(1) * resource.getpagesize()}


def _bound(seconds: float, memory: int) -> None:
    """Set limits: Python code is interrupted; a library that continues ends the process."""
    if mapped := _pages(0):
        _limit(resource.RLIMIT_AS, mapped * resource.getpagesize() + memory)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, ceil(usage.ru_utime + usage.ru_stime + seconds) + 1)
    signal.setitimer(signal.ITIMER_PROF, seconds)


def _pages(field: int) -> int:
    """Return mapped (0) or resident (1) pages; 0 if unknown."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[field]) if statm.exists() else 0


def _unbound() -> None:
    signal.setitimer(signal.ITIMER_PROF, 0)
    for kind in (resource.RLIMIT_AS, resource.RLIMIT_CPU):
        _limit(kind, resource.getrlimit(kind)[1])


def _limit(kind: int, value: int) -> None:
    most = resource.getrlimit(kind)[1]
    soft = most if value < 0 or (most >= 0 and value > most) else value
    resource.setrlimit(kind, (soft, most))


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise _OutOfTime


def _operation(name: str) -> Callable[..., Any]:
    if name in ("compile_template", "render"):
        from clocher_runtime.text import template_sandbox  # import Jinja for templates only

        return template_sandbox.variables_of if name != "render" else template_sandbox.render
    if name in ("encode", "decode", "token_to_id", "id_to_token"):
        return getattr(_tokenizers[0], name)  # type: ignore[no-any-return]
    return _OWN[name]


def _load(text: str) -> None:
    _tokenizers.clear()
    _grammars.clear()
    _tokenizers.append(LibraryTokenizer(text))


def _load_grammars(vocab_size: int, eos_ids: list[int]) -> None:
    from clocher_runtime.text.grammar_library import LibraryGrammars

    if not _grammars:
        _grammars.append(LibraryGrammars(_tokenizers[0].to_text(), vocab_size, eos_ids))


def _check_rules(rules: str) -> None:
    kept = resource.getrlimit(resource.RLIMIT_STACK)[0]
    _limit(resource.RLIMIT_STACK, _STACK_BYTES)
    try:
        _grammars[0].follow(rules)
    finally:
        _limit(resource.RLIMIT_STACK, kept)


_OWN: Mapping[str, Callable[..., Any]] = {
    "load": _load,
    "vocab_size": lambda: _tokenizers[0].vocab_size,
    "load_grammars": _load_grammars,
    "check_rules": _check_rules,
}

if __name__ == "__main__":
    main(int(sys.argv[1]))
