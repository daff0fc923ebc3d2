"""Workload: requests with their arrival times and lengths, the same for plan, bench and optimize.

A request's output length is what it is made to produce: end-of-text is ignored. Its prompt is given
as token ids, or only as a length; `prompt_ids` makes ids for either, the same ones each time. Where
a trace says which blocks of prompts are equal, equal blocks get equal ids, so that prefixes are
shared for real. traces.py reads workloads from files.

    workload = named_workload("throughput")
    workload = load_workload(Path("trace.jsonl")).first(100).sped_up(2.0)
    ids = workload.prompt_ids(0, vocab_size=128256)
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from ridgeline.errors import UsageError, near_matches


@dataclass(frozen=True)
class WorkloadRequest:
    """One request, before there is a model to run it."""

    num_prompt_tokens: int
    num_output_tokens: int
    arrival_s: float = 0.0  # after the workload begins
    prompt: tuple[int, ...] | None = None  # token ids, where the source has them
    block_hashes: tuple[int, ...] = ()  # one for each block of the prompt: equal hash, equal block
    category: str = ""  # what kind of prompt it is, where the source says so

    def __post_init__(self) -> None:
        for name in ("num_prompt_tokens", "num_output_tokens"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; give at least 1")
        if not 0 <= self.arrival_s < float("inf"):
            raise UsageError(f"arrival_s is {self.arrival_s}; give seconds from 0 on")
        if self.prompt is not None and len(self.prompt) != self.num_prompt_tokens:
            raise UsageError(
                f"the prompt has {len(self.prompt)} tokens and num_prompt_tokens is "
                f"{self.num_prompt_tokens}; give the same number"
            )

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens


@dataclass(frozen=True)
class Workload:
    name: str
    requests: tuple[WorkloadRequest, ...]  # in the order they arrive
    block_tokens: int = 512  # tokens that one of a request's block hashes stands for
    temperature: float = 0.0  # every request samples with it; 0 is greedy

    def __post_init__(self) -> None:
        if not self.requests:
            raise UsageError(f"workload {self.name} has no requests; choose a larger part of it")
        arrivals = [request.arrival_s for request in self.requests]
        assert arrivals == sorted(arrivals), "requests are kept in the order they arrive"
        for index, request in enumerate(self.requests):
            blocks = -(-request.num_prompt_tokens // self.block_tokens)
            if request.block_hashes and len(request.block_hashes) != blocks:
                raise UsageError(
                    f"request {index} has {len(request.block_hashes)} block hashes for "
                    f"{request.num_prompt_tokens} prompt tokens; blocks of {self.block_tokens} "
                    f"tokens need {blocks}"
                )

    @property
    def num_prompt_tokens(self) -> int:
        return sum(request.num_prompt_tokens for request in self.requests)

    @property
    def num_output_tokens(self) -> int:
        return sum(request.num_output_tokens for request in self.requests)

    @property
    def duration_s(self) -> float:
        """From the beginning to the last arrival."""
        return self.requests[-1].arrival_s

    def first(self, count: int) -> Workload:
        """The first requests alone."""
        if count < 1:
            raise UsageError(f"the number of requests is {count}; give at least 1")
        return replace(self, requests=self.requests[:count])

    def spread(self, count: int) -> Workload:
        """So many of the requests, of all lengths in proportion, in the order they arrive."""
        if count < 1:
            raise UsageError(f"the number of requests is {count}; give at least 1")
        total = len(self.requests)
        if count >= total:
            return self
        by_length = sorted(
            range(total),
            key=lambda i: (self.requests[i].num_output_tokens, self.requests[i].num_prompt_tokens),
        )
        kept = sorted(by_length[(2 * each + 1) * total // (2 * count)] for each in range(count))
        return replace(self, requests=tuple(self.requests[index] for index in kept))

    def of_category(self, category: str) -> Workload:
        """The requests of one kind alone, under its name too."""
        known = sorted({request.category for request in self.requests} - {""})
        if category not in known:
            has = f"its categories are {', '.join(known)}" if known else "it has no categories"
            hint = near_matches(category, known)
            raise UsageError(f"workload {self.name} has no {category!r} in it; {has}{hint}")
        kept = tuple(request for request in self.requests if request.category == category)
        return replace(self, name=f"{self.name} {category}", requests=kept)

    def between(self, start_s: float, end_s: float) -> Workload:
        """The requests that arrive in this time span, moved to start at zero."""
        kept = [request for request in self.requests if start_s <= request.arrival_s < end_s]
        moved = [replace(request, arrival_s=request.arrival_s - start_s) for request in kept]
        return replace(self, requests=tuple(moved))

    def sped_up(self, factor: float) -> Workload:
        """The same requests, arriving at `factor` times the rate."""
        if not 0 < factor < float("inf"):
            raise UsageError(f"the factor of the rate is {factor}; give a positive number")
        moved = [replace(entry, arrival_s=entry.arrival_s / factor) for entry in self.requests]
        return replace(self, requests=tuple(moved))

    def at_once(self) -> Workload:
        """The same requests, all arriving at the start."""
        return replace(self, requests=tuple(replace(r, arrival_s=0.0) for r in self.requests))

    def within(self, max_context: int) -> Workload:
        """The requests whose prompt and output fit a context; callers report how many do not."""
        kept = [request for request in self.requests if request.num_tokens <= max_context]
        return replace(self, requests=tuple(kept))

    def prompt_ids(self, index: int, vocab_size: int, seed: int = 0) -> list[int]:
        """Token ids of a request's prompt: as given, by its block hashes, or drawn from `seed`."""
        request = self.requests[index]
        if request.prompt is not None:
            return _checked(request.prompt, vocab_size, self.name)
        if not request.block_hashes:
            return _draw(seed, index, 0, request.num_prompt_tokens, vocab_size).tolist()
        blocks = [_draw(seed, h, 1, self.block_tokens, vocab_size) for h in request.block_hashes]
        return np.concatenate(blocks)[: request.num_prompt_tokens].tolist()

    def ideal_hit_rate(self) -> float:
        """The share of prompt blocks that occurred before: the hit rate of a prefix cache that
        keeps everything.
        """
        hashes = [block for request in self.requests for block in request.block_hashes]
        return 1 - len(set(hashes)) / len(hashes) if hashes else 0.0


