"""The cheapest mixture of schemes inside a bound: which projection has which, in plain numbers.

Every projection begins as it is. A step takes one to a smaller scheme; steps are in the order of
what they cost (divergence, sensitivity.py) for each byte they save, so a mixture is a number of
steps, and more steps are smaller and worse. Costs are taken to add up, which is only nearly so:
how far one can go is found by measuring whole mixtures, each time nearer.

    path = steps({"layers.0.mlp.down": [Option(None, 4096, 0.0), Option(int8, 2112, 1e-5)]})
    count = furthest(path, share_of_bound, likely=50.0)
    schemes_after(path[:count])
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from ridgeline.quantization.scheme import Scheme

MAX_TRIALS = 8  # whole mixtures that are measured
CLOSE = 0.01  # of all bytes: a smaller difference is not worth a measurement
AIM = 0.95  # of the bound: where the next mixture is expected
INSIDE = 0.1  # of what is between two ends: a guess keeps so far from them


class Option(NamedTuple):
    scheme: Scheme | None  # None: as it is
    num_bytes: int
    kl: float  # that it causes alone


class MixtureStep(NamedTuple):
    name: str
    scheme: Scheme
    saved: int  # bytes
    kl: float  # added


def steps(options: Mapping[str, Sequence[Option]]) -> list[MixtureStep]:
    """Those that pay most first. Of each projection's options the plain one is the first."""
    result = []
    for name, known in options.items():
        kept = worthwhile(known)
        for before, after in pairwise(kept):
            assert after.scheme is not None, f"{name} is plain already"
            saved = before.num_bytes - after.num_bytes
            result.append(MixtureStep(name, after.scheme, saved, max(after.kl - before.kl, 0.0)))
    return sorted(result, key=lambda step: step.kl / step.saved)


def worthwhile(options: Sequence[Option]) -> list[Option]:
    """From the largest to the smallest, each of which saves its bytes at a higher price than the
    one before: what is beaten by another, or by a mix of two others, is left out.
    """
    plain, *others = options
    kept = [plain]
    for option in sorted(others, key=lambda one: (-one.num_bytes, one.kl)):
        if option.num_bytes >= kept[-1].num_bytes:
            continue
        while len(kept) > 1 and _price(kept[-2], kept[-1]) >= _price(kept[-2], option):
            kept.pop()
        kept.append(option)
    return kept


def _price(before: Option, after: Option) -> float:
    return (after.kl - before.kl) / (before.num_bytes - after.num_bytes)


def schemes_after(path: Sequence[MixtureStep]) -> dict[str, Scheme]:
    """The scheme of each projection that is not as it was."""
    return {step.name: step.scheme for step in path}


def furthest(
    path: Sequence[MixtureStep],
    share_of_bound: Callable[[int], float],
    *,
    likely: float,
    total_bytes: int,
    max_trials: int = MAX_TRIALS,
    whole: float | None = None,
) -> int:
    """How many steps stay inside the bound, as far as so many measurements tell; 0 for none.

    `share_of_bound` measures the mixture of so many steps: up to 1 is inside. `likely` is what a
    nat of added-up cost takes of the bound, which the first guess goes by; or it goes by `whole`,
    the share of all steps, where that is known and outside.
    """
    costs = [0.0, *accumulate(step.kl for step in path)]
    saved = [0, *accumulate(step.saved for step in path)]
    low, low_share = 0, 0.0  # inside
    high, high_share = len(path) + 1, None  # outside, or beyond the last
    if whole is not None:
        high, high_share = len(path), whole
    for _ in range(max_trials):
        if high_share is not None and math.isinf(high_share):  # a bound of nothing
            break
        if high - low < 2 or (high_share and saved[high] - saved[low] <= CLOSE * total_bytes):
            break
        if high_share is None:
            aim = AIM / likely if likely > 0 else costs[-1]
        else:
            part = (AIM - low_share) / (high_share - low_share)
            aim = costs[low] + max(part, 0.0) * (costs[high] - costs[low])
        count = _between(bisect_right(costs, aim) - 1, low, high, high_share is None)
        share = share_of_bound(count)
        if share <= 1.0:
            low, low_share = count, share
        else:
            high, high_share = count, share
        likely = share / costs[count] if costs[count] > 0 else likely
    return low


def _between(guess: int, low: int, high: int, is_open: bool) -> int:
    """A guess that is inside, and not so near an end that little would be learnt; the far end may
    be tried while nothing is known of it.
    """
    margin = int(INSIDE * (high - low))
    last = high - 1 if is_open else max(high - 1 - margin, low + 1)
    return min(max(guess, low + 1 + margin), last)
