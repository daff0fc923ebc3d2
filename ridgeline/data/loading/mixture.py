"""Mixtures: so much of a run from each of several corpora, exactly, and ranges of it left out.

`mixture.json` names corpora with their weights. At every point of a run, what was taken from each
differs from its quota by less than one sample: jobs with release and deadline (proportionate fair
scheduling), of which a period is worked out and then repeats, so that any place is found at once.

    quotas = Quotas([Fraction("0.7"), Fraction("0.3")])
    quotas.sources(first=10**12, count=8)       # which corpus, and the how-manieth sample of it
    save_mixture(folder, Mixture((MixedCorpus("wiki", "0.7"), MixedCorpus("code", "0.3"))))
"""

from __future__ import annotations

import heapq
import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ridgeline.data.loading.order import SampleOrder
from ridgeline.data.loading.permutation import key_of
from ridgeline.errors import UsageError
from ridgeline.formats.files import atomic_write, reject_unknown_keys

MIXTURE_NAME = "mixture.json"
FORMAT = "ridgeline-mixture"
VERSION = 1
MOST_SLOTS = 10**5  # of a period
Integers = NDArray[np.int64]


class Quotas:
    """Whose turn it is."""

    def __init__(self, weights: Sequence[Fraction]) -> None:
        """Positive; only their ratios count."""
        shares = [weight / sum(weights) for weight in weights]
        period = math.lcm(*(share.denominator for share in shares))
        if period > MOST_SLOTS:
            raise UsageError(
                f"these weights repeat after {period:,} samples, which is more than {MOST_SLOTS:,};"
                " give weights with fewer digits"
            )
        self.counts = np.array([int(share * period) for share in shares], dtype=np.int64)
        self._turns = _turns(self.counts.tolist(), period)
        self._ranks = np.empty(period, dtype=np.int64)  # how many of the same came before
        for source, count in enumerate(self.counts.tolist()):
            self._ranks[self._turns == source] = np.arange(count)

    def sources(self, first: int, count: int) -> tuple[Integers, Integers]:
        """Of these samples of a run: the source, and which of the source's samples it is."""
        numbers = np.arange(first, first + count, dtype=np.int64)
        periods, slots = np.divmod(numbers, len(self._turns))
        sources = self._turns[slots]
        return sources, periods * self.counts[sources] + self._ranks[slots]

    def places(self, source: int, number: int) -> int:
        """The sample of a run that is this one of a source: what `sources` does, turned around."""
        periods, rank = divmod(number, int(self.counts[source]))
        return periods * len(self._turns) + int(np.flatnonzero(self._turns == source)[rank])


def _turns(counts: Sequence[int], period: int) -> Integers:
    """The n-th turn of a source lies between the places that its share gives to n and n + 1; of
    those that may come, the one that must come first.
    """
    turns = np.empty(period, dtype=np.int64)
    waiting = [(0, source) for source in range(len(counts))]  # by when they may come
    ready: list[tuple[int, int]] = []  # by when they have to
    taken = [0] * len(counts)
    for place in range(period):
        while waiting and waiting[0][0] <= place:
            _, source = heapq.heappop(waiting)
            heapq.heappush(ready, (-(-(taken[source] + 1) * period // counts[source]), source))
        deadline, source = heapq.heappop(ready)
        assert deadline > place, (counts, place)
        turns[place] = source
        taken[source] += 1
        if taken[source] < counts[source]:
            heapq.heappush(waiting, (taken[source] * period // counts[source], source))
    return turns


class MixedOrder:
    """Samples of several sources by their quotas, each source in an order of its own."""

    def __init__(self, sizes: Sequence[int], quotas: Quotas, seed: int) -> None:
        """`sizes`: the windows of each source, which are numbered one source behind the other."""
        self._quotas = quotas
        self._bases = np.concatenate(([0], np.cumsum(sizes)))
        keys = [key_of(seed, source) for source in range(len(sizes))]
        self._orders = [SampleOrder(size, key) for size, key in zip(sizes, keys, strict=True)]

    def samples(self, first: int, count: int) -> Integers:
        sources, numbers = self._quotas.sources(first, count)
        windows = np.empty(count, dtype=np.int64)
        for source in np.unique(sources).tolist():
            own = sources == source
            begin, end = int(numbers[own][0]), int(numbers[own][-1]) + 1
            windows[own] = self._bases[source] + self._orders[source].samples(begin, end - begin)
        return windows

    def number_of(self, window: int) -> int | None:
        source = int(np.searchsorted(self._bases, window, side="right")) - 1
        own = self._orders[source].number_of(window - int(self._bases[source]))
        return self._quotas.places(source, own)


@dataclass(frozen=True)
class MixedCorpus:
    corpus: str  # its folder, as seen from the mixture's
    weight: str  # a decimal number or a fraction, exactly as given


@dataclass(frozen=True)
class Mixture:
    corpora: tuple[MixedCorpus, ...]
    skip: tuple[str, ...] = ()  # samples of the run that are left out: "1200-1299"

    def __post_init__(self) -> None:
        if not self.corpora:
            raise UsageError("a mixture needs a corpus; give CORPUS:WEIGHT")
        for each in self.corpora:
            weight_of(each.weight)
        skipped_ranges(self.skip)

    def quotas(self) -> Quotas:
        return Quotas([weight_of(each.weight) for each in self.corpora])


def weight_of(text: str) -> Fraction:
    try:
        weight = Fraction(text)
    except (ValueError, ZeroDivisionError):
        weight = Fraction(0)
    if weight <= 0:
        raise UsageError(f"weight {text!r} is no positive number; give one as 0.7 or 2/3")
    return weight


def skipped_ranges(texts: Sequence[str]) -> list[tuple[int, int]]:
    """First sample and the one behind the last of each range; they rise and do not overlap."""
    ranges = []
    for text in texts:
        match = re.fullmatch(r"(\d+)-(\d+)", text) if isinstance(text, str) else None
        if match is None or int(match[1]) > int(match[2]):
            raise UsageError(f"skip has {text!r}; give ranges of samples as '1200-1299'")
        ranges.append((int(match[1]), int(match[2]) + 1))
    ranges.sort()
    for (_, end), (begin, _) in pairwise(ranges):
        if begin < end:
            raise UsageError(f"skip has ranges that overlap at sample {begin}; give each once")
    return ranges


def save_mixture(folder: Path, mixture: Mixture) -> None:
    document = {
        "format": FORMAT,
        "version": VERSION,
        "skip": list(mixture.skip),
        "corpora": [asdict(each) for each in mixture.corpora],
    }
    with atomic_write(folder / MIXTURE_NAME) as file:
        json.dump(document, file, indent=1)
        file.write("\n")


def read_mixture(folder: Path) -> Mixture:
    path = folder / MIXTURE_NAME
    try:
        document = json.loads(path.read_text())
        reject_unknown_keys(document, ("format", "version", "skip", "corpora"), str(path))
        if (document["format"], document["version"]) != (FORMAT, VERSION):
            raise UsageError(f"{path} has another format or version; write it by `data mix`")
        corpora = tuple(MixedCorpus(**entry) for entry in document["corpora"])
        return Mixture(corpora, tuple(document["skip"]))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{path} is no mixture: {error}; write it by `data mix`") from None
