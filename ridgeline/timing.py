"""The one timer. Whatever Ridgeline claims to have timed went through one of these functions.

`time_host` reads the host clock, `time_device` records device events (CUDA or HIP), `time_graph`
captures many calls and times replays, `time_loop` times the steps of a loop that runs ahead of its
device. All but the last warm up first, repeat until `target_s` is spent, and return a `Timing`:
median and spread per call. Device work is kept queued ahead of the device, so that a slow host does
not show up in a kernel's time.

    timing = measure(lambda: a @ b, device="cuda:0")
    print(timing.median_s, timing.spread)

For cold caches either rotate inputs (`inputs=[(a0,), (a1,), …]`, together larger than the cache) or
set `flush_cache=True`, which writes a buffer larger than the L2 before every call.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice, pairwise
from typing import Any

import torch

from ridgeline.capture import capture

MIN_HOST_SAMPLE_S = (
    200e-6  # shorter calls are timed in groups: reading the clock costs about 0.1 µs
)
MOST_TIMED_SAMPLES = 2000
QUEUED_SAMPLES = 64  # enqueued at once: three entries each in a queue that holds about 1,000
SHORT_CALL_S = 300e-6  # longer calls keep the queue full by themselves
SLEEP_CYCLES_PER_S = 2e9  # of torch.cuda._sleep; only has to be about right
NO_INPUTS: Sequence[tuple[Any, ...]] = ((),)


@dataclass(frozen=True)
class Timing:
    """Seconds per call over `num_samples` samples."""

    median_s: float
    min_s: float
    p10_s: float
    p90_s: float
    num_samples: int

    @property
    def spread(self) -> float:
        """(p90 - p10) / median: the width of the middle 80%, as a share of the median."""
        return (self.p90_s - self.p10_s) / self.median_s if self.median_s > 0 else 0.0

    @classmethod
    def from_samples(cls, samples_s: Iterable[float]) -> Timing:
        ordered = sorted(samples_s)
        if not ordered:
            raise ValueError("no samples to summarize; give at least one")
        last = len(ordered) - 1
        return cls(
            median_s=statistics.median(ordered),
            min_s=ordered[0],
            p10_s=ordered[math.floor(0.1 * last)],
            p90_s=ordered[math.ceil(0.9 * last)],
            num_samples=len(ordered),
        )


def measure(fn: Callable[..., object], device: str | torch.device, **options: Any) -> Timing:
    """Time `fn` as suits its device: by the clock on a CPU, by events on a GPU."""
    if torch.device(device).type == "cpu":
        return time_host(fn, **options)
    return time_device(fn, device=device, **options)


def time_host(
    fn: Callable[..., object],
    *,
    device: str | torch.device = "cpu",
    inputs: Sequence[tuple[Any, ...]] = NO_INPUTS,
    target_s: float = 0.5,
    min_samples: int = 5,
    warmup_s: float = 0.05,
) -> Timing:
    """Host seconds per call. On a GPU `device` a sample ends when its calls are finished."""
    wait = _waiter(device)
    arguments = cycle(inputs)

    def sample(num_calls: int) -> float:
        wait()
        start = time.perf_counter()
        for call in islice(arguments, num_calls):
            fn(*call)
        wait()
        return (time.perf_counter() - start) / num_calls

    per_call_s = _warm_up(lambda: sample(1), warmup_s)
    num_calls = max(1, math.ceil(MIN_HOST_SAMPLE_S / max(per_call_s, 1e-8)))
    num_samples = _num_samples(target_s, per_call_s * num_calls, min_samples)
    return Timing.from_samples(sample(num_calls) for _ in range(num_samples))


def time_device(
    fn: Callable[..., object],
    *,
    device: str | torch.device = "cuda",
    inputs: Sequence[tuple[Any, ...]] = NO_INPUTS,
    flush_cache: bool = False,
    target_s: float = 0.5,
    min_samples: int = 5,
    warmup_s: float = 0.1,
) -> Timing:
    """Device seconds per call, between two events around each call."""
    with torch.cuda.device(device):
        flush = _cache_flusher(device) if flush_cache else None
        arguments = cycle(inputs)

        def enqueue() -> tuple[torch.cuda.Event, torch.cuda.Event]:
            if flush is not None:
                flush()
            start, end = _events()
            start.record()
            fn(*next(arguments))
            end.record()
            return start, end

        def one_call() -> float:
            begin = time.perf_counter()
            enqueue()
            torch.cuda.synchronize()
            return time.perf_counter() - begin

        per_call_s = _warm_up(one_call, warmup_s)
        remaining = _num_samples(target_s, per_call_s, min_samples)
        samples: list[float] = []
        while remaining > 0:
            group = min(remaining, QUEUED_SAMPLES)
            if per_call_s < SHORT_CALL_S:
                # The device sleeps while the host enqueues: a 3 µs kernel would otherwise be timed
                # as a launch. Long ones must not rest, or their clocks recover.
                torch.cuda._sleep(int(group * per_call_s * SLEEP_CYCLES_PER_S))
            events = [enqueue() for _ in range(group)]
            torch.cuda.synchronize()
            samples += [start.elapsed_time(end) / 1e3 for start, end in events]
            remaining -= group
    return Timing.from_samples(samples)


def time_graph(
    fn: Callable[..., object],
    *,
    device: str | torch.device = "cuda",
    inputs: Sequence[tuple[Any, ...]] = NO_INPUTS,
    num_calls: int = 100,
    target_s: float = 0.5,
    min_samples: int = 5,
    warmup_s: float = 0.05,
) -> Timing:
    """Device seconds per call in a captured graph of `num_calls`; `fn` must be capturable."""
    with torch.cuda.device(device):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # lazy set-up inside fn must happen before capture
            for call in inputs:
                fn(*call)
        torch.cuda.current_stream().wait_stream(side)

        def calls() -> None:
            for call in islice(cycle(inputs), num_calls):
                fn(*call)

        graph, _ = capture(calls)
        replays = time_device(
            graph.replay,
            device=device,
            target_s=target_s,
            min_samples=min_samples,
            warmup_s=warmup_s,
        )
    return Timing(
        median_s=replays.median_s / num_calls,
        min_s=replays.min_s / num_calls,
        p10_s=replays.p10_s / num_calls,
        p90_s=replays.p90_s / num_calls,
        num_samples=replays.num_samples,
    )


def time_loop(
    step: Callable[[], object],
    num_steps: int,
    *,
    device: str | torch.device = "cpu",
    clock: Callable[[], float] = time.perf_counter,
) -> Timing:
    """Host seconds per call of a loop that keeps the device busy by itself, such as an engine's:
    each sample runs from one return to the next. The caller warms up; work still queued at the end
    is waited for and counts towards the last sample.
    """
    wait = _waiter(device)
    wait()
    marks = [clock()]
    for number in range(num_steps):
        step()
        if number + 1 == num_steps:
            wait()
        marks.append(clock())
    return Timing.from_samples(b - a for a, b in pairwise(marks))


def _warm_up(sample: Callable[[], float], warmup_s: float) -> float:
    """Run `sample` at least twice and for `warmup_s`; the fastest plans the repeats."""
    first_s = sample()  # may hold compilation or page faults, so it is not an estimate
    fastest_s = sample()
    spent_s = first_s + fastest_s
    while spent_s < warmup_s:
        last_s = sample()
        fastest_s = min(fastest_s, last_s)
        spent_s += max(last_s, 1e-7)
    return fastest_s


def _num_samples(target_s: float, sample_s: float, min_samples: int) -> int:
    return max(min_samples, min(MOST_TIMED_SAMPLES, int(target_s / max(sample_s, 1e-9))), 1)


def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def _waiter(device: str | torch.device) -> Callable[[], object]:
    if torch.device(device).type == "cpu":
        return lambda: None
    return lambda: torch.cuda.synchronize(device)


def _cache_flusher(device: str | torch.device) -> Callable[[], object]:
    """A write over four times the L2, and over AMD's 256 MiB cache that torch does not report."""
    l2_bytes = int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or 0)
    buffer = torch.empty(max(4 * l2_bytes, 512 << 20), dtype=torch.int8, device=device)
    return buffer.zero_
