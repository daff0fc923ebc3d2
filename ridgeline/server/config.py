"""How a server behaves towards its clients: where it listens, who may use it, how much it takes on
and how long it waits. The flags of `ridgeline serve` are read from these fields.

    ServerConfig(port=0, api_key=("secret-key",), max_waiting=64)
    with_environment(config, os.environ)        # with the keys that stand there
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ridgeline.engine.grammars.compile_queue import CompileLimits
from ridgeline.errors import UsageError
from ridgeline.formats.api_keys import ApiKey, read_keys
from ridgeline.formats.fields import check_fields, field_help
from ridgeline.server.protocol.thinking import check_tags

MIB = 1 << 20
MAX_NAME = 200  # characters of a model's name
# Variables that hold keys, several apart by spaces or lines, and the field that takes them.
KEY_VARIABLES = {"RIDGELINE_API_KEY": "api_key", "RIDGELINE_ADMIN_KEY": "admin_key"}
_ROOT_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)*")
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
    probe_port: int | None = field(
        default=None,
        metadata=field_help(
            "also answer /health and /ready on this port: plain HTTP, no key, its own connections",
            minimum=0,
            maximum=65535,
        ),
    )
    served_model_name: tuple[str, ...] = field(
        default=(),
        metadata=field_help(
            "name or names under which clients see the model (default: MODEL)",
            aliases=("served-name",),
            several=True,
        ),
    )
    root_path: str = field(
        default="", metadata=field_help("path under which a proxy offers the server, e.g. /llm")
    )
    api_key: tuple[str, ...] = field(
        default=(),
        metadata=field_help(
            "require this key (repeat for several); visible in the process list, unlike "
            "RIDGELINE_API_KEY"
        ),
    )
    api_key_file: tuple[str, ...] = field(
        default=(),
        metadata=field_help(
            "require one of the API keys in FILE, one per line; read again when it changes"
        ),
    )
    admin_key: tuple[str, ...] = field(
        default=(),
        metadata=field_help(
            "a key that sees and cancels everybody's requests; or RIDGELINE_ADMIN_KEY"
        ),
    )
    requests_per_minute: int | None = field(
        default=None, metadata=field_help("most requests per API key and minute", minimum=1)
    )
    tokens_per_minute: int | None = field(
        default=None,
        metadata=field_help("most prompt and output tokens per API key and minute", minimum=1),
    )
    allow_origin: tuple[str, ...] = field(
        default=(),
        metadata=field_help(
            "let web pages of this origin use the server, e.g. https://chat.example.org (repeat "
            "for several; * for all)"
        ),
    )
    tls_cert: str | None = field(
        default=None, metadata=field_help("serve HTTPS with this certificate chain (PEM)")
    )
    tls_key: str | None = field(
        default=None, metadata=field_help("private key of --tls-cert (PEM, not encrypted)")
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
    grammar_timeout: float = field(
        default=CompileLimits.timeout_s,
        metadata=field_help(
            "seconds of compiling that one schema, regex or grammar may take", minimum=0.1
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
        if not _ROOT_PATH.fullmatch(self.root_path):
            raise UsageError(
                f"root_path is {self.root_path!r}; begin it with / and end it without, e.g. /llm"
            )
        if (self.tls_cert is None) != (self.tls_key is None):
            raise UsageError("tls_cert and tls_key go together; give both or neither")
        if self.probe_port and self.probe_port == self.port:
            raise UsageError("probe_port is the server's own port; give another one")
        _check_names(self.served_model_name)

    def max_body_bytes(self, max_context: int) -> int:
        if self.max_body_mib is not None:
            return self.max_body_mib * MIB
        return max(MIB, max_context * BODY_BYTES_A_TOKEN)

    def api_keys(self) -> tuple[ApiKey, ...]:
        """All keys, of flags and files; none where neither was given."""
        return (
            *(ApiKey(secret) for secret in self.api_key),
            *(ApiKey(secret, is_admin=True) for secret in self.admin_key),
            *(key for path in self.api_key_file for key in read_keys(Path(path))),
        )

    @property
    def files(self) -> tuple[Path, ...]:
        """Those that are read again when they change."""
        paths = (*self.api_key_file, self.tls_cert, self.tls_key)
        return tuple(Path(path) for path in paths if path is not None)


def with_environment(config: ServerConfig, environment: Mapping[str, str]) -> ServerConfig:
    """With the keys of KEY_VARIABLES. One that is set and empty, as by a script whose own variable
    is missing, would leave the server open: it is refused.
    """
    for variable, name in KEY_VARIABLES.items():
        if variable in environment:
            secrets = environment[variable].split()
            if not secrets:
                raise UsageError(f"{variable} is set but empty; put a key into it, or unset it")
            change: dict[str, Any] = {name: (*getattr(config, name), *secrets)}
            config = replace(config, **change)
    return config


def _check_names(names: tuple[str, ...]) -> None:
    for name in names:
        if not name or len(name) > MAX_NAME or not name.isprintable() or name != name.strip():
            raise UsageError(
                f"served_model_name is {name[:60]!r}; give 1 to {MAX_NAME} printable characters"
            )
    if len(set(names)) < len(names):
        raise UsageError("served_model_name has a name twice; give each once")
