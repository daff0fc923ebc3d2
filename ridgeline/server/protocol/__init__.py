"""OpenAI's protocol without sockets: bytes in, what to run out; engine events in, bytes out."""

from ridgeline.server.protocol.asked import (
    ROUTES,
    Asked,
    Prompt,
    Route,
    answer_now,
    parse,
    render,
)
from ridgeline.server.protocol.errors import ApiError, error_body, error_of, refusal
from ridgeline.server.protocol.limits import Limits
from ridgeline.server.protocol.openapi import model_body, models_body, openapi_document
from ridgeline.server.protocol.reply import Reply, merged, reply_for

__all__ = [
    "ROUTES",
    "ApiError",
    "Asked",
    "Limits",
    "Prompt",
    "Reply",
    "Route",
    "answer_now",
    "error_body",
    "error_of",
    "merged",
    "model_body",
    "models_body",
    "openapi_document",
    "parse",
    "refusal",
    "render",
    "reply_for",
]
