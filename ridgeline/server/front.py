"""The application: every request comes in here and leaves with an answer.

Checks who asks, finds the route, and turns whatever is raised into an error of its API's shape. No
answer of ours is a 5xx but 503: what nobody foresaw is logged with its traceback, and its client is
given the request's id. One line of the log for each request.

    app = Front(routes, meters, keys=keys, origins=origins, is_local=True)

With a root path requests may come with it, as a proxy passes them on unchanged, or without, where
the proxy takes it off: everything behind this file sees paths without it. A slash at the end of a
path makes no difference.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress

from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Router
from starlette.types import Receive, Scope, Send

from ridgeline.server.door.keys import CALLER, Keys
from ridgeline.server.door.origin import Origins
from ridgeline.server.door.refusals import ClientGoneError, RefusalError, shutting_down
from ridgeline.server.door.wire import ABORT
from ridgeline.server.exchange import Exchange, clean_request_id
from ridgeline.server.logs import log_facts
from ridgeline.server.metrics.metrics import Meters
from ridgeline.server.page.routes import CHALLENGE, is_file
from ridgeline.server.protocol import ApiError

log = logging.getLogger(__name__)

EXCHANGE = "ridgeline.exchange"  # in a request's scope
OPEN = ("/health",)  # what nobody needs a key for, beside the files of the page
QUIET = ("/health", "/ready", "/metrics", "/live")  # polled all the time: not logged when well
GONE = 499  # in the log: the client left before its answer


class Front:
    """An ASGI application."""

    def __init__(
        self,
        routes: Sequence[BaseRoute],
        meters: Meters,
        *,
        keys: Keys,
        origins: Origins,
        is_local: bool,
        root_path: str = "",
    ) -> None:
        """`is_local`: it listens on this machine alone."""
        self._keys, self._origins, self._meters = keys, origins, meters
        self._is_local, self._root_path = is_local, root_path
        self._router = Router(routes, redirect_slashes=False, default=_not_found)
        self._paths = {getattr(route, "path", "") for route in routes}
        self._in_flight: set[str] = set()  # request ids

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", f"only HTTP comes here, not {scope['type']}"
        scope["path"] = self._own_path(scope["path"])
        exchange = Exchange(scope, receive, send, "")
        exchange.request_id = self._unique(clean_request_id(exchange.header(b"x-request-id")))
        scope[EXCHANGE], scope["app"] = exchange, self  # Starlette raises where there is an app
        self._in_flight.add(exchange.request_id)
        try:
            await self._guarded(exchange)
        finally:
            self._in_flight.discard(exchange.request_id)
            self._log(exchange)

    def _unique(self, request_id: str) -> str:
        """Clients may use one id several times, but not at a time."""
        number, unique = 1, request_id
        while unique in self._in_flight:
            number += 1
            unique = f"{request_id}-{number}"
        return unique

    def _own_path(self, path: str) -> str:
        if self._root_path and path.startswith(self._root_path + "/"):
            path = path.removeprefix(self._root_path)
        return path.rstrip("/") or "/"

    async def _guarded(self, exchange: Exchange) -> None:
        try:
            self._check_origin(exchange)
            if _is_preflight(exchange):
                await self._allow(exchange)
                return
            if self._root_path and exchange.scope["path"] == self._root_path:
                # The page's own links are relative, and need the slash.
                await exchange.answer(308, b"", headers={"location": self._root_path + "/"})
                return
            self._check_key(exchange)
            await self._router(exchange.scope, exchange.receive, exchange.send)
        except ApiError as error:
            await self._refuse(exchange, error)
        except HTTPException as error:
            await self._refuse(exchange, _of_starlette(error), dict(error.headers or {}))
        except ClientGoneError:
            exchange.facts["end"] = "the client has gone"
            exchange.status = GONE
        except asyncio.CancelledError:  # the server is being stopped, and waits no longer
            await self._refuse(exchange, shutting_down())
        except Exception:
            log.exception("request %s failed unexpectedly", exchange.request_id)
            message = f"internal error in request {exchange.request_id}; see the server's log"
            await self._refuse(exchange, RefusalError(503, message, code="unforeseen"))

    def _check_origin(self, exchange: Exchange) -> None:
        origin = exchange.header(b"origin")
        exchange.more_headers |= self._origins.headers(origin)
        is_open = self._is_local and not self._keys.are_required
        self._origins.check(exchange.header(b"host"), origin, is_open)

    async def _allow(self, exchange: Exchange) -> None:
        """A browser asks whether it may send a request; it sends no key with that."""
        requested = exchange.header(b"access-control-request-headers")
        exchange.more_headers |= self._origins.preflight_headers(requested)
        await exchange.answer(200, b"")

    def _check_key(self, exchange: Exchange) -> None:
        path = exchange.scope["path"]
        if path in OPEN or is_file(path):
            return
        authorization, api_key = exchange.header(b"authorization"), exchange.header(b"x-api-key")
        caller = self._keys.caller_of(authorization, api_key)
        if caller is None:
            raise RefusalError(
                401,
                "missing or unknown API key; send `Authorization: Bearer KEY` or `x-api-key: KEY`",
                code="invalid_api_key",
            )
        exchange.tenant, exchange.scope[CALLER] = caller.tenant, caller

    async def _refuse(
        self, exchange: Exchange, error: ApiError, headers: dict[str, str] | None = None
    ) -> None:
        if exchange.status is None:
            path = exchange.scope["path"]
            self._meters.refused(path if path in self._paths else "other", error.status)
            if error.status == 401:
                headers = {**(headers or {}), "www-authenticate": _challenge(exchange)}
            with suppress(asyncio.CancelledError):
                await exchange.refuse(error, headers)
        elif not exchange.is_complete:  # half an answer must not look like a whole one
            exchange.facts |= {"code": error.code, "failed": error.status}
            exchange.scope.get(ABORT, lambda: None)()

    def _log(self, exchange: Exchange) -> None:
        path, status = exchange.scope["path"], exchange.status
        if path in QUIET and status is not None and status < 400:
            return
        facts = {
            "request_id": exchange.request_id,
            "method": exchange.scope["method"],
            "path": path[:200],
            "status": status,
            "tenant": exchange.tenant,
            "client": (exchange.scope.get("client") or ("",))[0][:100],
            "total_s": round(time.monotonic() - exchange.began, 4),
        }
        log_facts(log, "request", {**facts, **exchange.facts})


def _is_preflight(exchange: Exchange) -> bool:
    method = exchange.header(b"access-control-request-method")
    has_origin = exchange.header(b"origin") is not None
    return exchange.scope["method"] == "OPTIONS" and has_origin and method is not None


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:
    raise ApiError(404, f"no route {scope['path'][:200]}; see /openapi.json for the routes")


def _of_starlette(error: HTTPException) -> ApiError:
    detail = error.detail.lower() if error.status_code < 500 else "the server cannot do this now"
    return ApiError(min(error.status_code, 503), f"{detail}; see /openapi.json for the routes")


def _challenge(exchange: Exchange) -> str:
    """A browser shows a dialog for the key as a password; programs send a bearer token."""
    accepts = exchange.header(b"accept") or ""
    is_page = exchange.scope["method"] == "GET" and "text/html" in accepts
    return CHALLENGE if is_page else "Bearer"
