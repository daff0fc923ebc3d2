"""Answers of /v1/chat/completions: a whole message, or chunks of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ridgeline.engine import Completion, Delta, Output
from ridgeline.server.protocol.replies.call_parser import (
    CallEvent,
    CallParser,
    CallPart,
    CallStart,
    Text,
)
from ridgeline.server.protocol.replies.logprobs import TokenTexts
from ridgeline.server.protocol.replies.reply import ChunkReply, check_ended_well, usage_of
from ridgeline.server.protocol.replies.sse import compact, quoted


class ChatReply(ChunkReply):
    prefix = "chatcmpl-"
    chunk_object = "chat.completion.chunk"

    def prepare(self) -> None:
        (prompt,) = self.prompts
        self._calls, num = prompt.calls, prompt.sampling.n
        self._texts = TokenTexts(self.tokenizer)
        self._wants_logprobs = prompt.sampling.logprobs is not None
        self._is_plain = self._calls is None and not self._wants_logprobs
        self._parsers = [CallParser(self._calls) for _ in range(num)]
        self.prepare_chunks(num)
        self._text_heads = [
            f'data: {self.head}{{"index":{index},"delta":{{"content":'.encode()
            for index in range(num)
        ]
        self._text_tail = f'}},"logprobs":null,"finish_reason":null}}{self.tail}\n\n'.encode()

    def start(self) -> list[bytes]:
        return [
            self._chunk(index, '"role":"assistant","content":""')
            for index in range(len(self._parsers))
        ]

    def delta(self, delta: Delta, prompt: int = 0) -> bytes:
        if self._is_plain and delta.finish_reason is None:
            if not delta.text:
                return b""
            head = self._text_heads[delta.sample]
            return head + quoted(delta.text).encode() + self._text_tail
        return self._delta(delta)

    def finish(self, outputs: Sequence[Output]) -> list[bytes]:
        (output,) = outputs
        events = [
            self._chunk(index, "", finish_reason=self._reason(index, made.finish_reason))
            for index, made in enumerate(output.completions)
            if not self.ended[index]
        ]
        return [*events, *self.last_events(usage_of(outputs))]

    def whole(self, outputs: Sequence[Output]) -> bytes:
        check_ended_well(outputs)
        (output,) = outputs
        choices = [self._choice(*each) for each in enumerate(output.completions)]
        return self.whole_body("chat.completion", choices, usage_of(outputs))

    def _delta(self, delta: Delta) -> bytes:
        index, parser = delta.sample, self._parsers[delta.sample]
        events = parser.push(delta.text)
        if delta.finish_reason is not None:
            events += parser.finish()
        fields = [field for event in events if (field := self._field(index, event))]
        logprobs = "null"
        if self._wants_logprobs and delta.logprobs:
            entries = compact(self._texts.entries(delta.logprobs))
            logprobs = f'{{"content":{entries},"refusal":null}}'
            fields = fields or ['"content":""']
        chunks = []
        for field in fields:
            chunks.append(self._chunk(index, field, logprobs))
            logprobs = "null"
        if delta.finish_reason is not None:
            self.ended[index] = True
            reason = self._reason(index, delta.finish_reason)
            chunks.append(self._chunk(index, "", finish_reason=reason))
        return b"".join(chunks)

    def _field(self, choice: int, event: CallEvent) -> str:
        """What an event puts into a chunk's delta; nothing for the end of a call."""
        match event:
            case Text(text):
                return f'"content":{quoted(text)}'
            case CallStart(number, name):
                call_id = quoted(self._call_id(choice, number))
                function = f'{{"name":{quoted(name)},"arguments":""}}'
                return (
                    f'"tool_calls":[{{"index":{number},"id":{call_id},"type":"function",'
                    f'"function":{function}}}]'
                )
            case CallPart(number, arguments):
                function = f'{{"arguments":{quoted(arguments)}}}'
                return f'"tool_calls":[{{"index":{number},"function":{function}}}]'
        return ""

    def _chunk(
        self, index: int, field: str, logprobs: str = "null", finish_reason: str | None = None
    ) -> bytes:
        return self.chunk(index, f'"delta":{{{field}}}', logprobs, finish_reason)

    def _reason(self, index: int, reason: str | None) -> str:
        called = self._parsers[index].num_calls > 0
        return "tool_calls" if called and reason != "length" else reason or "stop"

    def _call_id(self, choice: int, number: int) -> str:
        return f"call_{self.request_id}-{choice}-{number}"

    def _choice(self, index: int, made: Completion) -> dict[str, Any]:
        parser = self._parsers[index] = CallParser(self._calls)
        events = [*parser.push(made.text), *parser.finish()]
        message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
        text = "".join(event.text for event in events if isinstance(event, Text))
        if text or not parser.num_calls:
            message["content"] = text
        if parser.num_calls:
            message["tool_calls"] = [
                self._tool_call(index, start, events)
                for start in events
                if isinstance(start, CallStart)
            ]
        logprobs = None
        if made.logprobs is not None:
            logprobs = {"content": self._texts.entries(made.logprobs), "refusal": None}
        return {
            "index": index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": self._reason(index, made.finish_reason),
        }

    def _tool_call(self, choice: int, start: CallStart, events: list[CallEvent]) -> dict[str, Any]:
        arguments = "".join(
            event.arguments
            for event in events
            if isinstance(event, CallPart) and event.number == start.number
        )
        return {
            "id": self._call_id(choice, start.number),
            "type": "function",
            "function": {"name": start.name, "arguments": arguments},
        }
