"""Browsers are let in only from the server's own page: a site that somebody has open in another tab
must not use a server on their machine, neither by sending requests to it nor by giving the
machine's address to a name of its own.

    check_origin(host="localhost:8000", origin="http://localhost:8000", is_open=True)
"""

from __future__ import annotations

from ipaddress import ip_address
from urllib.parse import urlsplit

from ridgeline.server.door.refusals import RefusalError


def check_origin(host: str | None, origin: str | None, is_open: bool) -> None:
    """`is_open`: the server listens on this machine alone and asks for no key, so that a browser
    on it may use it. Then it must be called by an address or as localhost, which no other site can
    have for a name.
    """
    if origin is not None and _place_of(origin) != (host or "").lower():
        raise RefusalError(
            403,
            "the request comes from a page of another origin; use the server's own page or a "
            "client that is no browser, and let a proxy pass the Host header on",
            code="other_origin",
        )
    if is_open and host is not None and not _is_address(host):
        raise RefusalError(
            403,
            "the server was called by a name other than localhost, which one that listens on its "
            "own machine alone allows only with an API key; use its address, or --api-key-file",
            code="unknown_host",
        )


def _place_of(origin: str) -> str:
    """`localhost:8000` of `http://localhost:8000`; nothing of what is no origin."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def _is_address(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
