"""Which path is answered by what. Requests for the model are counted against the rates of their
key and go to answering.py; here are the routes of the server itself: whether it is alive, whether
it makes progress, and what it offers.
"""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable
from functools import cached_property
from typing import Any

from starlette.requests import Request
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from ridgeline.server.answering import Answering
from ridgeline.server.door.keys import caller_of
from ridgeline.server.door.rates import Rates
from ridgeline.server.exchange import Exchange
from ridgeline.server.front import EXCHANGE
from ridgeline.server.metrics.metrics import CONTENT_TYPE
from ridgeline.server.page import page_routes
from ridgeline.server.protocol import Route as Kind
from ridgeline.server.protocol import model_body, models_body, openapi_document
from ridgeline.server.protocol.openapi import PATHS, error_content
from ridgeline.version import __version__

# What the door answers, before the protocol reads anything, by method.
DOOR = {
    "get": {"403": "From a page of another origin, or under a name that is not allowed"},
    "post": {
        "403": "From a page of another origin, or under a name that is not allowed",
        "415": "The body is not plain JSON",
    },
}
Handler = Callable[[Exchange], Awaitable[None]]


class HandlerApp:
    """A handler of exchanges as Starlette takes it: an application of its own."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._handler(scope[EXCHANGE])


class Routes:
    def __init__(
        self,
        answering: Answering,
        rates: Rates,
        *,
        slow_s: float,
        has_key: bool,
        root_path: str = "",
    ) -> None:
        """`slow_s`: without a step for so long, the server is not ready."""
        self._answering, self._rates, self._slow_s = answering, rates, slow_s
        self._has_key, self._root_path = has_key, root_path
        self._started = time.time()

    def all(self) -> list[BaseRoute]:
        states: dict[str, Handler] = {
            "/metrics": self.metrics,
            "/version": self.version,
            "/openapi.json": self.openapi,
            "/v1/models": self.models,
            "/v1/models/{name:path}": self.model,
        }
        return [
            *(_route(path, self._for_model(kind), "POST") for kind, path in PATHS.items()),
            *self.probes(),
            *(_route(path, handler) for path, handler in states.items()),
            *page_routes(self._answering.meters, self._answering.pump.cancel),
        ]

    def probes(self) -> list[BaseRoute]:
        """What the probe port answers too."""
        return [_route("/health", self.health), _route("/ready", self.ready)]

    def _for_model(self, kind: Kind) -> Handler:
        async def handler(exchange: Exchange) -> None:
            self._rates.count_request(caller_of(exchange.scope))  # before its body is read
            await self._answering.answer(exchange, kind)

        return handler

    async def health(self, exchange: Exchange) -> None:
        """Whether the process is alive: it answers, and so does the engine's thread."""
        is_alive = self._answering.pump.is_alive
        status = {"status": "alive"} if is_alive else {"status": "dead"}
        await exchange.answer(200 if is_alive else 503, json.dumps(status).encode())

    async def ready(self, exchange: Exchange) -> None:
        """Whether a request would get on: an engine is up, and its steps end."""
        reason = self._why_not_ready()
        body = {"status": "ready"} if reason is None else {"status": "not ready", "reason": reason}
        headers = {} if reason is None else {"retry-after": "1"}
        status = 200 if reason is None else 503
        await exchange.answer(status, json.dumps(body).encode(), headers=headers)

    def _why_not_ready(self) -> str | None:
        pump = self._answering.pump
        if self._answering.gate.is_closed:
            return "the server is shutting down"
        if pump.down_since is not None or not pump.engine.is_up:
            return "the engine is being started"
        if pump.stalled_s > self._slow_s:
            return f"no step has ended for {pump.stalled_s:.1f} s"
        return None

    async def metrics(self, exchange: Exchange) -> None:
        await exchange.answer(200, self._answering.meters.render(), CONTENT_TYPE)

    async def version(self, exchange: Exchange) -> None:
        await exchange.answer(200, json.dumps({"version": __version__}).encode())

    async def openapi(self, exchange: Exchange) -> None:
        await exchange.answer(200, await self._answering.in_thread(lambda: self._openapi))

    @cached_property
    def _openapi(self) -> bytes:
        return json.dumps(document(self._has_key, self._root_path)).encode()

    async def models(self, exchange: Exchange) -> None:
        limits = self._answering.limits
        await exchange.answer(200, models_body(limits.models, self._started, limits.max_context))

    async def model(self, exchange: Exchange) -> None:
        name, limits = Request(exchange.scope).path_params["name"], self._answering.limits
        body = model_body(name, limits.models, self._started, limits.max_context)
        await exchange.answer(200, body)


def _route(path: str, handler: Handler, method: str = "GET") -> BaseRoute:
    return Route(path, HandlerApp(handler), methods=[method])


def document(has_key: bool, root_path: str = "") -> dict[str, Any]:
    """The OpenAPI document of the whole server."""
    whole = openapi_document(__version__, has_key=has_key)
    if root_path:
        whole["servers"] = [{"url": root_path}]
    for path, methods in whole["paths"].items():
        content = error_content(path)
        for method, operation in methods.items():
            for status, meaning in DOOR[method].items():
                operation["responses"][status] = {"description": meaning, "content": content}
    return whole
