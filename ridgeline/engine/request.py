"""What a request asks for: `Sampling`, the one owner of sampling semantics and their defaults.

Sampling(temperature=0.7, top_p=0.9, seed=1, max_tokens=100, stop=("\\n\\n",))
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from ridgeline.errors import UsageError

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Sampling:
    temperature: float = field(
        default=0.0, metadata={"help": "0 is greedy; higher spreads the choice over more tokens"}
    )
    top_k: int = field(default=0, metadata={"help": "choose among the k likeliest tokens; 0: all"})
    top_p: float = field(
        default=1.0,
        metadata={"help": "choose among the likeliest tokens that together reach this probability"},
    )
    min_p: float = field(
        default=0.0,
        metadata={"help": "drop tokens below this share of the likeliest one's probability"},
    )
    seed: int | None = field(
        default=None, metadata={"help": "repeats a draw; drawn and reported when not given"}
    )
    max_tokens: int = field(default=256, metadata={"help": "stop after this many tokens"})
    stop: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "end before this text appears in the output (may be given several times)"
        },
    )

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UsageError(
                f"temperature is {self.temperature}; give 0 (greedy) or a positive number"
            )
        if self.top_k < 0:
            raise UsageError(f"top_k is {self.top_k}; give 0 (all) or a positive number")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top_p is {self.top_p}; give a number above 0 and at most 1")
        if not 0 <= self.min_p <= 1:
            raise UsageError(f"min_p is {self.min_p}; give a number from 0 to 1")
        if self.max_tokens < 1:
            raise UsageError(f"max_tokens is {self.max_tokens}; give at least 1")
        if self.seed is not None and not 0 <= self.seed < 2**64:
            raise UsageError(f"seed is {self.seed}; give a whole number from 0 to 2^64 - 1")
        if any(not text for text in self.stop):
            raise UsageError("a stop string is empty; give at least one character")
