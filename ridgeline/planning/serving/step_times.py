"""What a step takes, from the few integers that change from one step to the next: tokens, rows that
sample, keys that are read, pairs that prompts attend to. The model of a step
(profiling/predicting/) says what each costs; here its answers are put into curves and rates, so
that a simulated step costs microseconds.

Time is counted in whole ticks: sums of many steps are exact then, in whatever order they are made,
and many at once (`SteadySteps`) give to the bit what one by one gives.

    times = PredictedTimes.of(state)                   # a RunState: model, recipe, hardware
    times.seconds(tokens=64, samples=64, keys=[64 * 500], pairs=0)
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import hypot, sqrt
from typing import NamedTuple

from ridgeline.engine.execution.graph_kinds import is_full
from ridgeline.engine.memory.parts import part_of
from ridgeline.models.cost import MeanStep
from ridgeline.planning.serving.longest_row import HIDDEN, SHARE, LongestRow, SplitRead
from ridgeline.profiling.predicting.launching import launch_s
from ridgeline.profiling.predicting.run_state import RunState
from ridgeline.profiling.predicting.step_model import StepParts, modelled

# Attention's rates are read off one step with so many keys, and one with so many pairs.
MANY_KEYS, MANY_PAIRS = 1e8, 1e10
MANY_TOKENS = 8192  # a step in which products are bound by multiplying
TICKS = 1 << 60  # a second: a key of the smallest model still takes a million of them


def ticks_of(seconds: float) -> int:
    return round(seconds * TICKS)


def seconds_of(ticks: int) -> float:
    return ticks / TICKS


@dataclass(frozen=True)
class Tuning:
    """By how much a machine's steps are off from what the model of a step says of them, fitted to
    points measured there (calibrating.py).
    """

    matrices: float = 1.0  # times as long
    attention: float = 1.0
    prompts: float = 1.0  # the whole of steps that hold pieces of prompts, more than the others
    fixed: float = 1.0  # what kernels take with nothing to do: gaps, attention without keys
    step_s: float = 0.0  # more, each step
    row_s: float = 0.0  # more, each row that samples: what a host does for each
    request_s: float = 0.0  # before a request reaches the scheduler, and its tokens the reader
    # Whether attention is cut, and what is no graph is launched, as our engine does it.
    own_kernels: bool = True


class LazyCurve:
    """Seconds by a count, computed at a few counts when they are first asked for, and on straight
    lines between them.
    """

    def __init__(self, compute: Callable[[int], float]) -> None:
        self._compute = compute
        self._points: dict[int, float] = {}
        self._values: dict[int, float] = {}

    def __call__(self, count: int) -> float:
        known = self._values.get(count)
        if known is None:
            known = self._values[count] = self._between(count)
        return known

    def _between(self, count: int) -> float:
        index = bisect_left(COUNTS, count)
        if index == len(COUNTS) or COUNTS[index] == count:
            return self._point(count)
        low, high = COUNTS[index - 1], COUNTS[index]
        below, above = self._point(low), self._point(high)
        return below + (above - below) * (count - low) / (high - low)

    def _point(self, count: int) -> float:
        if count not in self._points:
            self._points[count] = self._compute(count)
        return self._points[count]


def _counts() -> list[int]:
    """Each up to 16, then four between one power of two and the next, with both sides of where a
    matrix product goes another way (64) and where graphs end (512).
    """
    steps = [16 * 2**power for power in range(11)]
    between = [start + start * part // 4 for start in steps for part in range(4)]
    return sorted({*range(17), *between, 65, 513})


COUNTS = _counts()


class StepTicks(NamedTuple):
    """Of one step."""

    device: int
    launches: int  # of its host, while the device may still have the step before


class LongestRead:
    """What the longest of so many rows adds to attention (longest_row.py), in ticks."""

    __slots__ = ("_cut", "_read", "_rows", "per_token", "share")

    def __init__(self, cut: LongestRow, rows: int, per_token: int, share: int) -> None:
        self._cut, self._rows = cut, rows
        self.per_token, self.share = per_token, share  # of a token of a split, of any key
        self._read = SplitRead(0, 0, 0)  # that was looked up last

    def grouped(self, size: int) -> LongestRead:
        return LongestRead(self._cut, self._rows, self.per_token, size * self.share)

    def ticks(self, keys: int, longest: int) -> int:
        read = self._read
        if not read.above < longest <= read.bound:
            read = self._read = self._cut.read(self._rows, longest)
        tokens = longest if longest < read.split_tokens else read.split_tokens
        return self.share * keys + self.per_token * (tokens - HIDDEN if tokens > HIDDEN else 0)

    def growth(self, longest: int, more_keys: int) -> tuple[int, int]:
        """How many more ticks each step takes while rows grow, and for how many steps."""
        read = self._cut.read(self._rows, longest)
        if longest < HIDDEN:
            return self.share * more_keys, HIDDEN - longest + 1
        grows = longest < read.split_tokens
        last = min(read.split_tokens, read.bound) if grows else read.bound
        return self.share * more_keys + grows * self.per_token, max(1, last - longest + 1)


class BaseTime:
    """What steps of as many tokens and samples have in common, in ticks."""

    __slots__ = ("_busy", "_first", "_host", "_launches", "_longest", "_rest")

    def __init__(
        self,
        busy: int,
        launches: int,
        host: int,
        per_key: Sequence[int],
        longest: LongestRead | None = None,
    ) -> None:
        self._busy, self._launches, self._host = busy, launches, host
        self._first, self._rest = per_key[0], per_key[1:]
        self._longest = longest

    def ticks(self, keys: Sequence[int], longest: int = 0) -> int:
        """A device that is quicker than its launches waits for them."""
        device = self.device(keys, longest)
        return (device if device > self._launches else self._launches) + self._host

    def grouped(self, size: int) -> BaseTime:
        """With keys counted for one row of so many that are alike."""
        per_key = [size * each for each in (self._first, *self._rest)]
        read = self._longest
        if read is not None:
            read = read.grouped(size)
        return BaseTime(self._busy, self._launches, self._host, per_key, read)

    def series(
        self, keys: Sequence[int], growth: Sequence[int], longest: int = 0
    ) -> tuple[SteadySteps, int]:
        """Of steps that each read so many keys more than the one before; for how many it is so."""
        attention, more, holds = self._first * keys[0], self._first * growth[0], 1 << 40
        if self._longest is not None and longest:
            attention, more, holds = self._longer(attention, more, keys[0], growth[0], longest)
        device = self._busy + attention
        if self._rest:
            device += sum(s * n for s, n in zip(self._rest, keys[1:], strict=True))
            more += sum(s * n for s, n in zip(self._rest, growth[1:], strict=True))
        return SteadySteps(device, more, self._launches, self._host), holds

    def device(self, keys: Sequence[int], longest: int = 0) -> int:
        attention = self._first * keys[0]
        if self._longest is not None and longest:
            by_row = self._longest.ticks(keys[0], longest)
            attention = by_row if by_row > attention else attention
        if self._rest:
            attention += sum(s * n for s, n in zip(self._rest, keys[1:], strict=True))
        return self._busy + attention

    @property
    def host(self) -> int:
        return self._host

    def _longer(
        self, all_keys: int, more: int, keys: int, more_keys: int, longest: int
    ) -> tuple[int, int, int]:
        """What attention takes, by all keys or by the longest row, until the other takes longer."""
        assert self._longest is not None, "asked for"
        by_row = self._longest.ticks(keys, longest)
        row_more, holds = self._longest.growth(longest, more_keys)
        if all_keys >= by_row:
            if row_more > more:
                holds = min(holds, (all_keys - by_row) // (row_more - more) + 1)
            return all_keys, more, holds
        if more > row_more:
            holds = min(holds, -((all_keys - by_row) // (more - row_more)))
        return by_row, row_more, holds


class SteadySteps(NamedTuple):
    """Steps of which the device takes `more` ticks longer each; none is shorter than its launches,
    and the host has its part of each.
    """

    device: int  # of the first
    more: int
    launches: int
    host: int

    def total(self, count: int) -> int:
        """Of the first so many."""
        device, more, launches, host = self
        waiting = 0  # steps that wait for their launches
        if device < launches:
            waiting = min(count, -((device - launches) // more)) if more else count
        rest = count - waiting
        grown = rest * (device + waiting * more) + more * (rest * (rest - 1) // 2)
        return waiting * launches + grown + count * host

    def num_until(self, wanted: float) -> int:
        """The fewest steps that take as long as this or longer; each takes some time."""
        if wanted <= 0:
            return 0
        device, more, launches, host = self
        waiting, each = 0, max(device, launches) + host
        if device < launches and more:
            waiting = -((device - launches) // more)
            if self.total(waiting) < wanted:
                later = SteadySteps(device + waiting * more, more, launches, host)
                return waiting + later.num_until(wanted - self.total(waiting))
        count = int(wanted // each)
        if more and not waiting:  # the root of a parabola, in doubles, and then to the step
            half = each / more - 0.5
            count = int(sqrt(half * half + 2 * wanted / more) - half)
        while self.total(count) < wanted:
            count += 1
        while count and self.total(count - 1) >= wanted:
            count -= 1
        return count


class PredictedTimes:
    """Seconds of a step. `windows` are those of the layers' attention, each kind once: keys are
    counted for each kind by itself, none more than its window holds.
    """

    def __init__(
        self, state: RunState, tuning: Tuning, known: dict[MeanStep, StepParts] | None = None
    ) -> None:
        recipe = state.recipe
        self._state = replace(state, config=part_of(state.config, recipe))
        self._untuned: dict[MeanStep, StepParts] = {} if known is None else known
        self._given = state
        self.tuning = tuning
        layers = Counter(layer.window for layer in state.config.layers)
        self.windows = sorted(layers, key=lambda window: (window is not None, window))
        per_key, self._pair_s = self._attention_rates()
        share = {window: count / state.config.num_layers for window, count in layers.items()}
        self._per_key = [ticks_of(per_key * share[window]) for window in self.windows]
        self._per_pair = ticks_of(self._pair_s)
        self._bases: dict[tuple[int, int], BaseTime] = {}
        self._reading_s = self._parts(1, 0).matrices_s
        self._token_s = self._parts(MANY_TOKENS, 0).matrices_s / MANY_TOKENS
        self._busy, self._launches = LazyCurve(self._busy_s), LazyCurve(self._launch_s)
        self._heads = LazyCurve(self._head_s)
        self._host_s = self._parts(1, 1).host_s + tuning.step_s
        self._launched: dict[int, int] = {}
        uses_graphs = state.uses_graphs and not recipe.parallel.tensor > 1
        self._max_batch = recipe.limits.max_batch or 0
        self._largest_graph = recipe.limits.max_graph_batch or 0 if uses_graphs else 0
        self._cut: LongestRow | None = None
        if tuning.own_kernels and state.is_fused and state.on_gpu and self.windows[0] is None:
            self._cut = LongestRow(self._state, layers[None])

    @classmethod
    def of(cls, state: RunState, tuning: Tuning | None = None) -> PredictedTimes:
        return cls(state, tuning or Tuning())

    def tuned(self, tuning: Tuning) -> PredictedTimes:
        """By another tuning; what the model of a step has said already is not asked again."""
        return PredictedTimes(self._given, tuning, self._untuned)

    def seconds(
        self, tokens: int, samples: int, keys: Sequence[int], pairs: int, longest: int = 0
    ) -> float:
        """Of a step alone."""
        return seconds_of(max(self.step(tokens, samples, keys, pairs, longest)))

    def step(
        self, tokens: int, samples: int, keys: Sequence[int], pairs: int, longest: int = 0
    ) -> StepTicks:
        """`keys` are those that decode rows read, for each kind of window, `longest` the row's that
        reads most; `pairs` those of the prompts' tokens and what they see.
        """
        base = self._bases.get((tokens, samples)) or self._base(tokens, samples)
        if not pairs:
            return StepTicks(base.ticks(keys, longest), 0)
        tuning = self.tuning
        if not tuning.own_kernels:
            own = base.ticks(keys, longest) + self._per_pair * pairs
            return StepTicks(int(own * tuning.prompts), 0)
        device = base.device(keys, longest) + self._per_pair * pairs
        has_graph = not keys[0] or is_full(samples, self._max_batch)
        launches = 0 if has_graph and tokens <= self._largest_graph else self._eager(tokens)
        return StepTicks(int(device * tuning.prompts) + base.host, launches)

    def _eager(self, tokens: int) -> int:
        """What launching its kernels one by one takes."""
        known = self._launched.get(tokens)
        if known is None:
            work = MeanStep(1, tokens, 1, 0, 0)
            seconds = launch_s(self._state, work) if self._state.on_gpu else 0.0
            known = self._launched[tokens] = ticks_of(seconds)
        return known

    def of_rows(self, rows: int) -> BaseTime:
        """What decode steps with so many rows have in common."""
        return self._base(rows, rows)

    def _base(self, tokens: int, samples: int) -> BaseTime:
        known = self._bases.get((tokens, samples))
        if known is None:
            busy, launches = self._busy(tokens) + self._heads(samples), self._launches(tokens)
            host = self._host_s + self.tuning.row_s * samples
            known = BaseTime(
                ticks_of(busy),
                ticks_of(launches),
                ticks_of(host),
                self._per_key,
                self._longest(samples),
            )
            self._bases[tokens, samples] = known
        return known

    def _longest(self, rows: int) -> LongestRead | None:
        if self._cut is None or not rows:
            return None
        per_token = ticks_of(self._cut.per_token_s * self.tuning.attention)
        return LongestRead(self._cut, rows, per_token, int(SHARE * self._per_key[0]))

    def _parts(self, tokens: int, samples: int, pairs: float = 0.0, keys: float = 0.0) -> StepParts:
        rows = min(tokens, max(samples, 1))
        work = MeanStep(rows, tokens, samples, pairs, keys)
        if work not in self._untuned:
            self._untuned[work] = modelled(self._state, work)
        return self._untuned[work]

    def _busy_s(self, tokens: int) -> float:
        """Of the device, but for attention's keys and the head."""
        parts, tuning = self._parts(tokens, 0), self.tuning
        fixed = (parts.attention_s * tuning.attention + parts.gap_s) * tuning.fixed
        own = self._matrices_s(tokens) * tuning.matrices + fixed
        return own + parts.other_s + parts.communication_s

    def _matrices_s(self, tokens: int) -> float:
        """Where reading weights and multiplying take about as long, products take longer than
        either: as the two sides of a right angle do. cuBLAS in bf16 on the H200 (2026-11-15) reads
        at 81, 77 and 57% of the bandwidth with 64, 128 and 256 rows; by this it is 94, 80 and 56.
        """
        ridge = hypot(self._reading_s, self._token_s * tokens)
        return max(self._parts(tokens, 0).matrices_s, ridge)

    def _launch_s(self, tokens: int) -> float:
        return self._parts(tokens, 1).launch_s if self._state.on_gpu else 0.0

    def _head_s(self, samples: int) -> float:
        """Of the product with the vocabulary, and of gathering what ranks have made of it."""
        with_head, without = self._parts(1, samples), self._parts(1, 0)
        product = with_head.matrices_s - without.matrices_s
        gathered = with_head.communication_s - without.communication_s
        return product * self.tuning.matrices + gathered

    def _attention_rates(self) -> tuple[float, float]:
        """Seconds of a key that a decode row reads in all layers, and of a prompt's pair."""
        layers = tuple(replace(layer, window=None) for layer in self._state.config.layers)
        state = replace(self._state, config=replace(self._state.config, layers=layers))
        none = modelled(state, MeanStep(1, 1, 1, 0, 0)).attention_s
        keys = modelled(state, MeanStep(1, 1, 1, MANY_KEYS, MANY_KEYS)).attention_s
        pairs = modelled(state, MeanStep(1, 1, 1, MANY_PAIRS, 0)).attention_s
        factor = self.tuning.attention
        return factor * (keys - none) / MANY_KEYS, factor * (pairs - none) / MANY_PAIRS


class GroupedTimes(PredictedTimes):
    """For a scheduler that has one request where there are `size` alike, and as much less of
    pages, seats and tokens a step: what the whole takes.
    """

    def __init__(self, times: PredictedTimes, size: int) -> None:
        self._times, self._size = times, size
        self.windows, self.tuning = times.windows, times.tuning
        self._grouped: dict[int, BaseTime] = {}

    def step(
        self, tokens: int, samples: int, keys: Sequence[int], pairs: int, longest: int = 0
    ) -> StepTicks:
        size = self._size
        every = [size * n for n in keys]
        return self._times.step(size * tokens, size * samples, every, size * pairs, longest)

    def of_rows(self, rows: int) -> BaseTime:
        if rows not in self._grouped:
            self._grouped[rows] = self._times.of_rows(rows * self._size).grouped(self._size)
        return self._grouped[rows]
