"""Errors as OpenAI's API has them: a status, and a body with message, type, param and code.

`ApiError` is all that parsing and rendering raise. `error_of` tells what a client is told of a
request that ended without an answer.

    raise ApiError(400, "temperature is 9; give a number from 0 to 2", param="temperature")
    raise ApiError(429, "the queue is full; try again", type="rate_limit_error", code="queue_full")
"""

from __future__ import annotations

import json

from ridgeline.engine import Output
from ridgeline.errors import RidgelineError


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
    about = {
        "message": error.message,
        "type": error.type,
        "param": error.param,
        "code": error.code,
    }
    return json.dumps({"error": about}, ensure_ascii=False).encode()


def error_of(output: Output) -> ApiError | None:
    """Why a request has no answer; None for one that finished."""
    raise NotImplementedError


def refusal(error: RidgelineError) -> ApiError:
    """What `Engine.job` or `Engine.add` refused, as an answer."""
    raise NotImplementedError
