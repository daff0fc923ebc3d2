"""What a request asks for, once it is checked: `Asked`, and the `Prompt`s that the engine runs.

asked = parse("chat", body, limits)                 # raises ApiError
prompts = render(asked, tokenizer, limits)          # blocking: in a thread
for prompt in prompts:
    engine.add(prompt.ids, prompt.sampling, priority=asked.priority,
               timeout_s=asked.deadline_s, salt=asked.cache_salt)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ridgeline.data import Tokenizer
from ridgeline.engine import Sampling
from ridgeline.engine.extras import Pooling
from ridgeline.server.protocol.limits import Limits

Route = Literal["chat", "completions", "responses", "embeddings", "tokenize", "detokenize"]
ROUTES: tuple[Route, ...] = get_args(Route)


@dataclass(frozen=True)
class Asked:
    """A checked request. `request` is its pydantic model, which only this package looks into."""

    route: Route
    model: str  # the name that the client used
    request: Any
    stream: bool = False
    priority: int = 0
    deadline_s: float | None = None  # from its arrival
    cache_salt: str = ""


@dataclass(frozen=True)
class Prompt:
    """One engine request: a conversation, one of a completion's prompts, or one text to embed."""

    ids: tuple[int, ...]
    sampling: Sampling
    text: str = ""  # what `echo` repeats
    pooling: Pooling | None = None  # embeddings: nothing is sampled
    facts: Mapping[str, Any] | None = None  # what the reply has to know of how it was rendered


def parse(route: Route, body: bytes, limits: Limits) -> Asked:
    """The request in a body, checked. Quick for small bodies; in a thread for large ones."""
    raise NotImplementedError


def render(asked: Asked, tokenizer: Tokenizer, limits: Limits) -> list[Prompt]:
    """The prompts of a request and how each is sampled. Raises ApiError. Blocking: in a thread.
    None for tokenize and detokenize, which `answer_now` answers.
    """
    raise NotImplementedError


def answer_now(asked: Asked, tokenizer: Tokenizer) -> bytes:
    """The JSON that answers a tokenize or detokenize request. Blocking: in a thread."""
    raise NotImplementedError
