"""Errors as OpenAI's API has them: a status, and a body with message, type, param and code; under
/v1/messages as Anthropic's has them.

`ApiError` is all that parsing, rendering and replies raise. `error_of` tells what a client is told
of a request that ended without an answer, `refusal` what of one that the engine did not take.

    raise ApiError(400, "temperature is 9; give a number from 0 to 2", param="temperature")
    raise ApiError(429, "the queue is full; try again", type="rate_limit_error", code="queue_full")
"""

from __future__ import annotations

import json
from typing import Any

from ridgeline.engine import Output
from ridgeline.errors import (
    ContextLengthError,
    HardwareError,
    NumericsError,
    OutOfMemoryError,
    RequestError,
    RidgelineError,
)

SERVER_ERROR = "server_error"
TOO_LONG = "context_length_exceeded"  # the code that clients look for
OURS = (HardwareError, OutOfMemoryError, NumericsError, RequestError)  # no client can cause these
# By status, the types of errors that Anthropic's clients know.
MESSAGES_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "api_error",
}
# Parts of the reasons with which the engine ends a request over its grammar
# (engine/sampling/matching.py).
TOO_MANY_GRAMMARS = "slow to compile at once"  # engine/grammars/compilers.py
GRAMMAR_REASONS = ("cannot be followed", "the grammar does not allow", "nothing may follow after")


class ApiError(Exception):
    """What a client is told: `message` says what was given, what is allowed and what to try."""

    def __init__(
        self,
        status: int,
        message: str,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.type = status, message, type
        self.param, self.code = param, code


def error_body(error: ApiError) -> bytes:
    """The JSON of an error answer."""
    fields = {
        "message": error.message,
        "type": error.type,
        "param": error.param,
        "code": error.code,
    }
    return json.dumps({"error": fields}).encode()


def messages_error(error: ApiError, request_id: str) -> dict[str, Any]:
    """The same as Anthropic's API has it, for answers and for events."""
    kind = MESSAGES_TYPES.get(error.status, "invalid_request_error")
    fields = {"type": kind, "message": error.message}
    return {"type": "error", "error": fields, "request_id": request_id}


def error_of(output: Output) -> ApiError | None:
    """Why a request has no answer; None for one that finished."""
    reason = output.reason
    match output.status:
        case "finished":
            return None
        case "refused":  # it needs more pages than there are
            return ApiError(400, reason, code=TOO_LONG)
        case "cancelled" if "deadline" in reason:
            message = f"the request was given up after {output.total_s:.3g} s, at its deadline"
            return ApiError(408, message, type="timeout_error", code="deadline_exceeded")
        case "cancelled":
            message = f"the request was cancelled: {reason}"
            return ApiError(503, message, type=SERVER_ERROR, code="cancelled")
    if TOO_MANY_GRAMMARS in reason:
        return ApiError(429, reason, type="rate_limit_error", code="too_many_grammars")
    if any(part in reason for part in GRAMMAR_REASONS):
        return ApiError(400, reason, code="invalid_grammar")
    return ApiError(503, f"the request failed: {reason}", type=SERVER_ERROR, code="engine_failed")


def refusal(error: RidgelineError, param: str | None = None) -> ApiError:
    """What `Engine.job`, `Engine.add` or a template refused, as an answer."""
    if isinstance(error, OURS):
        return ApiError(503, str(error), type=SERVER_ERROR, code="engine_failed")
    code = TOO_LONG if isinstance(error, ContextLengthError) else None
    return ApiError(400, str(error), param=param, code=code)
