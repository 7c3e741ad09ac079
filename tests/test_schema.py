"""Documents held against their declared types: every message says where, what, and what instead."""

from typing import Annotated, Any

import pytest
from msgspec import Meta, Struct

from clocher_kernels.errors import FormatError, UnsupportedModel
from clocher_runtime.disk.strict_json import finite, given, one_of, read_as


class Inner(Struct, forbid_unknown_fields=True):
    count: Annotated[int, Meta(ge=1, le=9)]
    names: list[str] = []


class Outer(Struct, forbid_unknown_fields=True):
    inner: Inner
    share: Annotated[float, Meta(ge=0, le=1)] | None = None
    by_name: dict[str, Inner] = {}


GOOD = {"inner": {"count": 3}}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (7, "f.json is 7; expected an object"),
        ({}, "f.json: field 'inner' is missing"),
        ({**GOOD, "more": 1}, "f.json: unknown field 'more'; known: inner, share, by_name"),
        ({"inner": {"count": 0}}, "f.json: inner.count is 0; expected an integer >= 1"),
        ({"inner": {"count": 10}}, "f.json: inner.count is 10; expected an integer <= 9"),
        ({"inner": {"count": True}}, "f.json: inner.count is True; expected an integer"),
        ({"inner": {"count": 3.0}}, "f.json: inner.count is 3.0; expected an integer"),
        ({"inner": {"count": "3"}}, "f.json: inner.count is '3'; expected an integer"),
        ({"inner": {}}, "f.json: inner: field 'count' is missing"),
        ({"inner": {"count": 1, "x": 2}}, "f.json: inner: unknown field 'x'"),
        (
            {"inner": {"count": 1, "names": ["a", 2]}},
            "f.json: inner.names[1] is 2; expected text",
        ),
        ({**GOOD, "share": "x"}, "f.json: share is 'x'; expected a number or null"),
        ({**GOOD, "by_name": {"a": 1}}, "f.json: by_name[...]: expected an object, got an integer"),
        (
            {"inner": {"count": 10**5000}},
            "f.json: inner.count is a number of very many digits; exp",
        ),
    ],
)
def test_a_message_says_where_what_and_what_instead(value: Any, message: str) -> None:
    with pytest.raises(FormatError) as caught:
        read_as(value, Outer, "f.json")
    assert str(caught.value).startswith(message)


def test_a_long_value_is_quoted_in_part() -> None:
    with pytest.raises(FormatError) as caught:
        read_as({"inner": "x" * 100_000}, Outer, "f.json")
    assert len(str(caught.value)) < 200


def test_what_fits_is_returned() -> None:
    found = read_as({**GOOD, "share": 1}, Outer, "f.json")
    assert found == Outer(Inner(3), 1.0) and isinstance(found.share, float)


def test_a_setting_is_one_of_the_known_ones() -> None:
    assert one_of({"mode": None}, "mode", "a", ("a", "b"), "f.json") == "a"
    assert one_of({"mode": "b"}, "mode", "a", ("a", "b"), "f.json") == "b"
    for odd in (True, ["a"], "c"):
        with pytest.raises(UnsupportedModel, match=r"f\.json: mode .* known: 1, a; do so"):
            one_of({"mode": odd}, "mode", "a", (1, "a"), "f.json", "do so")


def test_null_stands_for_what_json_cannot_hold() -> None:
    nan, inf = float("nan"), float("inf")
    assert finite({"a": (1.0, nan), "b": [{"c": -inf}], "d": "x"}) == {
        "a": [1.0, None],
        "b": [{"c": None}],
        "d": "x",
    }
    assert given({"a": None, "b": 0}) == {"b": 0}
