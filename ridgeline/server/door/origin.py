"""Browsers are let in only from the server's own page and from origins that were allowed: a site
that somebody has open in another tab must not use a server on their machine, neither by sending
requests to it nor by giving the machine's address to a name of its own.

    origins = Origins(("https://chat.example.org",))
    origins.check(host="localhost:8000", origin="https://chat.example.org", is_open=True)
    origins.headers("https://chat.example.org")         # for the browser, which asks for consent

An origin is scheme, host and port, and all three must match. Credentials that a browser keeps by
itself are never allowed (no Access-Control-Allow-Credentials): a page has to send the key.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from ipaddress import ip_address
from urllib.parse import urlsplit

from ridgeline.errors import UsageError
from ridgeline.server.door.refusals import RefusalError

ANY = "*"
DEFAULT_PORTS = {"http": 80, "https": 443}
METHODS = "GET, POST"
PREFLIGHT_S = 600  # that a browser may remember the answer to a preflight
MAX_HEADER_NAMES = 4096  # characters of Access-Control-Request-Headers
# What scripts of another origin may read of an answer, beside its body.
EXPOSED = "x-request-id, request-id, retry-after, x-ridgeline-ignored-fields"
_HEADER_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+(\s*,\s*[A-Za-z0-9!#$%&'*+.^_`|~-]+)*")

Headers = dict[str, str]


class Origins:
    def __init__(self, allowed: Sequence[str] = ()) -> None:
        """`allowed`: as on the command line; `*` is every origin."""
        self._any = ANY in allowed
        self._allowed = frozenset(_normal(origin) for origin in allowed if origin != ANY)

    def check(self, host: str | None, origin: str | None, is_open: bool) -> None:
        """`is_open`: the server listens on this machine alone and needs no key, so that a browser
        on it may use it. Then it must be called by an address or as localhost, which no other site
        can have for a name.
        """
        if origin is not None and not (self._allows(origin) or _is_own(origin, host)):
            raise RefusalError(
                403,
                "cross-origin request refused; start the server with --allow-origin ORIGIN, or "
                "use its own page or a non-browser client; a proxy must pass the Host header",
                code="other_origin",
            )
        if is_open and host is not None and not _is_address(host):
            raise RefusalError(
                403,
                "without an API key a local server only answers to localhost or its IP address; "
                "use one of these, or start it with --api-key-file",
                code="unknown_host",
            )

    def headers(self, origin: str | None) -> Headers:
        """For every answer, errors too."""
        vary = {"vary": "origin"} if self._allowed and not self._any else {}
        if origin is None or not self._allows(origin):
            return vary
        return {
            "access-control-allow-origin": ANY if self._any else origin,
            "access-control-expose-headers": EXPOSED,
            **vary,
        }

    def preflight_headers(self, requested: str | None) -> Headers:
        """For the question that a browser asks before a request, beside `headers`. The header names
        that it means to send are repeated, since `*` would not include Authorization.
        """
        names = (requested or "").strip()
        if names and not (len(names) <= MAX_HEADER_NAMES and _HEADER_NAMES.fullmatch(names)):
            raise RefusalError(
                400,
                "access-control-request-headers is not a list of header names",
                code="invalid_header",
            )
        return {
            "access-control-allow-methods": METHODS,
            **({"access-control-allow-headers": names} if names else {}),
            "access-control-max-age": str(PREFLIGHT_S),
        }

    def _allows(self, origin: str) -> bool:
        return self._any or origin.lower() in self._allowed


def _normal(origin: str) -> str:
    """As a browser sends it: in small letters, without a default port."""
    try:
        parts = urlsplit(origin)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        parts, host, port = urlsplit(""), "", None
    rest = (parts.path, parts.query, parts.fragment, parts.username, parts.password)
    if not parts.scheme or not host or any(rest):
        raise UsageError(
            f"--allow-origin {origin!r} is not an origin; give scheme, host and port without a "
            "path, e.g. https://chat.example.org or http://localhost:3000, or * for all"
        )
    host = f"[{host}]" if ":" in host else host
    is_default = port is None or port == DEFAULT_PORTS.get(parts.scheme)
    return f"{parts.scheme}://{host}" + ("" if is_default else f":{port}")


def _is_own(origin: str, host: str | None) -> bool:
    """Whether it is the server's own page: `http://localhost:8000` on `localhost:8000`."""
    try:
        netloc = urlsplit(origin).netloc.lower()
    except ValueError:
        return False
    return bool(netloc) and netloc == (host or "").lower()


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
