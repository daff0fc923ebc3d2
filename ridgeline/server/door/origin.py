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
            "cross-origin request refused; use the server's own page or a non-browser client, "
            "and make a proxy pass the Host header",
            code="other_origin",
        )
    if is_open and host is not None and not _is_address(host):
        raise RefusalError(
            403,
            "without an API key a local server only answers to localhost or its IP address; "
            "use one of these, or start it with --api-key-file",
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
