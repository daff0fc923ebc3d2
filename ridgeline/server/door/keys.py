"""Who may use the server: API keys, compared in constant time, and the name each goes by in logs,
metrics and the prefix cache, which is never the key.

    keys = Keys(read_keys(Path("keys.txt")))
    keys.caller_of("Bearer secret-key")        # Caller("search"), or None: not allowed
    keys.use(read_keys(Path("keys.txt")))      # the file has changed

A caller sees and cancels the requests of its own name; an admin key those of all. Where no keys are
set everybody is the same caller, and an admin.
"""

from __future__ import annotations

import binascii
import hashlib
import hmac
from base64 import b64decode
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ridgeline.errors import UsageError
from ridgeline.formats.api_keys import ApiKey

CALLER = "ridgeline.caller"  # in a request's scope


class Caller(NamedTuple):
    """Whoever holds a key of this name. Two keys may have one name, while one replaces the other;
    they share its limits.
    """

    tenant: str
    is_admin: bool = False
    requests_per_minute: int | None = None  # None: the server's default
    tokens_per_minute: int | None = None

    @property
    def visible_tenant(self) -> str | None:
        """Whose requests it may see and cancel; None: everybody's."""
        return None if self.is_admin else self.tenant


EVERYBODY = Caller("", is_admin=True)


def caller_of(scope: Mapping[str, Any]) -> Caller:
    """Who sent a request that the front has let in."""
    caller: Caller = scope.get(CALLER, EVERYBODY)
    return caller


class Keys:
    def __init__(self, keys: Iterable[ApiKey] = ()) -> None:
        self._callers: dict[bytes, Caller] = {}
        self.use(keys)

    def use(self, keys: Iterable[ApiKey]) -> None:
        """These from now on, and no others."""
        callers: dict[bytes, Caller] = {}
        by_name: dict[str, Caller] = {}
        for key in keys:
            caller = Caller(
                tenant=key.name,
                is_admin=key.is_admin,
                requests_per_minute=key.requests_per_minute,
                tokens_per_minute=key.tokens_per_minute,
            )
            if by_name.setdefault(key.name, caller) != caller:
                raise UsageError(
                    f"two keys are called {key.name!r} and may do different things; give them the "
                    "same options, or other names"
                )
            callers[_digest(key.secret)] = caller
        self._callers = callers

    @property
    def are_required(self) -> bool:
        return bool(self._callers)

    @property
    def tenants(self) -> frozenset[str]:
        callers = self._callers.values() or (EVERYBODY,)
        return frozenset(caller.tenant for caller in callers)

    def caller_of(self, authorization: str | None, api_key: str | None = None) -> Caller | None:
        """Whose key is in an Authorization header, which may come as a bearer token or, as browsers
        send it, as a password; or else in `x-api-key`, as Anthropic's clients send it. None: in
        neither of them.
        """
        if not self._callers:
            return EVERYBODY
        caller = self._match(_secret_in(authorization or ""))
        return self._match(api_key.strip()) if caller is None and api_key else caller

    def _match(self, secret: str) -> Caller | None:
        given = _digest(secret)
        match: Caller | None = None
        for digest, caller in self._callers.items():  # all of them, whichever it is
            if hmac.compare_digest(digest, given):
                match = caller
        return match


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


def _secret_in(authorization: str) -> str:
    kind, _, value = authorization.strip().partition(" ")
    if kind.lower() == "bearer":
        return value.strip()
    if kind.lower() == "basic":
        try:
            return b64decode(value.strip(), validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError, ValueError):
            return ""
    return ""
