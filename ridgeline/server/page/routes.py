"""Routes of the page: `/`, its files under /page/, `/live` (the snapshot as JSON, which the page
polls) and `POST /live/cancel/{request_id}`.

    routes += page_routes(meters, cancel)

Where a key is set these are guarded like every other route. A browser cannot send a bearer token
with the address bar, so whoever checks keys should also take `Authorization: Basic` with the key as
password (any user name), and answer a GET that accepts text/html and has none with 401 and
`WWW-Authenticate: ` + CHALLENGE: the browser then asks, and sends it with all the page asks for.
The page itself asks for a key (kept in sessionStorage, sent as a bearer token) when /live is 401.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from ridgeline.profiling.drawing import PALETTE
from ridgeline.server.metrics.metrics import Meters

CHALLENGE = 'Basic realm="ridgeline", charset="UTF-8"'
FOLDER = Path(__file__).parent
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Nothing from elsewhere, nothing inline, nobody's frame.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def page_routes(meters: Meters, cancel: Callable[[str], bool]) -> list[BaseRoute]:
    """`cancel` is called on the event loop, must not block, and says whether there is such a
    request; /live/cancel answers 404 where there is none.
    """
    files = {path.name: path.read_bytes() for path in FOLDER.iterdir() if path.suffix in TYPES}
    files[PALETTE.name] = PALETTE.read_bytes()

    async def index(request: Request) -> Response:
        return _file("index.html", files)

    async def asset(request: Request) -> Response:
        return _file(request.path_params["name"], files)

    async def live(request: Request) -> Response:
        after = _number(request.query_params.get("after", ""))
        return JSONResponse(meters.snapshot(after), headers={"cache-control": "no-store"})

    async def stop(request: Request) -> Response:
        return _cancelled(request, cancel)

    return [
        Route("/", index),
        Route("/page/{name}", asset),
        Route("/live", live),
        Route("/live/cancel/{request_id}", stop, methods=["POST"]),
    ]


def _file(name: str, files: dict[str, bytes]) -> Response:
    if name not in files:
        return _error(404, f"there is no file {name!r} of the page")
    return Response(files[name], media_type=TYPES[Path(name).suffix], headers=HEADERS)


def _cancelled(request: Request, cancel: Callable[[str], bool]) -> Response:
    """The type is asked for because a form on somebody else's page cannot send it."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip()
    if kind != "application/json":
        return _error(415, f"content-type is {kind!r}; send application/json")
    request_id = request.path_params["request_id"]
    if not cancel(request_id):
        return _error(404, f"there is no request {request_id!r}, or it has ended")
    return JSONResponse({"id": request_id, "cancelled": True})


def _error(status: int, message: str) -> Response:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return JSONResponse({"error": error}, status_code=status)


def _number(text: str) -> float | None:
    """None for what is no time."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
