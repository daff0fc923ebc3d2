"""What a request asks for, once it is checked: `Asked`, and the `ParsedPrompt`s that the engine
runs.

parsing.py makes the first, rendering.py the second.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from ridgeline.engine import Sampling, Thinking
from ridgeline.engine.sampling.extras import Pooling
from ridgeline.server.protocol.requests.tool_fields import Tool, ToolChoice

Route = Literal[
    "chat",
    "completions",
    "responses",
    "messages",
    "count_tokens",
    "embeddings",
    "tokenize",
    "detokenize",
]
ROUTES: tuple[Route, ...] = get_args(Route)
ToolFormat = Literal["hermes", "llama3"]


@dataclass(frozen=True)
class ThinkingWish:
    """What a request asks of the model's thinking; None: as the model has it."""

    is_on: bool | None = None
    effort: str | None = None
    max_tokens: int | None = None  # then its answer begins
    is_shown: bool = True  # in the reply


@dataclass(frozen=True)
class Conversation:
    """What a chat template is given."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = field(default_factory=ToolChoice)
    parallel: bool = True
    variables: Mapping[str, Any] = field(default_factory=dict)
    thinking: ThinkingWish = field(default_factory=ThinkingWish)
    opening: str = ""  # of the answer: the model goes on with it
    is_prompted: bool = True  # the template opens the next message of the assistant
    is_continued: bool = False  # the output goes on from the last message

    @property
    def usable_tools(self) -> tuple[Tool, ...]:
        return () if self.choice.word == "none" else self.tools


@dataclass(frozen=True)
class Asked:
    """A checked request. `request` is its pydantic model, which only this package looks into."""

    route: Route
    model: str  # the name that the client used
    request: Any
    sampling: Sampling | None = None  # without what only the tokenizer's template can tell
    conversation: Conversation | None = None
    stream: bool = False
    include_usage: bool = False  # in a stream
    usage_in_chunks: bool = False  # in a stream: so far, with each of them
    returns_ids: bool = False  # of prompt and output, beside their texts
    priority: int = 0
    deadline_s: float | None = None  # from its arrival
    cache_salt: str = ""
    ignored: tuple[str, ...] = ()  # fields that nobody knows, where those are ignored


@dataclass(frozen=True)
class Calls:
    """How calls of tools are found in an output."""

    format: ToolFormat
    names: frozenset[str]
    parallel: bool  # several in one output


@dataclass(frozen=True)
class ParsedPrompt:
    """One engine request: a conversation, one of a completion's prompts, or one text to embed."""

    ids: tuple[int, ...]
    sampling: Sampling
    text: str = ""  # what `echo` repeats
    pooling: Pooling | None = None  # embeddings: nothing is sampled
    calls: Calls | None = None
    thinking: Thinking | None = None  # how thoughts are told from answers in its outputs
