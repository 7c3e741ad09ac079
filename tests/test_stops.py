"""Stop strings in text that comes in pieces."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from clocher_runtime.text.answers import StopStrings, open_length

TEXTS = st.text("ab", max_size=20)
STOPS = st.lists(st.text("ab", min_size=1, max_size=6), max_size=3)


@given(st.lists(TEXTS, max_size=8), STOPS)
@example(["aa", "b"], ["aab", "ab"])
@example(["xaa", "ab"], ["aab", "aaab"])
def test_a_text_in_pieces_ends_where_the_whole_does(pieces: list[str], stops: list[str]) -> None:
    whole = "".join(pieces)
    found = [(whole.index(stop), stop) for stop in stops if stop in whole]
    reader = StopStrings(stops)
    out = ""
    for end, piece in enumerate(pieces, start=1):
        out += reader.push(piece)
        # Nothing is given out that a stop string might take back, and nothing else is kept.
        if reader.found is None:
            seen = "".join(pieces[:end])
            sizes = range(1, len(seen) + 1)
            kept = [n for n in sizes if any(stop.startswith(seen[-n:]) for stop in stops)]
            assert out == seen[: len(seen) - max(kept, default=0)]
    out += reader.flush()
    if reader.found is None:
        assert not found and out == whole
    else:
        # A piece may complete two at once: the one that begins first counts.
        assert whole.startswith(out + reader.found) and reader.push("more") == reader.flush() == ""
        assert not any(stop in out for stop in stops)


@pytest.mark.parametrize(
    ("text", "stops", "length"),
    [("abc", ["cd"], 1), ("abc", ["bcd", "cx"], 2), ("abc", ["abc"], 0), ("", ["a"], 0)],
)
def test_how_much_may_begin_a_string(text: str, stops: list[str], length: int) -> None:
    assert open_length(text, stops) == length
