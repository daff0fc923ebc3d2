"""The output of a response, item by item: messages and function calls, and the events of each.

What the parser of calls finds goes in; (kind, fields) of the stream's events come out, in the order
that API has: an item is added, its parts grow, parts and item are done. A whole answer is the same
without its events.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ridgeline.server.protocol.replies.call_parser import (
    CallEnd,
    CallEvent,
    CallPart,
    CallStart,
    Text,
)

ItemFields = dict[str, Any]


class ItemEvent(NamedTuple):
    kind: str
    fields: ItemFields


class ResponseItems:
    def __init__(self, request_id: str) -> None:
        self.items: list[ItemFields] = []
        self.is_message_open = False
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

    def take(self, event: CallEvent) -> list[ItemEvent]:
        match event:
            case Text(text):
                return [*self._open_message(), self._text(text)]
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
        events = [] if self.items else self._open_message()
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

    def _open_message(self) -> list[ItemEvent]:
        if self.is_message_open:
            return []
        message = {"id": "msg", "type": "message", "role": "assistant", "content": []}
        added = self._begin({**message, "status": "in_progress"})
        self.is_message_open = True
        fields = {**self._place(), "content_index": 0, "part": self._part()}
        return [added, ItemEvent("response.content_part.added", fields)]

    def _open_call(self, name: str) -> list[ItemEvent]:
        events = self._close()
        call = {"id": "fc", "type": "function_call", "name": name, "arguments": ""}
        added = self._begin({**call, "status": "in_progress"})
        assert self._open is not None, "it was just opened"
        self._open["call_id"] = f"call_{self.item_id}"
        added.fields["item"]["call_id"] = self._open["call_id"]
        return [*events, added]

    def _text(self, text: str) -> ItemEvent:
        entries, self._waiting = self._waiting, []
        self._pieces.append(text)
        self._logprobs += entries
        fields = {**self._place(), "content_index": 0, "delta": text, "logprobs": entries}
        return ItemEvent("response.output_text.delta", fields)

    def _part(self) -> ItemFields:
        text = "".join(self._pieces)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs}

    def _close(self) -> list[ItemEvent]:
        if self._open is None:
            return []
        item, place = self._open, self._place()
        whole = "".join(self._pieces)
        if self.is_message_open:
            self._logprobs += self._waiting
            self._waiting = []
            place["content_index"] = 0
            part = self._part()
            item["content"] = [part]
            done = {**place, "text": whole, "logprobs": self._logprobs}
            events = [
                ItemEvent("response.output_text.done", done),
                ItemEvent("response.content_part.done", {**place, "part": part}),
            ]
        else:
            item["arguments"] = whole
            done = {**place, "name": item["name"], "arguments": whole}
            events = [ItemEvent("response.function_call_arguments.done", done)]
        item["status"] = self.end_status
        self._open, self.is_message_open = None, False
        fields = {"output_index": len(self.items) - 1, "item": item}
        return [*events, ItemEvent("response.output_item.done", fields)]
