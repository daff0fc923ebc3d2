"""The output of a response, item by item: reasoning, messages and function calls, and the events of
each.

What the parser of outputs finds goes in; (kind, fields) of the stream's events come out, in the
order that API has: an item is added, its parts grow, parts and item are done. A whole answer is the
same without its events.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from ridgeline.server.protocol.replies.call_parser import CallEnd, CallPart, CallStart, Text
from ridgeline.server.protocol.replies.output_parser import OutputEvent, Thought

ItemFields = dict[str, Any]
ItemKind = Literal["reasoning", "message", "call"]


class ItemEvent(NamedTuple):
    kind: str
    fields: ItemFields


class ResponseItems:
    def __init__(self, request_id: str, shows_thoughts: bool = True) -> None:
        self.items: list[ItemFields] = []
        self.open_kind: ItemKind | None = None
        self._shows_thoughts = shows_thoughts
        self.end_status = "completed"  # of what is open at the end
        self._request_id = request_id
        self._open: ItemFields | None = None  # the last of the items, while it grows
        self._pieces: list[str] = []  # of its text or arguments
        self._logprobs: list[ItemFields] = []
        self._waiting: list[ItemFields] = []  # of tokens whose text is not known yet

    @property
    def item_id(self) -> str:
        return f"{self._request_id}-{len(self.items) - 1}"

    def take_logprobs(self, entries: list[ItemFields]) -> None:
        """They go out with the next text."""
        self._waiting += entries

    def drop_logprobs(self) -> None:
        """Those that wait: their tokens are of a thought, which has no place for them."""
        self._waiting = []

    def take(self, event: OutputEvent) -> list[ItemEvent]:
        match event:
            case Thought(text):
                if not self._shows_thoughts:
                    return []
                return [*self._open_part("reasoning"), self._text(text)]
            case Text(text):
                return [*self._open_part("message"), self._text(text)]
            case CallStart(_, name):
                return self._open_call(name)
            case CallPart(_, arguments):
                self._pieces.append(arguments)
                fields = {**self._place(), "delta": arguments}
                return [ItemEvent("response.function_call_arguments.delta", fields)]
            case CallEnd():
                return self._close()
        raise AssertionError(f"no event: {event!r}")

    def finish(self) -> list[ItemEvent]:
        """Close what is open. An output without anything is an empty message."""
        events = [] if self.items else self._open_part("message")
        return [*events, *self._close()]

    def quick_text(self, text: str) -> ItemFields:
        """A text delta's fields, for a message that is open and has no logprobs."""
        return self._text(text).fields

    def _place(self) -> ItemFields:
        assert self._open is not None, "an item is open"
        return {"item_id": self._open["id"], "output_index": len(self.items) - 1}

    def _begin(self, item: ItemFields) -> ItemEvent:
        self.items.append(item)
        item["id"] = f"{item['id']}_{self.item_id}"
        self._open, self._pieces, self._logprobs = item, [], []
        fields = {"output_index": len(self.items) - 1, "item": dict(item)}
        return ItemEvent("response.output_item.added", fields)

    def _open_part(self, kind: Literal["reasoning", "message"]) -> list[ItemEvent]:
        """An item with one part of text, unless it is open already."""
        if self.open_kind == kind:
            return []
        closed = self._close()
        item: ItemFields = {"id": "rs", "type": "reasoning", "summary": [], "content": []}
        if kind == "message":
            item = {"id": "msg", "type": "message", "role": "assistant", "content": []}
        added = self._begin({**item, "status": "in_progress"})
        self.open_kind = kind
        fields = {**self._place(), "content_index": 0, "part": self._part()}
        return [*closed, added, ItemEvent("response.content_part.added", fields)]

    def _open_call(self, name: str) -> list[ItemEvent]:
        events = self._close()
        call = {"id": "fc", "type": "function_call", "name": name, "arguments": ""}
        added = self._begin({**call, "status": "in_progress"})
        assert self._open is not None, "it was just opened"
        self.open_kind = "call"
        self._open["call_id"] = f"call_{self.item_id}"
        added.fields["item"]["call_id"] = self._open["call_id"]
        return [*events, added]

    def _text(self, text: str) -> ItemEvent:
        self._pieces.append(text)
        fields = {**self._place(), "content_index": 0, "delta": text}
        if self.open_kind == "reasoning":
            return ItemEvent("response.reasoning_text.delta", fields)
        entries, self._waiting = self._waiting, []
        self._logprobs += entries
        return ItemEvent("response.output_text.delta", {**fields, "logprobs": entries})

    def _part(self) -> ItemFields:
        text = "".join(self._pieces)
        if self.open_kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs}

    def _close(self) -> list[ItemEvent]:
        if self._open is None:
            return []
        item = self._open
        events = self._close_call(item) if self.open_kind == "call" else self._close_part(item)
        item["status"] = self.end_status
        self._open = self.open_kind = None
        fields = {"output_index": len(self.items) - 1, "item": item}
        return [*events, ItemEvent("response.output_item.done", fields)]

    def _close_part(self, item: ItemFields) -> list[ItemEvent]:
        place = {**self._place(), "content_index": 0}
        if self.open_kind == "message":
            self._logprobs += self._waiting
            self._waiting = []
        part = self._part()
        item["content"] = [part]
        done: ItemFields = {**place, "text": part["text"]}
        if "logprobs" in part:
            done["logprobs"] = part["logprobs"]
        return [
            ItemEvent(f"response.{part['type']}.done", done),
            ItemEvent("response.content_part.done", {**place, "part": part}),
        ]

    def _close_call(self, item: ItemFields) -> list[ItemEvent]:
        item["arguments"] = whole = "".join(self._pieces)
        done = {**self._place(), "name": item["name"], "arguments": whole}
        return [ItemEvent("response.function_call_arguments.done", done)]
