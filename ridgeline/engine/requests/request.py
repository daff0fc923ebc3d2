"""What a request asks for: `Sampling`, the one owner of sampling semantics and their defaults.

The plain loop (naive.py) defines what each field does; the engine does the same in batches.

    Sampling(temperature=0.7, top_p=0.9, seed=1, max_tokens=100, stop=("\\n\\n",))
    Sampling(n=3, temperature=1.0, logprobs=5, logit_bias={13: -100.0})
    Sampling(grammar=Grammar.choice(["yes", "no"]))
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ridgeline.engine.requests.grammar import Grammar
from ridgeline.engine.requests.thinking import Thinking
from ridgeline.errors import UsageError, answers_wrong_options

FinishReason = Literal["stop", "length"]

MAX_LOGPROBS = 100  # likeliest tokens that may be asked for at a position
MAX_SAMPLES = 128  # answers to one prompt, as OpenAI's protocol allows them
MAX_BIASED = 1024  # tokens whose logits one request may change
_SEED_STEP = 0x9E3779B97F4A7C15  # odd, so that the samples of a request have seeds of their own


def _help(meaning: str, python_only: bool = False) -> dict[str, Any]:
    """A field's metadata. `python_only` fields are no flags of `ridgeline generate`."""
    return {"help": meaning, "python_only": python_only}


