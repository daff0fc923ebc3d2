"""Which reply answers which route."""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.data import Tokenizer
from ridgeline.server.protocol.asked import Asked, Prompt, Route
from ridgeline.server.protocol.chat_reply import ChatReply
from ridgeline.server.protocol.completion_reply import CompletionReply
from ridgeline.server.protocol.embedding_reply import EmbeddingReply
from ridgeline.server.protocol.reply import Reply
from ridgeline.server.protocol.responses_reply import ResponsesReply

_REPLIES: dict[Route, type[Reply]] = {
    "chat": ChatReply,
    "completions": CompletionReply,
    "responses": ResponsesReply,
    "embeddings": EmbeddingReply,
}


def reply_for(
    asked: Asked,
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer,
    request_id: str,
    created: float | None = None,
) -> Reply:
    """`request_id` becomes part of the answer's id; `created` is the time it came, or now."""
    return _REPLIES[asked.route](asked, prompts, tokenizer, request_id, created)
