"""POST /v1/responses: a chat under another name, told in items instead of deltas."""

from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from clocher_runtime.serve.chat import ChatAnswer
from clocher_runtime.serve.errors import ApiError
from clocher_runtime.serve.json_text import to_json
from clocher_runtime.serve.response_events import Event, ResponseStream
from clocher_runtime.text.answers import Delta


@dataclass(slots=True)
class ResponsesAnswer:
    """The answer to one request.

    Attributes:
        chat: makes it; it has one choice.
        stream: tells it.
    """

    chat: ChatAnswer
    stream: ResponseStream

    async def whole(self) -> dict[str, Any]:
        """Return the response that is not streamed.

        Raises:
            ApiError: the engine cannot go on.
        """
        async for step in self.chat.deltas():
            self._push(step)
        self.stream.finish(self.chat.choices[0].finish)
        return self.stream.response()

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the events of the response that is streamed; the last one tells how it ended."""
        yield _sent(self.stream.start())
        try:
            async for step in self.chat.deltas():
                if events := self._push(step):
                    yield _sent(events)
        except ApiError as error:
            yield _sent(self.stream.fail(error))
        else:
            yield _sent(self.stream.finish(self.chat.choices[0].finish))

    def _push(self, step: Iterable[tuple[int, list[Delta], str]]) -> list[Event]:
        calls = self.chat.choices[0].calls
        return [event for _, deltas, _ in step for event in self.stream.push(deltas, calls)]


def _sent(events: Sequence[Event]) -> bytes:
    """Return events as they are sent."""
    return b"".join(
        b"event: %s\ndata: %s\n\n" % (event["type"].encode(), to_json(event)) for event in events
    )
