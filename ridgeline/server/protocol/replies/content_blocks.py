"""The content of a message in Anthropic's API, block by block, and the events of each.

What the parser of outputs finds goes in; events of the stream come out: a block starts, grows and
stops before the next one starts. A whole answer is the same without its events.
"""

from __future__ import annotations

from typing import Any

from pydantic_core import from_json

from ridgeline.server.protocol.replies.call_parser import CallEnd, CallPart, CallStart, Text
from ridgeline.server.protocol.replies.output_parser import OutputEvent, Thought

EventFields = dict[str, Any]
START, DELTA, STOP = "content_block_start", "content_block_delta", "content_block_stop"


class ContentBlockList:
    def __init__(self, request_id: str) -> None:
        self.blocks: list[EventFields] = []
        self._request_id = request_id
        self._open: str | None = None  # the type of the last of the blocks, while it grows
        self._pieces: list[str] = []  # of its text or arguments

    @property
    def index(self) -> int:
        """Of the block that grows."""
        return len(self.blocks) - 1

    @property
    def is_text_open(self) -> bool:
        return self._open == "text"

    def take(self, event: OutputEvent) -> list[EventFields]:
        match event:
            case Thought(text):
                # Nobody checks a signature here; clients want one.
                empty = {"type": "thinking", "thinking": "", "signature": ""}
                return self._grow(empty, "thinking_delta", "thinking", text)
            case Text(text):
                return self._grow({"type": "text", "text": ""}, "text_delta", "text", text)
            case CallStart(number, name):
                call_id = f"toolu_{self._request_id}-{number}"
                return self._begin({"type": "tool_use", "id": call_id, "name": name, "input": {}})
            case CallPart(_, arguments):
                return [self._delta("input_json_delta", "partial_json", arguments)]
            case CallEnd():
                return self.close()
        raise AssertionError(f"no event: {event!r}")

    def quick_text(self, text: str) -> None:
        """More of the text that is open, whose event the caller makes."""
        self._pieces.append(text)

    def close(self) -> list[EventFields]:
        if self._open is None:
            return []
        whole, block = "".join(self._pieces), self.blocks[-1]
        if self._open == "tool_use":
            block["input"] = _object_in(whole)
        else:
            block[self._open] = whole
        self._open, self._pieces = None, []
        return [{"type": STOP, "index": self.index}]

    def _grow(self, empty: EventFields, kind: str, field: str, text: str) -> list[EventFields]:
        begun = [] if self._open == empty["type"] else self._begin(empty)
        return [*begun, self._delta(kind, field, text)]

    def _begin(self, empty: EventFields) -> list[EventFields]:
        closed = self.close()
        self.blocks.append(empty)
        self._open = empty["type"]
        return [*closed, {"type": START, "index": self.index, "content_block": dict(empty)}]

    def _delta(self, kind: str, field: str, text: str) -> EventFields:
        self._pieces.append(text)
        return {"type": DELTA, "index": self.index, "delta": {"type": kind, field: text}}


def _object_in(arguments: str) -> EventFields:
    """A call's arguments; of one that was cut off at max_tokens what there is of them."""
    try:
        value = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
