"""What the server itself refuses, whatever the request is: each with its status and, where trying
again makes sense, when.

    raise RefusalError(429, "the queue is full; …", code="queue_full", retry_after_s=2)
"""

from __future__ import annotations

from ridgeline.server.protocol import ApiError

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    503: "server_error",
}


class RefusalError(ApiError):
    def __init__(
        self, status: int, message: str, *, code: str, retry_after_s: float | None = None
    ) -> None:
        super().__init__(
            status, message, type=TYPES.get(status, "invalid_request_error"), code=code
        )
        self.retry_after_s = retry_after_s


class ClientGoneError(Exception):
    """The client has closed its connection: there is nobody to answer."""


def retry_after(error: ApiError) -> int | None:
    """Whole seconds for a Retry-After header; each 429 and 503 has one."""
    seconds: float | None = getattr(error, "retry_after_s", None)
    if seconds is None:
        return 1 if error.status in (429, 503) else None
    return max(1, int(seconds + 0.999))


def shutting_down() -> RefusalError:
    return RefusalError(
        503,
        "the server is shutting down; try again later",
        code="shutting_down",
        retry_after_s=5,
    )
