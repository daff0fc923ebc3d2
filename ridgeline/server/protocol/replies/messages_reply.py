"""Answers of /v1/messages: a message of Anthropic's API, or the events of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ridgeline.engine import Completion, Delta, Output
from ridgeline.server.protocol.errors import ApiError, messages_error
from ridgeline.server.protocol.replies.content_blocks import DELTA, ContentBlockList, EventFields
from ridgeline.server.protocol.replies.output_parser import OutputEvent, OutputParser, Thought
from ridgeline.server.protocol.replies.reply import (
    StreamedReply,
    check_ended_well,
    shows_thoughts,
)
from ridgeline.server.protocol.replies.sse import compact, event, quoted


class MessagesReply(StreamedReply):
    prefix = "msg_"

    def prepare(self) -> None:
        (prompt,) = self.prompts
        self._parser = OutputParser(prompt)
        self._is_plain = prompt.calls is None
        self._shows_thoughts = shows_thoughts(self.asked)
        self._blocks = ContentBlockList(self.request_id)

    def start(self) -> list[bytes]:
        usage = _usage(len(self.prompts[0].ids))  # what was cached is told at the end
        message = self._message([], None, None, usage)
        return [_event({"type": "message_start", "message": message}), _event({"type": "ping"})]

    def delta(self, delta: Delta, prompt: int = 0) -> bytes:
        if self._is_plain and self._blocks.is_text_open:  # and so its thought is over
            return self._plain_delta(delta.text) if delta.text else b""
        return b"".join([_event(made) for made in self._take(delta.text)])

    def finish(self, outputs: Sequence[Output]) -> list[bytes]:
        (made,) = outputs[0].completions
        reason, stop_text = self._stop(made)
        last = {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": stop_text},
            "usage": self._usage_of(outputs[0]),
        }
        return [_event(fields) for fields in (*self._end(), last, {"type": "message_stop"})]

    def failed(self, error: ApiError) -> bytes:
        return _event(messages_error(error, self.request_id))

    def whole(self, outputs: Sequence[Output]) -> bytes:
        check_ended_well(outputs)
        (made,) = outputs[0].completions
        self._take(made.text)
        self._end()
        reason, stop_text = self._stop(made)
        message = self._message(self._blocks.blocks, reason, stop_text, self._usage_of(outputs[0]))
        return compact(message).encode()

    def _take(self, text: str) -> list[EventFields]:
        return self._blocks_of(self._parser.push(text))

    def _end(self) -> list[EventFields]:
        return [*self._blocks_of(self._parser.finish()), *self._blocks.close()]

    def _blocks_of(self, parts: Sequence[OutputEvent]) -> list[EventFields]:
        return [
            made
            for part in parts
            if self._shows_thoughts or not isinstance(part, Thought)
            for made in self._blocks.take(part)
        ]

    def _plain_delta(self, text: str) -> bytes:
        """By hand: this is most of a stream."""
        self._blocks.quick_text(text)
        return event(
            DELTA,
            f'{{"type":"{DELTA}","index":{self._blocks.index},'
            f'"delta":{{"type":"text_delta","text":{quoted(text)}}}}}',
        )

    def _stop(self, made: Completion) -> tuple[str, str | None]:
        """Why the message ended, and the stop sequence that ended it."""
        if made.stop_text is not None and made.stop_text in self.asked.request.stops():
            return "stop_sequence", made.stop_text
        if made.finish_reason == "length":
            is_cut = len(made.tokens) >= self.asked.request.max_tokens
            return "max_tokens" if is_cut else "model_context_window_exceeded", None
        return "tool_use" if self._parser.num_calls else "end_turn", None

    def _usage_of(self, output: Output) -> dict[str, Any]:
        (made,) = output.completions
        return _usage(
            output.num_prompt_tokens,
            num_cached=output.num_cached_tokens,
            num_output=len(made.tokens),
            num_thought=self._parser.num_thought_tokens(made.tokens, self.tokenizer),
        )

    def _message(
        self,
        content: list[EventFields],
        reason: str | None,
        stop_text: str | None,
        usage: dict[str, Any],
    ) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.asked.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop_text,
            "usage": usage,
        }


def _event(fields: EventFields) -> bytes:
    return event(fields["type"], compact(fields))


def _usage(
    num_prompt: int, num_cached: int = 0, num_output: int = 0, num_thought: int = 0
) -> dict[str, Any]:
    """Input is told without what the prefix cache had."""
    return {
        "input_tokens": num_prompt - num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": num_output,
        "output_tokens_details": {"thinking_tokens": num_thought},
    }