def named_workload(name: str) -> Workload:
    """One of `MIXES`."""
    if name not in MIXES:
        hint = near_matches(name, MIXES)
        raise UsageError(f"workload {name!r} is unknown; choose from {', '.join(MIXES)}{hint}")
    return MIXES[name]()


def throughput() -> Workload:
    """512 requests at once, prompts and outputs of 100 to 1024 tokens, at temperature 0.6."""
    prompts, outputs = _uniform(512, 100, 1024)
    return replace(_of("throughput", prompts, outputs), temperature=0.6)


def batch_1() -> Workload:
    """One request alone: 128 tokens in, 256 out."""
    draw = random.Random(0)
    return _of("batch-1", [_ids(draw, 128)], [256])


def prefill() -> Workload:
    """16 prompts of 2048 tokens and one output token each."""
    draw = random.Random(0)
    return _of("prefill", [_ids(draw, 2048) for _ in range(16)], [1] * 16)


def cpu() -> Workload:
    """32 requests at once, prompts and outputs of 16 to 256 tokens: what a CPU can do."""
    return _of("cpu", *_uniform(32, 16, 256))


def cpu_equal() -> Workload:
    """32 requests at once of the same lengths, 64 tokens in and 64 out: what padding is best at."""
    draw = random.Random(0)
    return _of("cpu-equal", [_ids(draw, 64) for _ in range(32)], [64] * 32)


def shared_prefix() -> Workload:
    """64 requests at once that share a prefix of 6,000 tokens, each with 32 tokens more."""
    draw = random.Random(0)
    common = _ids(draw, 6000)
    return _of("shared-prefix", [common + _ids(draw, 32) for _ in range(64)], [16] * 64)


MIXES: dict[str, Callable[[], Workload]] = {
    "throughput": throughput,
    "batch-1": batch_1,
    "prefill": prefill,
    "cpu": cpu,
    "cpu-equal": cpu_equal,
    "shared-prefix": shared_prefix,
}


def _uniform(count: int, low: int, high: int) -> tuple[list[tuple[int, ...]], list[int]]:
    """Prompts and output lengths, uniform from low to high. The order of the draws is part of what
    the mix is: each prompt's length and then its ids, and after all prompts the outputs' lengths.
    """
    draw = random.Random(0)
    prompts = [_ids(draw, draw.randint(low, high)) for _ in range(count)]
    return prompts, [draw.randint(low, high) for _ in range(count)]


def _ids(draw: random.Random, count: int) -> tuple[int, ...]:
    return tuple(draw.randint(0, 10000) for _ in range(count))


def _of(name: str, prompts: list[tuple[int, ...]], outputs: list[int]) -> Workload:
    """Requests that all arrive at the start."""
    pairs = zip(prompts, outputs, strict=True)
    requests = (WorkloadRequest(len(prompt), output, prompt=prompt) for prompt, output in pairs)
    return Workload(name, tuple(requests))


def _checked(prompt: tuple[int, ...], vocab_size: int, name: str) -> list[int]:
    if max(prompt) >= vocab_size:
        raise UsageError(
            f"workload {name} has token id {max(prompt)}; the model's vocabulary has {vocab_size}; "
            "use a model with a larger one, or another workload"
        )
    return list(prompt)


def _draw(seed: int, key: int, stream: int, count: int, vocab_size: int) -> np.ndarray:
    """Ids from a counter-based generator (splitmix64): a function of its arguments and of nothing
    else, so that a block is the same wherever it appears, and on every machine.
    """
    start = np.zeros(1, dtype=np.uint64)
    for word in (seed, key, stream):
        start = _mixed(start + np.uint64(word % 2**64))
    mixed = _mixed(start + np.arange(count, dtype=np.uint64))
    return (mixed % np.uint64(vocab_size)).astype(np.int64)


def _mixed(words: np.ndarray) -> np.ndarray:
    """Each 64-bit word spread over all its bits; products wrap around."""
    words = (words + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
