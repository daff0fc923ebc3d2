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

from collections.abc import Sequence
from typing import Protocol

from ridgeline.data import Tokenizer
from ridgeline.engine import Delta, Output
from ridgeline.server.protocol.asked import Asked, Prompt
from ridgeline.server.protocol.errors import ApiError


class Reply(Protocol):
    """One request's answer. `prompt` is the number of the prompt in what `render` gave."""

    def start(self) -> list[bytes]:
        """The events before the first token."""

    def delta(self, delta: Delta, prompt: int = 0) -> bytes:
        """The events that a delta makes; several of one output may be `merged` into one."""

    def finish(self, outputs: Sequence[Output]) -> list[bytes]:
        """The last events, once every output has ended well."""

    def failed(self, error: ApiError) -> bytes:
        """The last events of a stream that cannot be finished."""

    def whole(self, outputs: Sequence[Output]) -> bytes:
        """The JSON body. Raises ApiError where an output did not end well."""


def reply_for(
    asked: Asked,
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer,
    request_id: str,
    created: float | None = None,
) -> Reply:
    """`request_id` becomes part of the answer's id; `created` is the time it came, by default now."""
    raise NotImplementedError


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
