"""API keys as they stand in a file: one a line, then what is particular about it.

    # keys.txt
    sk-1f0ac3e2b7      name=search requests-per-minute=600 tokens-per-minute=200000
    sk-9b21d07c55      name=operations admin

    for key in read_keys(Path("keys.txt")): ...

A key is in no message, log line or repr: errors name the file and the line.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ridgeline.errors import UsageError, near_matches

LEAST_KEY = 8  # characters
RATES = {
    "requests-per-minute": "requests_per_minute",
    "tokens-per-minute": "tokens_per_minute",
}
OPTIONS = ("name=", "admin", *(f"{name}=" for name in RATES))
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class ApiKey:
    secret: str = field(repr=False)
    name: str = ""  # in logs and metrics; made from the key's hash where none is given
    is_admin: bool = False  # sees and cancels everybody's requests
    requests_per_minute: int | None = None  # None: the server's default
    tokens_per_minute: int | None = None

    def __post_init__(self) -> None:
        check_secret(self.secret)
        if not self.name:
            digest = hashlib.sha256(self.secret.encode()).hexdigest()
            object.__setattr__(self, "name", f"key-{digest[:8]}")


def check_secret(secret: str) -> None:
    """A header must be able to hold it; an empty one, from an unset variable, would guard
    nothing.
    """
    is_plain = secret.isascii() and secret.isprintable() and " " not in secret
    if len(secret) < LEAST_KEY or not is_plain:
        raise UsageError(
            f"an API key of {len(secret)} characters is too short or not printable ASCII; use at "
            f"least {LEAST_KEY} printable ASCII characters without spaces"
        )


def read_keys(path: Path) -> list[ApiKey]:
    """The keys in a file, at least one."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise UsageError(f"cannot read the key file {path}: {reason}") from None
    keys = []
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.lstrip().startswith("#"):
            try:
                keys.append(key_from_line(line))
            except UsageError as error:
                raise UsageError(f"{path} line {number}: {error}") from None
    if not keys:
        raise UsageError(f"the key file {path} has no keys; write one per line")
    return keys


def key_from_line(line: str) -> ApiKey:
    secret, *words = line.split()
    key = ApiKey(secret)
    for word in words:
        key = replace(key, **_option(word))
    return key


def _option(word: str) -> dict[str, Any]:
    option, _, value = word.partition("=")
    if word == "admin":
        return {"is_admin": True}
    if option == "name" and _NAME.fullmatch(value):
        return {"name": value}
    if option == "name":
        raise UsageError(
            "the name of a key is not usable; give 1 to 64 letters, digits, '.', '_' or '-'"
        )
    if option in RATES:
        if not (value.isascii() and value.isdigit() and 0 < int(value[:19]) < 10**18):
            raise UsageError(f"{option} needs a whole number of at least 1 after '='")
        return {RATES[option]: int(value)}
    # The word itself is not shown: it may be a key that somebody put on the same line.
    hint = near_matches(f"{option}=", OPTIONS) if "=" in word else ""
    raise UsageError(
        f"an option of a key is not known; use {', '.join(OPTIONS)} with values, one key a "
        f"line{hint}"
    )
