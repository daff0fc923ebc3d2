"""What callers of the engine get: `Delta` while a request runs, `Output` when it has ended.

for event in engine.step():
    if isinstance(event, Delta): print(event.text, end="")
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ridgeline.engine.requests.request import FinishReason
from ridgeline.engine.sampling.choosing import NO_NUMBERS, TokenLogprob
from ridgeline.engine.scheduling.state import Status
from ridgeline.errors import NumericsError, RequestError


class Delta(NamedTuple):
    """What a step added to one of a request's outputs."""

    request_id: Hashable
    sample: int
    text: str  # may be empty: half a character, or what may become a stop string, is held back
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None  # of the output, when this is its last
    logprobs: tuple[TokenLogprob, ...] = ()

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Completion:
    """One output of a request."""

    text: str
    tokens: tuple[int, ...]  # the stop token included
    finish_reason: FinishReason | None  # None: the request ended before the output did
    logprobs: tuple[TokenLogprob, ...] | None  # where they were asked for
    stop_text: str | None = None  # the stop string that ended it, which is not in its text

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Output:
    """What came of a request. There is exactly one for each, whatever happened to it."""

    request_id: Hashable
    status: Status
    reason: str  # why it ended: stop, length, or in words
    num_prompt_tokens: int
    seed: int  # repeats the draw
    completions: tuple[Completion, ...]
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None  # the first token has none
    embedding: Tensor | None  # [hidden size], fp32
    first_token_s: float | None  # from its arrival to its first token
    total_s: float  # from its arrival to its end
    num_cached_tokens: int = 0  # of the prompt, which the prefix cache had
    engine_first_token_s: float | None = None  # of `first_token_s`, the engine's own process

    @property
    def text(self) -> str:
        """Of the first output."""
        return self.completions[0].text

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.completions[0].tokens

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.completions[0].finish_reason

    def __str__(self) -> str:
        """The text; each with its number where there are several, and why it is not whole."""
        parts = [completion.text for completion in self.completions]
        if len(parts) > 1:
            parts = [f"[{number}] {text}" for number, text in enumerate(parts)]
        if self.embedding is not None:
            parts = [f"[embedding of {len(self.embedding)} numbers]"]
        if self.status != "finished":
            parts.append(f"[{self.status}: {self.reason}]")
        return "\n".join(part for part in parts if part)

    def raise_unless_finished(self) -> None:
        if self.status == "failed" and NO_NUMBERS in self.reason:
            raise NumericsError(self.reason)
        if self.status != "finished":
            raise RequestError(f"the request was {self.status}: {self.reason}")


Event = Delta | Output