@answers_wrong_options()
@dataclass(frozen=True)
class Sampling:
    temperature: float = field(default=0.0, metadata=_help("0 is greedy; higher is more random"))
    top_k: int = field(default=0, metadata=_help("sample from the k likeliest tokens; 0: all"))
    top_p: float = field(
        default=1.0,
        metadata=_help("sample from the likeliest tokens that together have this probability"),
    )
    min_p: float = field(
        default=0.0,
        metadata=_help("drop tokens below this fraction of the likeliest token's probability"),
    )
    repetition_penalty: float = field(
        default=1.0,
        metadata=_help("above 1 makes tokens already in prompt or output less likely"),
    )
    presence_penalty: float = field(
        default=0.0, metadata=_help("subtracted from the logits of tokens already in the output")
    )
    frequency_penalty: float = field(
        default=0.0,
        metadata=_help("subtracted from a token's logit for each time it is in the output"),
    )
    logit_bias: Mapping[int, float] = field(
        default_factory=dict,
        hash=False,
        metadata=_help("added to the logits of these token ids", python_only=True),
    )
    seed: int | None = field(
        default=None, metadata=_help("random seed (default: drawn and reported)")
    )
    max_tokens: int = field(default=256, metadata=_help("most tokens to generate"))
    min_tokens: int = field(
        default=0, metadata=_help("fewest tokens to generate before a stop token is allowed")
    )
    stop: tuple[str, ...] = field(
        default=(),
        metadata=_help("stop before this text (repeat for several)"),
    )
    stop_ids: tuple[int, ...] = field(
        default=(),
        metadata=_help("stop after this token id, besides the model's own (repeat for several)"),
    )
    ignore_eos: bool = field(
        default=False,
        metadata=_help("do not stop at the model's end-of-text tokens", python_only=True),
    )
    logprobs: int | None = field(
        default=None,
        metadata=_help(
            "log-probability of each output token, and of this many likeliest ones, as the model "
            "has them before temperature, penalties and filters",
            python_only=True,
        ),
    )
    prompt_logprobs: int | None = field(
        default=None, metadata=_help("the same for the tokens of the prompt", python_only=True)
    )
    n: int = field(default=1, metadata=_help("outputs per prompt", python_only=True))
    best_of: int | None = field(
        default=None,
        metadata=_help(
            "make this many outputs and return the n with the highest mean log-probability",
            python_only=True,
        ),
    )
    grammar: Grammar | None = field(
        default=None,
        metadata=_help(
            "the form that the output must have: it ends when that is complete, and its text "
            "is what the grammar accepts",
            python_only=True,
        ),
    )
    thinking: Thinking | None = field(
        default=None,
        metadata=_help(
            "the tags between which the output thinks before it answers, and for how long at most",
            python_only=True,
        ),
    )
    skip_special_tokens: bool = field(
        default=True,
        metadata=_help("special tokens in the output have no text", python_only=True),
    )

    def __post_init__(self) -> None:
        self._check_choice()
        self._check_penalties()
        self._check_lengths()
        self._check_outputs()

    @property
    def num_samples(self) -> int:
        """Outputs that are made."""
        return self.best_of or self.n

    @property
    def wants_logprobs(self) -> bool:
        """Whether output tokens need their log-probabilities, be it to rank the outputs."""
        return self.logprobs is not None or self.num_samples > self.n

    @property
    def has_penalties(self) -> bool:
        """Whether a choice depends on the tokens before it."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1.0, 0.0, 0.0)

    @property
    def needs_tables(self) -> bool:
        """Whether its logits are changed before one is chosen."""
        return self.has_tables or self.is_matched

    @property
    def has_tables(self) -> bool:
        """Whether they are changed for every token."""
        tables = self.has_penalties or self.logit_bias or self.min_tokens
        return bool(tables) or self.grammar is not None

    @property
    def is_matched(self) -> bool:
        """Whether which tokens may come next depends on the text so far: it has a grammar, or a
        limit to its thinking.
        """
        has_limit = self.thinking is not None and self.thinking.max_tokens is not None
        return self.grammar is not None or has_limit

    def sample_seed(self, sample: int) -> int:
        """The seed of one of the request's outputs; the first has the request's own."""
        assert self.seed is not None, "a seed is drawn before anything is sampled"
        return (self.seed + sample * _SEED_STEP) % 2**64

    def _check_choice(self) -> None:
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
        if self.seed is not None and not 0 <= self.seed < 2**64:
            raise UsageError(f"seed is {self.seed}; give a whole number from 0 to 2^64 - 1")

    def _check_penalties(self) -> None:
        repetition = self.repetition_penalty
        if not (math.isfinite(repetition) and repetition > 0):
            raise UsageError(
                f"repetition_penalty is {repetition}; give 1 (none) or another positive number"
            )
        for name in ("presence_penalty", "frequency_penalty"):
            if not math.isfinite(getattr(self, name)):
                raise UsageError(f"{name} is {getattr(self, name)}; give a finite number")
        if len(self.logit_bias) > MAX_BIASED:
            raise UsageError(
                f"logit_bias has {len(self.logit_bias)} tokens; give at most {MAX_BIASED}"
            )
        for token, bias in self.logit_bias.items():
            if math.isnan(bias) or bias == math.inf:
                raise UsageError(f"logit_bias of token {token} is {bias}; give a finite number")

    def _check_lengths(self) -> None:
        if self.max_tokens < 1:
            raise UsageError(f"max_tokens is {self.max_tokens}; give at least 1")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise UsageError(
                f"min_tokens is {self.min_tokens}; give a number from 0 to max_tokens, "
                f"{self.max_tokens}"
            )
        if any(not text for text in self.stop):
            raise UsageError("a stop string is empty; give at least one character")

    def _check_outputs(self) -> None:
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            kind = type(self.grammar).__name__
            raise UsageError(f"grammar is a {kind}; give a Grammar, as Grammar.regex(…) makes one")
        if self.thinking is not None and not isinstance(self.thinking, Thinking):
            kind = type(self.thinking).__name__
            raise UsageError(f"thinking is a {kind}; give a Thinking, as Thinking(max_tokens=512)")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and not 0 <= count <= MAX_LOGPROBS:
                raise UsageError(f"{name} is {count}; give a number from 0 to {MAX_LOGPROBS}")
        if not 1 <= self.n <= MAX_SAMPLES:
            raise UsageError(f"n is {self.n}; give a number from 1 to {MAX_SAMPLES}")
        if self.best_of is not None and not self.n <= self.best_of <= MAX_SAMPLES:
            raise UsageError(
                f"best_of is {self.best_of}; give a number from n, {self.n}, to {MAX_SAMPLES}"
            )
