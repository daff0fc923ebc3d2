"""Outputs of models with tools: which of the text is content and which are calls, as it comes.

Hermes and Qwen write calls between tags, with or without text around them; Llama 3 writes JSON and
nothing else, several calls with `;` between them. What looks like a call and is none (a function
that was not offered, no JSON) stays text.

    parser = CallParser(calls)
    for event in parser.push(delta.text): ...       # Text, CallStart, CallPart, CallEnd
    for event in parser.finish(): ...
"""

from __future__ import annotations

from typing import NamedTuple

from ridgeline.server.protocol.replies.call_scanner import SPACE, CallScanner
from ridgeline.server.protocol.requests.asked import Calls
from ridgeline.server.protocol.tools import CLOSE_TAG, OPEN_TAG

PYTHON_TAG = "<|python_tag|>"  # Llama 3 may put it before a call


class Text(NamedTuple):
    text: str


class CallStart(NamedTuple):
    number: int  # of the call, in its output
    name: str


class CallPart(NamedTuple):
    number: int
    arguments: str  # the next part of them


class CallEnd(NamedTuple):
    number: int


CallEvent = Text | CallStart | CallPart | CallEnd


class CallParser:
    """One output. Text between calls that is only white space is dropped."""

    def __init__(self, calls: Calls | None) -> None:
        self.num_calls = 0
        self._calls = calls
        self._is_hermes = calls is not None and calls.format == "hermes"
        self._held = ""  # may be white space before a call, or the beginning of a tag
        self._scanner: CallScanner | None = None
        self._opening = ""  # what stood before the call that is being read
        self._is_text = calls is None  # no call can come any more
        self._is_after = False  # of a call: what closes it is skipped
        self._is_silent = False  # one call was wanted, and it is over

    def push(self, text: str) -> list[CallEvent]:
        if self._is_text:
            return [Text(text)] if text else []
        events: list[CallEvent] = []
        self._held += text
        while self._held and self._advance(events):
            pass
        return events

    def finish(self) -> list[CallEvent]:
        """Nothing more comes: what was kept is text after all, and a call ends where it is."""
        events: list[CallEvent] = []
        scanner, self._scanner = self._scanner, None
        if scanner is not None and scanner.name is not None:
            events.append(CallEnd(self.num_calls - 1))
        elif scanner is not None:
            _add_text(events, self._opening + scanner.raw)
        elif not self._is_silent and not (self.num_calls and not self._held.strip(SPACE + ";")):
            _add_text(events, self._held)
        self._held, self._is_text = "", True
        return events

    def _advance(self, events: list[CallEvent]) -> bool:
        """One part of what is held; whether there may be more to do."""
        if self._is_silent:
            self._held = ""
            return False
        if self._is_text:
            _add_text(events, self._held)
            self._held = ""
            return False
        if self._scanner is not None:
            return self._scan(events, self._scanner)
        return self._look_for_tag(events) if self._is_hermes else self._look_for_json(events)

    def _scan(self, events: list[CallEvent], scanner: CallScanner) -> bool:
        had_name = scanner.name is not None
        arguments = scanner.push(self._held)
        self._held = ""
        if scanner.name is not None and not had_name:
            events.append(CallStart(self.num_calls, scanner.name))
            self.num_calls += 1
        if arguments:
            events.append(CallPart(self.num_calls - 1, arguments))
        if not scanner.is_over:
            return False
        self._held, self._scanner = scanner.rest, None
        if scanner.phase == "failed":
            _add_text(events, self._opening + scanner.raw)
            self._is_text = not self._is_hermes
            return True
        events.append(CallEnd(self.num_calls - 1))
        assert self._calls is not None, "calls are read where there are tools"
        self._is_after = True
        self._is_silent = not self._calls.parallel
        return True

    def _look_for_tag(self, events: list[CallEvent]) -> bool:
        if self._is_after:
            stripped = self._held.lstrip(SPACE)
            if CLOSE_TAG.startswith(stripped):
                if stripped == CLOSE_TAG:
                    self._held, self._is_after = "", False
                return False
            self._held = stripped.removeprefix(CLOSE_TAG)
            self._is_after = False
        before, tag, behind = self._held.partition(OPEN_TAG)
        if tag:
            content = before.rstrip(SPACE)
            _add_text(events, content)
            self._begin(before[len(content) :] + tag, behind)
            return True
        keep = _end_to_keep(self._held, OPEN_TAG)
        _add_text(events, self._held[: len(self._held) - keep])
        self._held = self._held[len(self._held) - keep :]
        return False

    def _look_for_json(self, events: list[CallEvent]) -> bool:
        """A call stands at the beginning, or behind another one."""
        stripped = self._held.lstrip(SPACE + (";" if self._is_after else ""))
        stripped = stripped.removeprefix(PYTHON_TAG).lstrip(SPACE)
        if stripped.startswith("{"):
            self._begin(self._held[: len(self._held) - len(stripped)], stripped)
            return True
        self._is_text = not PYTHON_TAG.startswith(stripped)
        if self._is_text and self._is_after:
            self._held = stripped
        return self._is_text

    def _begin(self, opening: str, behind: str) -> None:
        assert self._calls is not None, "calls are read where there are tools"
        self._scanner = CallScanner(self._calls.names)
        self._opening, self._held = opening, behind
        self._is_after = False


def _add_text(events: list[CallEvent], text: str) -> None:
    if not text:
        return
    if events and isinstance(events[-1], Text):
        events[-1] = Text(events[-1].text + text)
    else:
        events.append(Text(text))


def _end_to_keep(text: str, tag: str) -> int:
    """Length of the end that may be white space before a tag, and the tag's beginning."""
    size = next(
        (size for size in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:size])),
        0,
    )
    body = text[: len(text) - size]
    return size + len(body) - len(body.rstrip(SPACE))
