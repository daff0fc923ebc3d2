"""Which reply answers which route."""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.data import Tokenizer
from ridgeline.server.protocol.replies.chat_reply import ChatReply
from ridgeline.server.protocol.replies.completion_reply import CompletionReply
from ridgeline.server.protocol.replies.embedding_reply import EmbeddingReply
from ridgeline.server.protocol.replies.messages_reply import MessagesReply
from ridgeline.server.protocol.replies.reply import Reply
from ridgeline.server.protocol.replies.responses_reply import ResponsesReply
from ridgeline.server.protocol.requests.asked import Asked, ParsedPrompt, Route

_REPLIES: dict[Route, type[Reply]] = {
    "chat": ChatReply,
    "completions": CompletionReply,
    "responses": ResponsesReply,
    "messages": MessagesReply,
    "embeddings": EmbeddingReply,
}


def reply_for(
    asked: Asked,
    prompts: Sequence[ParsedPrompt],
    tokenizer: Tokenizer,
    request_id: str,
    created: float | None = None,
) -> Reply:
    """`request_id` becomes part of the answer's id; `created` is the time it came, or now."""
    return _REPLIES[asked.route](asked, prompts, tokenizer, request_id, created)
