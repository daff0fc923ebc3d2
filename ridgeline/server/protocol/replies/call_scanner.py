"""One call of a tool, `{"name": "f", "arguments": {…}}`, read while it is being written.

The arguments go out as the model writes them, from the moment their object begins and the name is
known. Until then everything is kept, so that what turns out to be no call can still be text.

    scanner = CallScanner(frozenset({"f"}))
    scanner.push('{"name": "f", "argu')     # -> ""        scanner.name is None
    scanner.push('ments": {"a": 1')         # -> '{"a": 1' scanner.name == "f"
    scanner.push('}} and so on')            # -> '}'       scanner.rest == " and so on"
"""

from __future__ import annotations

import json
from typing import Literal

ARGUMENT_KEYS = ("arguments", "parameters")
SPACE = " \t\r\n"
ScanPhase = Literal["open", "key", "colon", "value", "comma", "done", "failed"]


class CallScanner:
    def __init__(self, names: frozenset[str]) -> None:
        self.phase: ScanPhase = "open"
        self.name: str | None = None  # known once arguments go out
        self.rest = ""  # what came behind the call, or with what made it none
        self._names = names
        self._raw: list[str] = []  # all that was read, until arguments go out
        self._found_name: str | None = None
        self._key = ""
        self._piece: list[str] = []  # of the key or value that is being read
        self._arguments: str | None = None  # that came before the name
        self._depth = 0
        self._in_string = self._escaped = False
        self._is_streaming = False

    @property
    def is_over(self) -> bool:
        return self.phase in ("done", "failed")

    @property
    def raw(self) -> str:
        """What it has read, of something that is no call."""
        return "".join(self._raw)

    def push(self, text: str) -> str:
        """Take text; the part of the arguments that may go out."""
        out = []
        for index, char in enumerate(text):
            if self.name is None:
                self._raw.append(char)
            out.append(self._take(char))
            if self.is_over:
                self.rest = text[index + 1 :]
                break
        return "".join(out)

    def _take(self, char: str) -> str:
        if self.phase == "value":
            return self._take_value(char)
        if self.phase == "key" and (self._in_string or self._piece):
            self._take_key(char)
        elif char in SPACE:
            pass
        elif self.phase == "open" and char == "{":
            self.phase = "key"
        elif self.phase == "key" and char == '"':
            self._piece, self._in_string = [char], True
        elif self.phase == "colon" and char == ":":
            self.phase, self._piece = "value", []
        elif self.phase == "comma" and char == ",":
            self.phase = "key"
        elif self.phase == "comma" and char == "}":
            return self._close()
        else:
            self._fail()
        return ""

    def _take_key(self, char: str) -> None:
        self._piece.append(char)
        self._follow_string(char)
        if not self._in_string:
            self._key = _decoded("".join(self._piece))
            self.phase, self._piece = "colon", []

    def _follow_string(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False

    def _take_value(self, char: str) -> str:
        if self._in_string:
            self._follow_string(char)
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]" and self._depth:
            self._depth -= 1
        elif not self._depth and (char in ",}" or (char in SPACE and self._piece)):
            return self._end_value() + (self._take(char) if not self.is_over else "")
        elif not self._piece and char in SPACE:
            return ""
        return self._keep(char)

    def _keep(self, char: str) -> str:
        """A character of a value; it goes out if it is one of the arguments of a known function."""
        is_first = not self._piece
        self._piece.append(char)
        if is_first and char == "{" and self._key in ARGUMENT_KEYS and self.name is None:
            self._is_streaming = self._found_name is not None
            if self._is_streaming:
                self.name = self._found_name
        is_ended = not self._depth and not self._in_string and char in '}]"'
        out = char if self._is_streaming else ""
        return out + self._end_value() if is_ended else out

    def _end_value(self) -> str:
        text, self._piece, self.phase = "".join(self._piece), [], "comma"
        if self._is_streaming:
            self._is_streaming = False
        elif self.name is not None:
            pass  # what comes behind the arguments
        elif self._key == "name":
            self._found_name = _decoded(text)
            if self._found_name not in self._names:
                self._fail()
        elif self._key in ARGUMENT_KEYS:
            self._arguments = _as_object(text)
            if self._arguments is None:
                self._fail()
        return ""

    def _close(self) -> str:
        """The call is whole: without arguments so far, they go out now."""
        if self.name is not None:
            self.phase = "done"
            return ""
        if self._found_name is None:
            self._fail()
            return ""
        self.phase, self.name = "done", self._found_name
        return self._arguments or "{}"

    def _fail(self) -> None:
        """No call. Once arguments have gone out there is no way back: it ends as it is."""
        self.phase = "done" if self.name is not None else "failed"


def _decoded(literal: str) -> str:
    try:
        value = json.loads(literal)
    except ValueError:
        return ""
    return value if isinstance(value, str) else ""


def _as_object(text: str) -> str | None:
    """Arguments that were not written as an object behind the name: one in a string, none, or one
    that came first.
    """
    if text == "null":
        return "{}"
    inner = _decoded(text) if text.startswith('"') else text
    try:
        return inner if isinstance(json.loads(inner), dict) else None
    except (ValueError, RecursionError):
        return None
