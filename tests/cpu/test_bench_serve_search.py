"""The search for the highest rate, over servers that are formulas."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from ridgeline.bench.serve.bound import LatencyBound
from ridgeline.bench.serve.search import (
    HighestRate,
    ProbeResult,
    highest_rate,
    next_rate,
    probe_length,
)


def exact(capacity: float, num: int = 200) -> Callable[[float, int], ProbeResult]:
    return lambda rate, number: ProbeResult(num, num if rate <= capacity else num // 4)


@pytest.mark.parametrize("capacity", [0.013, 0.7, 1.0, 17.0, 900.0])
@pytest.mark.parametrize("start", [0.1, 1.0, 300.0])
def test_a_known_capacity_is_found(capacity: float, start: float) -> None:
    found = highest_rate(exact(capacity), start, 0.9, 0.05, max_probes=60)
    assert found.met is not None
    assert found.failed is not None
    assert found.met.rate <= capacity < found.failed.rate <= found.met.rate * 1.05
    assert found.is_sure
    assert "95% confidence" in found.in_words


def test_doubt_is_settled_by_more_requests() -> None:
    """Near the capacity the share within the bound is near the target: one probe decides little."""
    numbers: list[int] = []
    draw = random.Random(0)

    def probe(rate: float, number: int) -> ProbeResult:
        numbers.append(number)
        share = 0.99 if rate <= 8.0 else 0.87 if rate <= 11.0 else 0.2
        return ProbeResult(200, sum(draw.random() < share for _ in range(200)))

    found = highest_rate(probe, 8.0, 0.9, 0.3, max_probes=20)
    assert numbers == list(range(len(numbers)))  # each with requests of its own
    assert found.met is not None
    assert found.met.rate == 8.0
    failed = found.failed
    assert failed is not None
    assert failed.rate < 11.0
    assert failed.num_requests > 200  # it was looked at again


def test_what_stays_in_doubt_is_said() -> None:
    found = highest_rate(lambda rate, number: ProbeResult(100, 91), 4.0, 0.9, 0.05, max_probes=3)
    assert not found.is_sure
    assert found.failed is None
    assert "not sure" in found.in_words
    assert "close" in found.in_words


def test_a_lagging_client_is_no_proof() -> None:
    def probe(rate: float, number: int) -> ProbeResult:
        return exact(10.0)(rate, number)._replace(note="lagged" if rate > 10.0 else None)

    found = highest_rate(probe, 8.0, 0.9, 0.05, max_probes=30)
    assert not found.is_sure
    assert "the client lagged" in found.in_words


def test_nothing_meets_the_bound() -> None:
    found = highest_rate(exact(0.0), 4.0, 0.9, 0.05, max_probes=5)
    assert found.met is None
    assert "no rate met the bound" in found.in_words
    assert "0.25/s" in found.in_words


def test_too_few_probes_are_said() -> None:
    found: HighestRate = highest_rate(exact(17.0), 4.0, 0.9, 0.01, max_probes=5)
    assert not found.is_bracketed
    assert "no time to come closer" in found.in_words


def test_rates_to_try() -> None:
    assert next_rate(4.0, float("inf")) == 8.0
    assert next_rate(0.0, 4.0) == 2.0
    assert next_rate(4.0, 9.0) == 6.0


def test_probes_are_long_enough_to_see_a_queue_grow() -> None:
    """At 5% beyond capacity a queue must have grown to the bound within a probe."""
    length = probe_length(10.0, LatencyBound(ttft_s=2.0), precision=0.05, least_s=5.0)
    assert length == (40.0, 400)
    assert probe_length(10.0, LatencyBound(ttft_s=0.1), 0.05, 20.0) == (20.0, 200)
    assert probe_length(0.5, LatencyBound(ttft_s=0.1), 0.05, 20.0) == (100.0, 50)
