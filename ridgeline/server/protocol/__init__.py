"""OpenAI's protocol and Anthropic's messages without sockets: bytes in, what to run out; engine
events in, bytes out.

asked = parse("chat", body, limits)                 # raises ApiError, and nothing else
prompts = render(asked, tokenizer, limits)          # blocking: in a thread
for prompt in prompts:
    engine.add(prompt.ids, prompt.sampling, priority=asked.priority,
               timeout_s=asked.deadline_s, salt=asked.cache_salt)
reply = reply_for(asked, prompts, tokenizer, request_id)    # then see reply.py
"""

from ridgeline.server.protocol.errors import (
    ApiError,
    error_body,
    error_of,
    messages_error,
    refusal,
)
from ridgeline.server.protocol.limits import RequestLimits
from ridgeline.server.protocol.openapi import PATHS, model_body, models_body, openapi_document
from ridgeline.server.protocol.rendering import answer_now, render
from ridgeline.server.protocol.replies.replies import reply_for
from ridgeline.server.protocol.replies.reply import Reply, StreamedReply, merged
from ridgeline.server.protocol.requests.asked import ROUTES, Asked, ParsedPrompt, Route
from ridgeline.server.protocol.requests.parsing import parse

__all__ = [
    "PATHS",
    "ROUTES",
    "ApiError",
    "Asked",
    "ParsedPrompt",
    "Reply",
    "RequestLimits",
    "Route",
    "StreamedReply",
    "answer_now",
    "error_body",
    "error_of",
    "merged",
    "messages_error",
    "model_body",
    "models_body",
    "openapi_document",
    "parse",
    "refusal",
    "render",
    "reply_for",
]
