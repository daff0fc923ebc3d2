"""The part of a workload that one round runs, so that a round takes seconds whatever the workload
and however slow the recipe.

A part keeps as many requests as run at once (what a rung gains depends on the batch) and the
proportion of prompts to outputs; what it gives up is length: every prompt and every output is
shortened to the same share. One request after the other needs few of them: where it is one, that is
a typical one. The whole is a part too.

    part = Part(count=8, share=0.25)
    part.of(workload)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from ridgeline.data.workload import Workload, WorkloadRequest

MAX_REPEATS = 16
LEAST_TOKENS = 2  # of an output: one would only measure its prompt
FIRST_TOKENS = 8  # of the longest output, of the part that is tried first


@dataclass(frozen=True)
class WorkloadPart:
    count: int  # of its requests, spread over all lengths
    share: float = 1.0  # of the length of each prompt and output
    repeats: int = 1  # so many times in one round

    def of(self, workload: Workload) -> Workload:
        some = workload.spread(self.count)
        if self.count == 1:
            some = replace(some, requests=(typical(workload),))
        if self.share >= 1.0:
            return some
        block = workload.block_tokens
        requests = tuple(_shortened(request, self.share, block) for request in some.requests)
        return replace(some, requests=requests)

    def is_whole(self, workload: Workload) -> bool:
        return self.count >= len(workload.requests) and self.share >= 1.0

    def words(self, workload: Workload) -> str:
        count = min(self.count, len(workload.requests))
        some = "all" if count == len(workload.requests) else f"{count} of {len(workload.requests)}"
        lengths = "" if self.share >= 1.0 else f", shortened to {self.share:.0%} of their length"
        return f"{some} requests{lengths}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> WorkloadPart:
        return cls(**document)


def typical(workload: Workload) -> WorkloadRequest:
    """The request that stands for all where one has to: its prompt and its output are, in
    proportion, nearest to the means.
    """
    count = len(workload.requests)
    prompt, output = workload.num_prompt_tokens / count, workload.num_output_tokens / count

    def distance(request: WorkloadRequest) -> float:
        pairs = ((request.num_prompt_tokens, prompt), (request.num_output_tokens, output))
        return sum(abs(math.log(own / mean)) for own, mean in pairs)

    return min(workload.requests, key=distance)


def _shortened(request: WorkloadRequest, share: float, block_tokens: int) -> WorkloadRequest:
    """Prompts that begin alike still do: they are cut at their ends."""
    prompt = max(1, round(share * request.num_prompt_tokens))
    output = max(LEAST_TOKENS, round(share * request.num_output_tokens))
    return replace(
        request,
        num_prompt_tokens=prompt,
        num_output_tokens=min(output, request.num_output_tokens),
        prompt=None if request.prompt is None else request.prompt[:prompt],
        block_hashes=request.block_hashes[: -(-prompt // block_tokens)],
    )


def first_part(workload: Workload, at_once: int) -> WorkloadPart:
    """The smallest that says how fast a recipe is."""
    count = min(at_once, len(workload.requests))
    some = [typical(workload)] if count == 1 else workload.spread(count).requests
    longest = max(request.num_output_tokens for request in some)
    return WorkloadPart(count, min(1.0, FIRST_TOKENS / longest))


def longer(
    part: WorkloadPart, took_s: float, wanted_s: float, growth: float = 64.0
) -> WorkloadPart:
    """One that takes about `wanted_s`, if this one took `took_s`: longer, up to the whole length,
    and then several times over.
    """
    factor = min(growth, wanted_s / max(took_s, 1e-6))
    share = min(1.0, part.share * factor)
    repeats = max(1, min(MAX_REPEATS, round(factor * part.share / share)))
    return replace(part, share=share, repeats=repeats)
