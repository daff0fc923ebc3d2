"""The page with a made-up server behind it, for a real browser: a socket of its own, a chat that
answers, and requests that can be cancelled.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from server_feed import Feed
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route

from ridgeline.server.page import page_routes

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
WORDS = ["The", "ridge", "is", "where", "memory-bound", "work", "ends", "."]


def find_browser() -> str | None:
    return next((path for path in map(shutil.which, BROWSERS) if path), None)


class PageServer:
    """`feed` is what it shows; `bodies` those of its chat; `key`, where set, is needed. It answers
    with `deltas`, one each `pause_s`; `root` is the path it is mounted under.
    """

    def __init__(self, feed: Feed, key: str = "", pause_s: float = 0.01, root: str = "") -> None:
        self.feed, self.key, self.pause_s, self.root = feed, key, pause_s, root
        self.deltas = [{"content": f"{word} "} for _ in range(3) for word in WORDS]
        self.counts_each = False  # usage comes with each piece
        self.bodies: list[dict[str, Any]] = []
        self.cancelled: list[str] = []
        self.num_dropped = 0  # chats that the client left
        routes = [
            *page_routes(feed.meters, self._cancel),
            Route("/v1/models", self._guarded(self._models)),
            Route("/v1/chat/completions", self._guarded(self._chat), methods=["POST"]),
        ]
        for route in routes:
            if isinstance(route, Route) and route.path == "/live":
                routes[routes.index(route)] = Route("/live", self._guarded(route.endpoint))
        app = Starlette(routes=[Mount(root, routes=routes)] if root else routes)
        config = uvicorn.Config(app, port=0, log_level="error", lifespan="off", ws="none")
        self._server = uvicorn.Server(config)

    @property
    def url(self) -> str:
        port = self._server.servers[0].sockets[0].getsockname()[1]
        return f"http://127.0.0.1:{port}{self.root}/"

    @contextmanager
    def running(self) -> Iterator[PageServer]:
        thread = threading.Thread(target=self._server.run, daemon=True)
        thread.start()
        while not self._server.started:
            time.sleep(0.01)
        try:
            yield self
        finally:
            self._server.should_exit = True
            thread.join(5)

    def _cancel(self, request_id: str) -> bool:
        self.cancelled.append(request_id)
        return self.feed.cancel(request_id)

    def _guarded(self, endpoint: Callable[[Request], Any]) -> Callable[[Request], Any]:
        async def guarded(request: Request) -> Response:
            if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
                return JSONResponse({"error": {"message": "no key"}}, status_code=401)
            response: Response = await endpoint(request)
            return response

        return guarded

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": []})

    async def _chat(self, request: Request) -> Response:
        self.bodies.append(await request.json())
        if self.bodies[-1]["messages"][-1]["content"] == "break off":
            body = iter(['data: {"error": {"message": "the engine was closed"}}\n\n'])
            return StreamingResponse(body, media_type="text/event-stream")
        return StreamingResponse(self._events(), media_type="text/event-stream")

    async def _events(self) -> AsyncIterator[str]:
        try:
            for number, delta in enumerate(self.deltas, 1):
                usage = {"usage": {"completion_tokens": 2 * number}} if self.counts_each else {}
                yield _event({"choices": [{"delta": delta}], **usage})
                await asyncio.sleep(self.pause_s)
            yield _event({"choices": [], "usage": {"completion_tokens": len(self.deltas)}})
            yield "data: [DONE]\n\n"
        except asyncio.CancelledError:
            self.num_dropped += 1
            raise


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"
