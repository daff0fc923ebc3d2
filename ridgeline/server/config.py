"""How a server behaves towards its clients: where it listens, who may use it, how much it takes on
and how long it waits. The flags of `ridgeline serve` are read from these fields.

    ServerConfig(port=0, api_key=("secret",), max_waiting=64)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ridgeline.errors import UsageError
from ridgeline.formats.fields import check_fields, field_help
from ridgeline.server.protocol.thinking import check_tags

MIB = 1 << 20
LEAST_KEY = 8  # characters
# Bytes of a request for each token of the context, at least a MiB: text has 4 or so. A tokenizer
# takes seconds for a few MiB that will not fit anyway.
BODY_BYTES_A_TOKEN = 32


@dataclass(frozen=True)
class ServerConfig:
    host: str = field(
        default="127.0.0.1", metadata=field_help("address to listen on; 0.0.0.0 for all")
    )
    port: int = field(
        default=8000,
        metadata=field_help("port to listen on; 0 picks a free one", minimum=0, maximum=65535),
    )
    served_name: str | None = field(
        default=None, metadata=field_help("model name shown to clients (default: MODEL)")
    )
    api_key: tuple[str, ...] = field(
        default=(),
        metadata=field_help("require this key (repeat for several); visible in the process list"),
    )
    api_key_file: str | None = field(
        default=None, metadata=field_help("require one of the API keys in FILE, one per line")
    )
    reasoning: str = field(
        default="auto",
        metadata=field_help(
            "tags between which the model thinks: auto (by its chat template), off (thoughts stay "
            "in the text), or two of them, as '<think>,</think>'"
        ),
    )
    unknown_fields: Literal["refuse", "ignore"] = field(
        default="refuse",
        metadata=field_help(
            "request fields that are not known: refuse (HTTP 400), or ignore (their names are in "
            "the response header x-ridgeline-ignored-fields)"
        ),
    )
    max_waiting: int = field(
        default=256,
        metadata=field_help("longest queue beyond --max-batch; more gets HTTP 429", minimum=0),
    )
    max_per_key: int = field(
        default=256, metadata=field_help("most requests per API key at a time", minimum=1)
    )
    max_connections: int = field(
        default=2048, metadata=field_help("most open connections; more are refused", minimum=1)
    )
    max_body_mib: int | None = field(
        default=None,
        metadata=field_help(
            "largest request body in MiB (default: several times the context)",
            minimum=1,
            maximum=1024,
        ),
    )
    client_timeout: float = field(
        default=30.0,
        metadata=field_help(
            "seconds a client may take to send a request or to read its response", minimum=0.1
        ),
    )
    step_timeout: float = field(
        default=120.0,
        metadata=field_help(
            "restart the engine after this many seconds without a step", minimum=0.1
        ),
    )
    drain_seconds: float = field(
        default=30.0,
        metadata=field_help("seconds running requests get to finish after SIGTERM", minimum=0.0),
    )
    generation_config: Literal["model", "none"] = field(
        default="model",
        metadata=field_help(
            "sampling values for requests that give none: `model` takes those of the model's "
            "generation_config.json, `none` OpenAI's"
        ),
    )
    log_prompts: bool = field(default=False, metadata=field_help("log prompts in full"))

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.host:
            raise UsageError("host is empty; give an address, e.g. 127.0.0.1 or 0.0.0.0")
        if self.reasoning not in ("auto", "off"):
            check_tags(self.reasoning)

    def max_body_bytes(self, max_context: int) -> int:
        if self.max_body_mib is not None:
            return self.max_body_mib * MIB
        return max(MIB, max_context * BODY_BYTES_A_TOKEN)

    def keys(self) -> tuple[str, ...]:
        """All keys, of the flag and of the file; none where neither was given."""
        return tuple(_checked(key) for key in (*self.api_key, *self._keys_of_file()))

    def _keys_of_file(self) -> list[str]:
        if self.api_key_file is None:
            return []
        try:
            lines = Path(self.api_key_file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read --api-key-file {self.api_key_file}: {error}") from error
        keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not keys:
            raise UsageError(f"--api-key-file {self.api_key_file} has no keys; write one per line")
        return keys


def _checked(key: str) -> str:
    """A key that a header can hold; an empty one, from an unset variable, would guard nothing."""
    if len(key) < LEAST_KEY or not key.isascii() or not key.isprintable() or " " in key:
        raise UsageError(
            f"an API key of {len(key)} characters is too short or not printable ASCII; use at "
            f"least {LEAST_KEY} printable ASCII characters without spaces"
        )
    return key
