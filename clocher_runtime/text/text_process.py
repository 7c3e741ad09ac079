"""A process for text work with limits on time and memory, set by each request; runs on demand."""

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from multiprocessing.connection import Connection, Pipe
from typing import Any

from clocher_runtime.text import Refused

MAX_REQUEST_BYTES, MAX_REPLY_BYTES = 128 << 20, 256 << 20
MAX_IDLE_BYTES = 512 << 20
"""A process that grew by more since it loaded its tokenizer or grammars ends after its reply."""
BASE_PATIENCE, PATIENCE = 60.0, 20.0
"""Seconds to wait for a reply, and more per allowed CPU second; this catches deadlocks."""
_MODULE = "clocher_runtime.text.text_process_main"
Load = tuple[float, int, dict[str, Any]]
"""CPU seconds and bytes that loading may take, and the arguments of `text_process_main.load`."""


class TextProcess:
    """The process, outside; thread-safe, one request at a time."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection  # to it
        self._owner = 0
        self._loaded: Load | None = None
        self._loaded_bytes = 0  # size of the process after the last load

    def ask(
        self,
        operation: str,
        seconds: float,
        memory: int,
        load: Load | None = None,
        **arguments: Any,
    ) -> Any:
        """Run a function of `text_process_main` and return its result; raises Refused.

        `seconds` of CPU time and `memory` bytes of growth are limits. `load`: what the function
        works with, loaded first unless it still is. Arguments are JSON.
        """
        with self._turn:
            if load is not None and (self._loaded != load or not self._is_ours()):
                self._loaded = None
                self._ask("load", *load)
                self._loaded = load
            return self._ask(operation, seconds, memory, arguments)

    def close(self) -> None:
        """End the process; the next request starts another."""
        process, self._process, self._loaded = self._process, None, None
        self._loaded_bytes = 0
        if process is None:
            return
        self._pipe.close()
        if self._owner == os.getpid():
            process.kill()
            process.wait()

    def _is_ours(self) -> bool:
        return self._process is not None and self._owner == os.getpid()

    def _ask(self, operation: str, seconds: float, memory: int, arguments: dict[str, Any]) -> Any:
        try:
            request = to_bytes([operation, seconds, memory, arguments])
        except (TypeError, ValueError, RecursionError) as error:
            raise Refused("refused", f"not JSON values: {error!s:.200}") from None
        if len(request) > MAX_REQUEST_BYTES:
            raise Refused("refused", f"{len(request)} bytes; the limit is {MAX_REQUEST_BYTES}")
        if not self._is_ours():
            self._start()
        reply = None
        try:
            reply = self._exchange(request, BASE_PATIENCE + PATIENCE * seconds)
        finally:
            # A reply left over, as after Ctrl-C, must not go to the next request.
            if reply is not None and operation == "load":
                self._loaded_bytes = reply["size"]
            if reply is None or reply["size"] - self._loaded_bytes > MAX_IDLE_BYTES:
                self.close()
        if "error" in reply:
            raise Refused(*reply["error"])
        if "defect" in reply:
            raise RuntimeError(f"the process for text failed: {reply['defect']}")
        return reply["value"]

    def _start(self) -> None:
        self.close()  # the child of the process that this one was forked from
        # With little memory left the library could deadlock in a backtrace.
        paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "RUST_BACKTRACE": "0"}
        self._pipe, theirs = Pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _MODULE, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # a panicking library writes there
                pass_fds=[theirs.fileno()],
                env=os.environ | paths,
                start_new_session=True,  # Ctrl-C is for this process, which then ends that one
            )
        except OSError as error:
            raise Refused("crash", f"the process for text cannot be started: {error}") from None
        finally:
            theirs.close()
        self._owner = os.getpid()
        atexit.unregister(self.close)
        atexit.register(self.close)

    def _exchange(self, request: bytes, patience: float) -> dict[str, Any]:
        process = self._process
        assert process is not None
        try:
            self._pipe.send_bytes(request)
            if not self._pipe.poll(patience):
                raise Refused("time", f"no answer within {patience:g} s")
            reply: dict[str, Any] = from_bytes(self._pipe.recv_bytes(MAX_REPLY_BYTES))
            return reply
        except (EOFError, ConnectionError):  # it has ended
            pass
        except OSError:
            most = MAX_REPLY_BYTES
            raise Refused("memory", f"a result of more than {most} bytes") from None
        code = process.wait()
        if code in (-signal.SIGXCPU, -signal.SIGKILL):
            raise Refused("time", "it takes too long")
        if code == -signal.SIGABRT:  # how the library reports that memory is exhausted
            raise Refused("memory", "it needs too much memory")
        if code > 0:
            raise RuntimeError(f"the process for text ended with exit code {code}")
        raise Refused("crash", f"its process ended with signal {-code}")


def to_bytes(value: object) -> bytes:
    """Encode a JSON value for the pipe; lone surrogates are kept."""
    return json.dumps(value, ensure_ascii=False, default=_plain).encode("utf-8", "surrogatepass")


def from_bytes(data: bytes) -> Any:
    """Decode the result of `to_bytes`."""
    return json.loads(data.decode("utf-8", "surrogatepass"))


def _plain(value: object) -> dict[Any, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is none")


PROCESS = TextProcess()
