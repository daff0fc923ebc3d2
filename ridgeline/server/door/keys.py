"""Who may use the server: API keys, compared in constant time, and the name each goes by in logs,
metrics and the prefix cache, which is never the key.

    keys = Keys(("secret-key",))
    keys.tenant_of("Bearer secret-key")        # 'key-1f0ac3e2'; None: not allowed
"""

from __future__ import annotations

import binascii
import hashlib
import hmac
from base64 import b64decode
from collections.abc import Sequence


class Keys:
    def __init__(self, keys: Sequence[str]) -> None:
        digests = [hashlib.sha256(key.encode()).digest() for key in keys]
        self._tenants = {digest: f"key-{digest.hex()[:8]}" for digest in digests}

    @property
    def are_asked_for(self) -> bool:
        return bool(self._tenants)

    def tenant_of(self, authorization: str | None) -> str | None:
        """The name of the key in an Authorization header, which may come as a bearer token or, as
        browsers send it, as a password; None where it is no good. Without keys all are one tenant.
        """
        if not self._tenants:
            return ""
        given = hashlib.sha256(_key_of(authorization or "").encode()).digest()
        found = None
        for digest, tenant in self._tenants.items():  # all of them, whichever it is
            if hmac.compare_digest(digest, given):
                found = tenant
        return found


def _key_of(authorization: str) -> str:
    kind, _, value = authorization.strip().partition(" ")
    if kind.lower() == "bearer":
        return value.strip()
    if kind.lower() == "basic":
        try:
            return b64decode(value.strip(), validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError, ValueError):
            return ""
    return ""
