"""Answers of /v1/chat/completions: a whole message, or chunks of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ridgeline.engine import Completion, Delta, Output
from ridgeline.server.protocol.replies.call_parser import CallPart, CallStart, Text
from ridgeline.server.protocol.replies.logprobs import TokenTexts
from ridgeline.server.protocol.replies.output_parser import OutputEvent, OutputParser, Thought
from ridgeline.server.protocol.replies.reply import (
    ChunkReply,
    check_ended_well,
    shows_thoughts,
    usage_of,
)
from ridgeline.server.protocol.replies.sse import compact, quoted


class ChatReply(ChunkReply):
    prefix = "chatcmpl-"
    chunk_object = "chat.completion.chunk"

    def prepare(self) -> None:
        (prompt,) = self.prompts
        num = prompt.sampling.n
        self._texts = TokenTexts(self.tokenizer)
        self._wants_logprobs = prompt.sampling.logprobs is not None
        self._parsers = [OutputParser(prompt) for _ in range(num)]
        self._shows_thoughts = shows_thoughts(self.asked)
        self.prepare_chunks(num)
        is_plain = prompt.calls is None and not self._wants_logprobs
        self._is_plain = is_plain and not self.has_extras
        # Whether a choice's text can go out as it comes.
        self._passes = [self._is_plain and prompt.thinking is None] * num
        self._text_heads = [
            f'data: {self.head}{{"index":{index},"delta":{{"content":'.encode()
            for index in range(num)
        ]
        self._text_tail = f'}},"logprobs":null,"finish_reason":null}}{self.tail}\n\n'.encode()

    def start(self) -> list[bytes]:
        chunks = [
            self._chunk(index, '"role":"assistant","content":""')
            for index in range(len(self._parsers))
        ]
        if self.asked.returns_ids:
            ids = compact(self.prompts[0].ids).encode()
            chunks[0] = chunks[0].replace(b"data: {", b'data: {"prompt_token_ids":%b,' % ids, 1)
        return chunks

    def delta(self, delta: Delta, prompt: int = 0) -> bytes:
        if self._passes[delta.sample] and delta.finish_reason is None:
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
        return [*events, *self.last_events(self._usage(output))]

    def whole(self, outputs: Sequence[Output]) -> bytes:
        check_ended_well(outputs)
        (output,) = outputs
        choices = [self._choice(*each) for each in enumerate(output.completions)]
        more: dict[str, Any] = {}
        if self.asked.returns_ids:
            more["prompt_token_ids"] = self.prompts[0].ids
        return self.whole_body("chat.completion", choices, self._usage(output), **more)

    def _usage(self, output: Output) -> dict[str, Any]:
        pairs = zip(self._parsers, output.completions, strict=True)
        num = sum(parser.num_thought_tokens(made.tokens, self.tokenizer) for parser, made in pairs)
        return usage_of([output], num_thought_tokens=num)

    def _delta(self, delta: Delta) -> bytes:
        index, parser = delta.sample, self._parsers[delta.sample]
        if self.has_extras:
            self.note_tokens(index, delta.tokens)
        events = parser.push(delta.text)
        if delta.finish_reason is not None:
            events += parser.finish()
        self._passes[index] = self._is_plain and parser.is_answer
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

    def _field(self, choice: int, event: OutputEvent) -> str:
        """What an event puts into a chunk's delta; nothing for the end of a call."""
        match event:
            case Thought(text):
                return f'"reasoning_content":{quoted(text)}' if self._shows_thoughts else ""
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
        parser = self._parsers[index]
        events = [*parser.push(made.text), *parser.finish()]
        message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
        text = "".join(event.text for event in events if isinstance(event, Text))
        if text or not parser.num_calls:
            message["content"] = text
        thought = "".join(event.text for event in events if isinstance(event, Thought))
        if thought and self._shows_thoughts:
            message["reasoning_content"] = thought
        if parser.num_calls:
            message["tool_calls"] = [
                self._tool_call(index, start, events)
                for start in events
                if isinstance(start, CallStart)
            ]
        logprobs = None
        if made.logprobs is not None:
            logprobs = {"content": self._texts.entries(made.logprobs), "refusal": None}
        choice = {
            "index": index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": self._reason(index, made.finish_reason),
        }
        return {**choice, "token_ids": made.tokens} if self.asked.returns_ids else choice

    def _tool_call(
        self, choice: int, start: CallStart, events: list[OutputEvent]
    ) -> dict[str, Any]:
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
