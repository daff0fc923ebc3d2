"""Answers of /v1/responses: a response object, or the events of that API, numbered from 0."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from ridgeline.engine import Delta, Output
from ridgeline.server.protocol.errors import SERVER_ERROR, ApiError
from ridgeline.server.protocol.replies.logprobs import TokenTexts
from ridgeline.server.protocol.replies.output_parser import OutputParser
from ridgeline.server.protocol.replies.reply import (
    StreamedReply,
    check_ended_well,
    shows_thoughts,
    usage_of,
)
from ridgeline.server.protocol.replies.response_items import ItemEvent, ResponseItems
from ridgeline.server.protocol.replies.sse import compact, event, quoted

TEXT_DELTA = "response.output_text.delta"


class ResponsesReply(StreamedReply):
    prefix = "resp_"

    def prepare(self) -> None:
        (prompt,) = self.prompts
        self._texts = TokenTexts(self.tokenizer)
        self._wants_logprobs = prompt.sampling.logprobs is not None
        self._is_plain = prompt.calls is None and not self._wants_logprobs
        self._parser = OutputParser(prompt)
        self._items = ResponseItems(self.request_id, shows_thoughts(self.asked))
        self._reason: str | None = None  # the finish reason, once it is known
        self._number = 0  # of the next event

    def start(self) -> list[bytes]:
        response = self._response("in_progress", None)
        return [
            self._event("response.created", {"response": response}),
            self._event("response.in_progress", {"response": response}),
        ]

    def delta(self, delta: Delta, prompt: int = 0) -> bytes:
        if self._is_plain and self._items.open_kind == "message" and delta.finish_reason is None:
            return self._plain_delta(delta.text) if delta.text else b""
        if self._wants_logprobs:
            self._items.take_logprobs(self._texts.entries(delta.logprobs))
        was_thought = self._parser.is_thought
        parsed = self._parser.push(delta.text)
        if was_thought or self._parser.is_thought:
            self._items.drop_logprobs()
        events = [made for part in parsed for made in self._items.take(part)]
        if delta.finish_reason is not None:
            events += self._end(delta.finish_reason)
        return b"".join([self._event(*made) for made in events])

    def finish(self, outputs: Sequence[Output]) -> list[bytes]:
        events = []
        if self._reason is None:  # its last delta was lost with a process that died
            events = self._end(outputs[0].completions[0].finish_reason or "stop")
        status = self._status()
        response = self._response(status, self._usage(outputs))
        return [
            *[self._event(*made) for made in events],
            self._event(f"response.{status}", {"response": response}),
        ]

    def failed(self, error: ApiError) -> bytes:
        code = SERVER_ERROR if error.status >= 500 else "invalid_prompt"
        response = self._response("failed", None)
        response["error"] = {"code": code, "message": error.message}
        return self._event("response.failed", {"response": response})

    def whole(self, outputs: Sequence[Output]) -> bytes:
        check_ended_well(outputs)
        (made,) = outputs[0].completions
        parts = self._parser.push(made.text)
        if made.logprobs is not None:
            first = self._parser.num_thought_tokens(made.tokens, self.tokenizer)
            self._items.take_logprobs(self._texts.entries(made.logprobs[first:]))
        for part in parts:
            self._items.take(part)
        self._end(made.finish_reason or "stop")
        return compact(self._response(self._status(), self._usage(outputs))).encode()

    def _usage(self, outputs: Sequence[Output]) -> dict[str, Any]:
        tokens = outputs[0].completions[0].tokens
        num = self._parser.num_thought_tokens(tokens, self.tokenizer)
        return usage_of(outputs, num_thought_tokens=num)

    def _end(self, reason: str) -> list[ItemEvent]:
        self._reason = reason
        if reason == "length":
            self._items.end_status = "incomplete"
        events = [made for part in self._parser.finish() for made in self._items.take(part)]
        return [*events, *self._items.finish()]

    def _status(self) -> str:
        return "incomplete" if self._reason == "length" else "completed"

    def _plain_delta(self, text: str) -> bytes:
        """By hand: this is most of a stream."""
        place = self._items.quick_text(text)
        number, self._number = self._number, self._number + 1
        return event(
            TEXT_DELTA,
            f'{{"type":"{TEXT_DELTA}","sequence_number":{number},'
            f'"item_id":{quoted(place["item_id"])},"output_index":{place["output_index"]},'
            f'"content_index":0,"delta":{quoted(text)},"logprobs":[]}}',
        )

    def _event(self, kind: str, fields: dict[str, Any]) -> bytes:
        number, self._number = self._number, self._number + 1
        return event(kind, compact({"type": kind, "sequence_number": number, **fields}))

    def _response(self, status: str, usage: dict[str, Any] | None) -> dict[str, Any]:
        request = self.asked.request
        given = request.model_dump(
            include={"instructions", "max_output_tokens", "temperature", "top_p", "user"}
        )
        is_cut = status == "incomplete"
        return {
            **given,
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "model": self.asked.model,
            "output": self._items.items if status != "in_progress" else [],
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": self._reasoning(),
            "service_tier": "default",
            "store": False,
            "text": self._text_options(),
            "tool_choice": self._tool_choice(),
            "tools": [_tool(tool) for tool in request.tools or ()],
            "top_logprobs": request.top_logprobs or 0,
            "truncation": "disabled",
            "usage": usage and _usage(usage),
            "metadata": request.metadata or {},
        }

    def _reasoning(self) -> dict[str, Any]:
        options = self.asked.request.reasoning
        return {"effort": None if options is None else options.effort, "summary": None}

    def _text_options(self) -> dict[str, Any]:
        options = self.asked.request.text
        if options is None or options.format is None:
            return {"format": {"type": "text"}}
        return {"format": options.format.model_dump(by_alias=True, exclude_none=True)}

    def _tool_choice(self) -> Any:
        choice = self.asked.request.tool_choice
        return (
            choice or "auto" if choice is None or isinstance(choice, str) else choice.model_dump()
        )


def _tool(tool: Any) -> dict[str, Any]:
    made: dict[str, Any] = tool.model_dump()
    return {**made, "strict": bool(tool.strict)}


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    """In that API's words."""
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage["completion_tokens_details"],
        "total_tokens": usage["total_tokens"],
    }
