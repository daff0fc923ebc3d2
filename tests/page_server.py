"""The page with a made-up server behind it, for a real browser: a socket of its own, a chat that
answers, and requests that can be cancelled.
"""

from __future__ import annotations

import asyncio
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
from starlette.routing import Route

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
    """`feed` is what it shows; `asked` the bodies of its chat; `key`, where set, is asked for."""

    def __init__(self, feed: Feed, key: str = "", word_s: float = 0.01) -> None:
        self.feed, self.key, self.word_s = feed, key, word_s
        self.asked: list[dict[str, Any]] = []
        self.cancelled: list[str] = []
        self.num_dropped = 0  # chats that the client left
        routes = [
            *page_routes(feed.meters, self._cancel),
            Route("/v1/chat/completions", self._guarded(self._chat), methods=["POST"]),
        ]
        for route in routes:
            if isinstance(route, Route) and route.path == "/live":
                routes[routes.index(route)] = Route("/live", self._guarded(route.endpoint))
        config = uvicorn.Config(
            Starlette(routes=routes), port=0, log_level="error", lifespan="off", ws="none"
        )
        self._server = uvicorn.Server(config)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"

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
            found: Response = await endpoint(request)
            return found

        return guarded

    async def _chat(self, request: Request) -> Response:
        self.asked.append(await request.json())
        if self.asked[-1]["messages"][-1]["content"] == "break off":
            body = iter(['data: {"error": {"message": "the engine was closed"}}\n\n'])
            return StreamingResponse(body, media_type="text/event-stream")
        return StreamingResponse(self._words(), media_type="text/event-stream")

    async def _words(self) -> AsyncIterator[str]:
        try:
            for _ in range(3):
                for word in WORDS:
                    yield f'data: {{"choices": [{{"delta": {{"content": "{word} "}}}}]}}\n\n'
                    await asyncio.sleep(self.word_s)
            yield f'data: {{"choices": [], "usage": {{"completion_tokens": {3 * len(WORDS)}}}}}\n\n'
            yield "data: [DONE]\n\n"
        except asyncio.CancelledError:
            self.num_dropped += 1
            raise
