"""What a server is and allows, as far as checking a request needs it.

The size of a body and the number of connections are the front's; bounds that do not depend on the
model stand with the fields they bound.

    Limits(models=("demo",), max_context=8192, vocab_size=49152)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class ThinkingTags(NamedTuple):
    open_tag: str
    close_tag: str


@dataclass(frozen=True)
class RequestLimits:
    models: tuple[str, ...]  # names under which the model is served; the first is its own
    max_context: int  # tokens of prompt and output together
    vocab_size: int  # token ids in a request are below it
    max_depth: int = 64  # of lists and objects in a body
    max_outputs: int = 128  # that one request may have made: prompts × best_of
    ignores_unknown: bool = False  # fields of requests that nobody knows are no errors
    thinking_tags: ThinkingTags | None = None  # between which the model thinks
    sampling: Mapping[str, Any] = field(default_factory=dict)  # where a request has no value
