"""What is wrong with a request, in one sentence about its first wrong field."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from clocher_runtime.serve.errors import ApiError, invalid, short

_TEXT_CHARS = 200


class Refused(ValueError):
    """What the validators of requests raise; pydantic wraps it.

    Args:
        message: a whole sentence.
        param: the field that is wrong; None: that which is being checked.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


def from_validation(error: ValidationError, body: object) -> ApiError:
    """Return the error of the first wrong field of a request.

    Args:
        error: what pydantic found.
        body: what it looked at; tells fields from the names that pydantic gives to alternatives.
    """
    found = error.errors(include_url=False)
    places = [_place(detail, body) for detail in found]
    first = [at for at, place in enumerate(places) if place[:1] == places[0][:1]]
    # Of a field with alternatives, that which got furthest says most; a wrong type says why other
    # fields are missing.
    deepest = places[max(first, key=lambda at: (len(places[at]), found[at]["type"] != "missing"))]
    details = [found[at] for at in first if places[at] == deepest]
    for detail in details:
        own = detail.get("ctx", {}).get("error")
        if isinstance(own, Refused):
            place = deepest if own.param is None else (*deepest, own.param)
            return invalid(str(own), _path(place) or None)
    if details[0]["type"].startswith("union_tag"):
        return _unknown_kind(deepest, details[0]["ctx"])
    where = _path(deepest)
    return invalid(f"{where or 'the body'} {_complaint(details)}", where or None)


def _unknown_kind(place: Sequence[int | str], context: Mapping[str, Any]) -> ApiError:
    """Return the error of an object that is none of some kinds.

    Args:
        place: where it stands.
        context: which field tells the kinds, what it says, and what they are.
    """
    # Where a function tells them, it reads the type.
    told = context["discriminator"].strip("'")
    param = _path((*place, "type" if told.endswith("()") else told))
    if "tag" not in context:
        return invalid(f"{param} is missing", param)
    expected = f"expected {context['expected_tags']}"
    return invalid(f"{param} is {short(context['tag'])}; {expected}", param)


def _complaint(details: Sequence[Mapping[str, Any]]) -> str:
    """Return what is wrong with a field, from one complaint for each of its alternatives."""
    if details[0]["type"] == "missing":
        return "is missing"
    texts = list(dict.fromkeys(detail["msg"] for detail in details))
    prefix = "Input should be "
    expected = [text.removeprefix(prefix) for text in texts if text.startswith(prefix)]
    got = _got(details[0]["input"])
    if details[0]["loc"][-1] == "[key]":
        return f"has the key {got}; {texts[0][:_TEXT_CHARS]}"
    if expected:
        return f"is {got}; expected {' or '.join(expected)}"
    return f"is {got}; {texts[0][:1].lower()}{texts[0][1:_TEXT_CHARS]}"


def _place(detail: Mapping[str, Any], body: Any) -> tuple[int | str, ...]:
    """Return the keys and indices that lead to a wrong field, without names of alternatives."""
    place: list[int | str] = []
    for step in _without_key(detail["loc"]):
        if isinstance(body, list):
            inside = isinstance(step, int) and step < len(body)
        else:
            inside = isinstance(body, Mapping) and step in body
        if inside:
            body = body[step]
            place.append(step)
    return (*place, detail["loc"][-1]) if detail["type"] == "missing" else tuple(place)


def _without_key(loc: Sequence[int | str]) -> Sequence[int | str]:
    """Return where an object stands one of whose keys is wrong; other places as they are."""
    return loc[:-2] if loc[-1:] == ("[key]",) else loc


def _path(place: Sequence[int | str]) -> str:
    """Return a place as people write it: messages[3].content."""
    steps = (f"[{step}]" if isinstance(step, int) else f".{step:.64}" for step in place)
    return "".join(steps).removeprefix(".")


def _got(value: object) -> str:
    """Return what came, without what is inside."""
    match value:
        case list():
            return f"a list of {len(value)}"
        case dict():
            return "an object"
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case _:
            return short(value)
