"""How an answer of a chat ends: by its own end, by a stop string, by a call too many."""

import pytest

from clocher_runtime.serve.answers import ChatChoice
from clocher_runtime.serve.messages import Made
from clocher_runtime.text.answers import Delta, StopStrings


class Script:
    """A reader that finds in each token what a script says."""

    def __init__(self, *steps: list[Delta]) -> None:
        self._steps = steps

    def push(self, token: int) -> list[Delta]:
        """Return what the script says of a token."""
        return self._steps[token]

    def finish(self) -> list[Delta]:
        """Return nothing."""
        return []


TWO_CALLS = (
    [Delta("content", "I lo")],
    [Delta("tool_call", "f", 0)],
    [Delta("arguments", "{}", 0), Delta("content", "I lo"), Delta("tool_call", "g", 1)],
    [Delta("arguments", "{}", 1)],
)


def said(choice: ChatChoice, tokens: int) -> list[Delta]:
    deltas: list[Delta] = []
    for token in range(tokens):
        if not choice.finish:
            deltas += choice.push(Made(0, token, "stop" if token == tokens - 1 else ""))
    return deltas


@pytest.mark.parametrize("stops", [(), ("love",)])
def test_without_parallel_calls_the_first_one_is_the_last(stops: tuple[str, ...]) -> None:
    choice = ChatChoice(reader=Script(*TWO_CALLS), stops=StopStrings(stops), one_call=True)
    deltas = said(choice, 4)
    assert choice.finish == "tool_calls" and list(choice.calls) == [0]
    assert [delta.text for delta in deltas if delta.kind == "tool_call"] == ["f"]
    assert "".join(d.text for d in deltas if d.kind == "content") == "I loI lo"
    assert {delta.index for delta in deltas} == {0}


def test_with_parallel_calls_all_are_told() -> None:
    choice = ChatChoice(reader=Script(*TWO_CALLS), stops=StopStrings(()))
    deltas = said(choice, 4)
    assert choice.finish == "tool_calls" and list(choice.calls) == [0, 1]
    assert [delta.text for delta in deltas if delta.kind == "tool_call"] == ["f", "g"]
