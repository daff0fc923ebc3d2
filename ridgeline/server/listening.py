"""Where a server listens: its sockets, bound before anything is loaded so that a port that is taken
is known at once, and uvicorn on them with bounds on what a client may hold, with TLS where a
certificate is given.

    bound = bind(config.host, config.port, "--port")
    server = HttpServer(app, WireBounds(), tls=tls_context(config))
    await server.serve(sockets=[bound])
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from ipaddress import ip_address

import uvicorn
from starlette.types import ASGIApp

from ridgeline.errors import UsageError
from ridgeline.server.config import ServerConfig
from ridgeline.server.door.wire import BoundedProtocol, WireBounds

LAST_WORDS_S = 2.0  # for telling those that did not end in time
# Of the probe port: whoever looks after a server keeps few connections, and short ones.
PROBE_BOUNDS = WireBounds(
    max_connections=64, max_head_bytes=8 << 10, head_s=2.0, body_s=2.0, read_s=2.0
)


def bind(host: str, port: int, flag: str = "--port") -> socket.socket:
    """A bound socket; `flag` is where its port came from."""
    try:
        entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = entries[0]
        bound = socket.socket(family, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        raise UsageError(
            f"cannot listen on {host} port {port}: {error.strerror or error}; try another {flag}, "
            "or 0 for a free one"
        ) from error
    bound.set_inheritable(False)
    return bound


def url_of(bound: socket.socket, has_tls: bool = False) -> str:
    host, port = bound.getsockname()[:2]
    scheme = "https" if has_tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def is_local(bound: socket.socket) -> bool:
    """Whether only this machine can reach it."""
    return ip_address(bound.getsockname()[0].partition("%")[0]).is_loopback


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """None: plain HTTP. TLS 1.2 and later."""
    if config.tls_cert is None or config.tls_key is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    load_certificate(context, config)
    return context


def load_certificate(context: ssl.SSLContext, config: ServerConfig) -> None:
    """For connections that come from now on."""
    cert, key = config.tls_cert, config.tls_key
    assert cert is not None
    try:
        context.load_cert_chain(cert, key, password=lambda: "")  # or it would ask on the terminal
    except (OSError, ValueError) as error:  # SSLError is an OSError
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise UsageError(
            f"cannot use --tls-cert {cert} with --tls-key {key}: {reason}; give a PEM certificate "
            "and its own private key, not encrypted"
        ) from None


class HttpServer(uvicorn.Server):
    """uvicorn without its ways with signals, which end a process by the signal it drained for, and
    with a bound on the time that a TLS handshake may take.
    """

    def __init__(
        self,
        app: ASGIApp,
        bounds: WireBounds,
        *,
        tls: ssl.SSLContext | None = None,
        keep_alive_s: int = 5,
    ) -> None:
        self._handshake_s = bounds.head_s
        config = uvicorn.Config(
            app,
            http=partial(BoundedProtocol, bounds=bounds),  # type: ignore[arg-type]
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=min(bounds.max_connections, 2048),
            timeout_keep_alive=keep_alive_s,
            timeout_graceful_shutdown=LAST_WORDS_S,  # type: ignore[arg-type]
        )
        config.load()
        config.ssl = tls
        super().__init__(config)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        loop, config = asyncio.get_running_loop(), self.config

        def protocol() -> asyncio.Protocol:
            return config.http_protocol_class(  # type: ignore[call-arg]
                config=config, server_state=self.server_state, app_state={}
            )

        timeout = None if config.ssl is None else self._handshake_s
        self.servers = [
            await loop.create_server(
                protocol,
                sock=each,
                ssl=config.ssl,
                backlog=config.backlog,
                ssl_handshake_timeout=timeout,
            )
            for each in sockets or []
        ]
        self.started = True
