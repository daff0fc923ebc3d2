"""Replies: what the engine gives becomes the JSON or the SSE bytes that a client gets.

    reply = reply_for(asked, prompts, tokenizer, request_id="…")
    send(b"".join(reply.start()))                       # streaming
    send(reply.delta(delta, prompt=0))                  # b"": nothing to tell yet
    send(b"".join(reply.finish(outputs)))               # the outputs of all prompts, in order
    send(reply.failed(error))                           # or instead of finish: ends the stream
    send(reply.whole(outputs))                          # not streaming: a JSON body

No locks: one thread at a time for one reply.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from ridgeline.data import Tokenizer
from ridgeline.engine import Delta, Output
from ridgeline.server.protocol.errors import ApiError, error_body, error_of
from ridgeline.server.protocol.replies.sse import DONE, compact, data, quoted
from ridgeline.server.protocol.requests.asked import Asked, ParsedPrompt


class Reply(ABC):
    """One request's answer. `prompt` is the number of the prompt in what `render` gave."""

    prefix = ""  # of the answer's id

    def __init__(
        self,
        asked: Asked,
        prompts: Sequence[ParsedPrompt],
        tokenizer: Tokenizer,
        request_id: str,
        created: float | None = None,
    ) -> None:
        self.asked, self.prompts, self.tokenizer = asked, prompts, tokenizer
        self.request_id, self.id = request_id, self.prefix + request_id
        self.created = int(time.time() if created is None else created)

    @abstractmethod
    def whole(self, outputs: Sequence[Output]) -> bytes:
        """The JSON body. Raises ApiError where an output did not end well."""


class StreamedReply(Reply):
    """A reply that can be streamed."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.prepare()

    @abstractmethod
    def prepare(self) -> None:
        """Make what this kind of reply needs besides."""

    @abstractmethod
    def start(self) -> list[bytes]:
        """The events before the first token."""

    @abstractmethod
    def delta(self, delta: Delta, prompt: int = 0) -> bytes:
        """The events that a delta makes; several of one output may be `merged` into one."""

    @abstractmethod
    def finish(self, outputs: Sequence[Output]) -> list[bytes]:
        """The last events, once every output has ended well."""

    def failed(self, error: ApiError) -> bytes:
        """The last events of a stream that cannot be finished."""
        return b"data: " + error_body(error) + b"\n\n" + DONE


class ChunkReply(StreamedReply):
    """One that is streamed as chunks with choices: their first and last parts never change, unless
    each tells the usage so far.
    """

    chunk_object = ""

    def prepare_chunks(self, num: int) -> None:
        """For so many choices."""
        self.ended = [False] * num  # whether a choice's finish reason was told
        common = f'"created":{self.created},"model":{quoted(self.asked.model)}'
        start = f'"id":{quoted(self.id)},"object":"{self.chunk_object}",{common}'
        self.head = f'{{{start},"choices":['
        self.tail = '],"usage":null}' if self.asked.include_usage else "]}"
        # Whether chunks have more than their text: then none is made by hand.
        self.has_extras = self.asked.usage_in_chunks or self.asked.returns_ids
        self._num_made = 0
        self._ids: list[list[int]] = [[] for _ in range(num)]  # not told yet

    def note_tokens(self, index: int, tokens: Sequence[int]) -> None:
        """For the extras: a choice has these more."""
        self._num_made += len(tokens)
        if self.asked.returns_ids:
            self._ids[index] += tokens

    def chunk(self, index: int, content: str, logprobs: str, finish_reason: str | None) -> bytes:
        """One event; `content` is the choice's own field."""
        reason = "null" if finish_reason is None else f'"{finish_reason}"'
        choice = f'"index":{index},{content},"logprobs":{logprobs},"finish_reason":{reason}'
        if self.asked.returns_ids:
            ids, self._ids[index] = self._ids[index], []
            choice += f',"token_ids":{compact(ids)}'
        return data(f"{self.head}{{{choice}}}{self._tail()}")

    def _tail(self) -> str:
        if not self.asked.usage_in_chunks:
            return self.tail
        num_prompt = sum(len(prompt.ids) for prompt in self.prompts)
        usage = {
            "prompt_tokens": num_prompt,
            "completion_tokens": self._num_made,
            "total_tokens": num_prompt + self._num_made,
        }
        return f'],"usage":{compact(usage)}}}'

    def last_events(self, usage: dict[str, Any]) -> list[bytes]:
        if not self.asked.include_usage:
            return [DONE]
        return [data(f'{self.head}],"usage":{compact(usage)}}}'), DONE]

    def whole_body(
        self, name: str, choices: list[Any], usage: dict[str, Any], **more: Any
    ) -> bytes:
        head = {"id": self.id, "object": name, "created": self.created, "model": self.asked.model}
        return compact({**head, "choices": choices, "usage": usage, **more}).encode()


def check_ended_well(outputs: Sequence[Output]) -> None:
    for output in outputs:
        error = error_of(output)
        if error is not None:
            raise error


def merged(first: Delta, second: Delta) -> Delta:
    """Two deltas in a row of the same output as one, for a client that lags."""
    return Delta(
        first.request_id,
        first.sample,
        first.text + second.text,
        first.tokens + second.tokens,
        second.finish_reason,
        first.logprobs + second.logprobs,
    )


def shows_thoughts(asked: Asked) -> bool:
    return asked.conversation is None or asked.conversation.thinking.is_shown


def usage_of(
    outputs: Sequence[Output], num_tokens: int | None = None, num_thought_tokens: int = 0
) -> dict[str, Any]:
    """`num_tokens` where not all that was made was asked for; of them the thoughts'."""
    prompt_tokens = sum(output.num_prompt_tokens for output in outputs)
    if num_tokens is None:
        num_tokens = sum(len(made.tokens) for output in outputs for made in output.completions)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": num_tokens,
        "total_tokens": prompt_tokens + num_tokens,
        "prompt_tokens_details": {
            "cached_tokens": sum(output.num_cached_tokens for output in outputs)
        },
        "completion_tokens_details": {"reasoning_tokens": num_thought_tokens},
    }
