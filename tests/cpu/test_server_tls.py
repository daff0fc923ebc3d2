"""TLS and full connections, over real sockets."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from certificates import Certificate, make_certificate, needs_openssl
from live_server import until

from ridgeline.errors import UsageError
from ridgeline.server.config import ServerConfig
from ridgeline.server.door.wire import WireBounds
from ridgeline.server.listening import HttpServer, bind, load_certificate, tls_context

BOUNDS = WireBounds(max_connections=4, head_s=0.3, body_s=0.3, read_s=0.3)


async def app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": scope["scheme"].encode()})


@contextmanager
def serving(tls: ssl.SSLContext | None) -> Iterator[int]:
    """Its port."""
    server, bound = HttpServer(app, BOUNDS, tls=tls), bind("127.0.0.1", 0)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[bound])))
    port: int = bound.getsockname()[1]
    thread.start()
    until(lambda: server.started)
    try:
        yield port
    finally:
        server.should_exit = True
        thread.join(10)


def config_of(certificate: Certificate) -> ServerConfig:
    return ServerConfig(tls_cert=str(certificate.cert), tls_key=str(certificate.key))


@needs_openssl
def test_tls_and_a_certificate_that_is_replaced(tmp_path: Path) -> None:
    first, second = make_certificate(tmp_path), make_certificate(tmp_path, "second")
    config = config_of(first)
    context = tls_context(config)
    assert context is not None
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    known, later = first.trust, second.trust
    with serving(context) as port:
        url = f"https://127.0.0.1:{port}"
        assert httpx.get(url, verify=known).text == "https"
        with pytest.raises(httpx.ConnectError):
            httpx.get(url)  # nobody vouches for it
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"http://127.0.0.1:{port}")
        for source, target in zip(second, first, strict=True):
            target.write_bytes(source.read_bytes())
        load_certificate(context, config)
        assert httpx.get(url, verify=later).text == "https"
        first.key.write_text("no key")
        with pytest.raises(UsageError, match="cannot use --tls-cert"):
            load_certificate(context, config)
        assert httpx.get(url, verify=later).text == "https"


@needs_openssl
def test_a_handshake_that_is_not_made_is_closed(tmp_path: Path) -> None:
    certificate = make_certificate(tmp_path)
    with serving(tls_context(config_of(certificate))) as port:
        silent = socket.create_connection(("127.0.0.1", port), timeout=5)
        with closing(silent), suppress(ConnectionResetError):
            assert silent.recv(100) == b""
        assert httpx.get(f"https://127.0.0.1:{port}", verify=certificate.trust).text == "https"


@needs_openssl
def test_certificates_that_cannot_be_used(tmp_path: Path) -> None:
    first, second = make_certificate(tmp_path), make_certificate(tmp_path, "second")
    for wrong in (
        Certificate(first.cert, second.key),
        Certificate(tmp_path / "none", first.key),
        Certificate(first.key, first.key),
    ):
        with pytest.raises(UsageError, match="give a PEM certificate and its own private key"):
            tls_context(config_of(wrong))
    assert tls_context(ServerConfig()) is None
