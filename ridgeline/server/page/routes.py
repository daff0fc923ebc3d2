"""Routes of the page: `/`, its files under /page/, `/live` (the snapshot as JSON, which the page
polls) and `POST /live/cancel/{request_id}`.

    routes += page_routes(meters, cancel)

`/` and /page/ are the same for everybody and hold nothing of this server: they need no key
(`is_file`), so that the page can ask for one itself. All that it shows comes from routes that do.
Whoever opens one of those in a browser is asked by the browser (CHALLENGE).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from ridgeline.profiling.drawing import PALETTE, THEME
from ridgeline.server.door.keys import caller_of
from ridgeline.server.metrics.metrics import Meters

CHALLENGE = 'Basic realm="ridgeline", charset="UTF-8"'
FOLDER = Path(__file__).parent
SHARED = (PALETTE, THEME)  # with the reports
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


def is_file(path: str) -> bool:
    """Whether a request's path is the page itself or one of its files, which need no key."""
    return path == "/" or path.startswith("/page/")


def page_files() -> dict[str, Path]:
    """By their names under /page/."""
    own = {path.relative_to(FOLDER).as_posix(): path for path in FOLDER.rglob("*")}
    shared = {path.name: path for path in SHARED}
    return {name: path for name, path in (own | shared).items() if path.suffix in TYPES}


def page_routes(meters: Meters, cancel: Callable[[str], bool]) -> list[BaseRoute]:
    """`cancel` is called on the event loop, must not block, and says whether there is such a
    request; /live/cancel answers 404 where there is none. Requests of other keys are none, but for
    an admin key.
    """
    files = {name: path.read_bytes() for name, path in page_files().items()}

    async def index(request: Request) -> Response:
        return _file("index.html", files)

    async def asset(request: Request) -> Response:
        return _file(request.path_params["name"], files)

    async def live(request: Request) -> Response:
        after, caller = _number(request.query_params.get("after", "")), caller_of(request.scope)
        snapshot = meters.snapshot(after, caller.visible_tenant)
        viewer = {"tenant": caller.tenant, "is_admin": caller.is_admin}
        return JSONResponse({**snapshot, "viewer": viewer}, headers={"cache-control": "no-store"})

    async def stop(request: Request) -> Response:
        visible = caller_of(request.scope).visible_tenant
        return _cancelled(request, lambda name: meters.shows(name, visible) and cancel(name))

    return [
        Route("/", index),
        Route("/page/{name:path}", asset),
        Route("/live", live),
        Route("/live/cancel/{request_id}", stop, methods=["POST"]),
    ]


def _file(name: str, files: dict[str, bytes]) -> Response:
    if name not in files:
        return _error(404, f"there is no file {name[:100]!r} of the page")
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
