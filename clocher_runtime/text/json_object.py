"""A JSON object followed as its text comes, piece by piece."""

import re
from typing import Literal

Event = Literal["more", "begins", "ends", "closed", "broken"]

_SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\]*')
_HEX = frozenset("0123456789abcdefABCDEF")
_LITERAL = re.compile(r"[-+.0-9A-Za-z]*")
_VALUE = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_MAX_LITERAL = 400
_MAX_KEY = 200
_MAX_DEPTH = 200

Expected = Literal["object", "key or }", "key", ":", "value", "value or ]", ", or end"]


class JsonObject:
    """Follows one object, and tells where the values of its own keys begin and end.

    Control characters in strings are taken as they are, as models write them.

    Attributes:
        key: whose value it is at; its text between the quotes.
    """

    def __init__(self) -> None:
        self.key = ""
        self._open: list[str] = []  # "{" and "["
        self._expected: Expected = "object"
        self._within: Literal["", "string", "escape", "literal"] = ""
        self._hex = 0  # digits that a \u still needs
        self._is_key, self._told = False, False
        self._piece = ""  # of a literal, or of a key of the object itself

    def follow(self, text: str, at: int) -> tuple[Event, int]:
        """Go on in a piece of text, to the next event.

        Returns:
            What happened, and where: "more": the piece is used up; "begins", "ends": here begins
            or ended a value of `key`; "closed": here ended the object; "broken": this character
            cannot be, in JSON. After the last two there is nothing to follow.
        """
        while at < len(text):
            if self._within == "string":
                at = self._string(text, at)
            elif self._within == "escape":
                if not self._escape(text[at]):
                    return "broken", at
                at += 1
                continue
            elif self._within == "literal":
                end = _match_end(_LITERAL, text, at)
                self._piece += text[at:end]
                at = end
                if len(self._piece) > _MAX_LITERAL:
                    return "broken", at
                if at == len(text):
                    break
                if not _VALUE.fullmatch(self._piece):
                    return "broken", at
                self._within = ""
            else:
                event, at = self._structure(text, at)
                if event != "more":
                    return event, at
                continue
            if not self._within and not self._is_key and len(self._open) == 1:
                return "ends", at
        return "more", at

    def _string(self, text: str, at: int) -> int:
        """Go on to the end of a string, or of the piece."""
        end = _match_end(_PLAIN, text, at)
        if self._is_key and len(self._open) == 1 and len(self._piece) <= _MAX_KEY:
            self._piece += text[at:end]
        if end == len(text):
            return end
        self._within = "escape" if text[end] == "\\" else ""
        if not self._within and self._is_key and len(self._open) == 1:
            self.key = self._piece
        return end + 1

    def _escape(self, character: str) -> bool:
        if self._hex:
            self._hex -= 1
            valid = character in _HEX
        else:
            self._hex = 4 if character == "u" else 0
            valid = character in '"\\/bfnrtu'
        if not self._hex:
            self._within = "string"
        return valid

    def _structure(self, text: str, at: int) -> tuple[Event, int]:
        """Take one character that is in no string and no literal, or the spaces before it."""
        end = _match_end(_SPACE, text, at)
        if end > at:
            return "more", end
        character, expected = text[at], self._expected
        if expected == "object":
            if character != "{":
                return "broken", at
            self._open.append("{")
            self._expected = "key or }"
        elif expected == ":":
            if character != ":":
                return "broken", at
            self._expected = "value"
        elif character == '"' and expected in ("key", "key or }"):
            self._within, self._is_key, self._piece = "string", True, ""
            self._expected = ":"
        elif expected in ("value", "value or ]") and character != "]":
            return self._value(character, at)
        elif character == "," and expected == ", or end":
            self._expected = "key" if self._open[-1] == "{" else "value"
        elif character == ("}" if self._open[-1] == "{" else "]") and "or" in expected:
            self._open.pop()
            self._expected = ", or end"
            if not self._open:
                return "closed", at + 1
            if len(self._open) == 1:
                return "ends", at + 1
        else:
            return "broken", at
        return "more", at + 1

    def _value(self, character: str, at: int) -> tuple[Event, int]:
        """Begin a value; one of the object itself is told before anything of it is taken."""
        if len(self._open) == 1 and not self._told:
            self._told = True
            return "begins", at
        self._told, self._is_key = False, False
        self._expected = ", or end"
        if character in "-0123456789tfn":
            self._within, self._piece = "literal", ""
            return "more", at
        if character == '"':
            self._within = "string"
        elif character in "{[" and len(self._open) < _MAX_DEPTH:
            self._open.append(character)
            self._expected = "key or }" if character == "{" else "value or ]"
        else:
            return "broken", at
        return "more", at + 1


def _match_end(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    assert found is not None  # all of them match the empty text
    return found.end()
