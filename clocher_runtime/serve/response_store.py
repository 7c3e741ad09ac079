"""Responses that later requests may refer to: in memory, bounded, the oldest go first."""

from collections.abc import Sequence
from typing import Any

import msgspec

from clocher_runtime.serve.errors import failure, to_json

MAX_STORED, MAX_STORED_BYTES = 1000, 64 << 20


class ResponseStore:
    """The last responses by id, each as JSON with the items of its whole conversation."""

    def __init__(self) -> None:
        self._found: dict[str, bytes] = {}
        self._bytes = 0

    def keep(self, items: Sequence[dict[str, Any]], response: dict[str, Any]) -> None:
        """Keep a response and the items that led to it, its own included."""
        self._found[response["id"]] = data = to_json({"items": items, "response": response})
        self._bytes += len(data)
        while self._bytes > MAX_STORED_BYTES or len(self._found) > MAX_STORED:
            self.drop(next(iter(self._found)))

    def read(self, response: str, code: str = "response_not_found") -> dict[str, Any]:
        """Return the `items` and the `response` of an id; raises ApiError of the code."""
        if response not in self._found:
            param = None if code == "response_not_found" else "previous_response_id"
            raise failure(code, param=param, got=response)
        found: dict[str, Any] = msgspec.json.decode(self._found[response])
        return found

    def drop(self, response: str) -> None:
        """Forget a response; raises ApiError if it is not there."""
        if response not in self._found:
            raise failure("response_not_found", got=response)
        self._bytes -= len(self._found.pop(response))
