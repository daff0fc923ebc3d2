"""Rounds that take turns: order, interval, and that noise is not taken for speed."""

import math
import random
from collections.abc import Callable

import pytest

from ridgeline.errors import UsageError
from ridgeline.ladder.measuring.rounds import interleaved, speedup_of
from ridgeline.quality.intervals import t_quantile


def test_sides_take_turns_and_neither_is_always_first() -> None:
    seen: list[str] = []

    def side(name: str, rate: float) -> Callable[[], float]:
        return lambda: (seen.append(name), rate)[1]

    found = interleaved(side("a", 10.0), side("b", 20.0), rounds=4)
    assert "".join(seen) == "abbaabba"
    assert (found.value, found.low, found.high) == pytest.approx((2.0, 2.0, 2.0))
    assert found.before == (10.0,) * 4
    assert found.after == (20.0,) * 4
    assert found.is_beyond_noise


def test_the_interval_is_that_of_a_paired_t_test() -> None:
    # Ratios e^0.1, e^0.2, e^0.3: mean 0.2, deviation 0.1, t of 2 degrees 4.303.
    found = speedup_of([1.0] * 3, [math.exp(0.1), math.exp(0.2), math.exp(0.3)])
    reach = 4.303 * 0.1 / math.sqrt(3)
    assert math.log(found.value) == pytest.approx(0.2)
    assert math.log(found.low) == pytest.approx(0.2 - reach)
    assert math.log(found.high) == pytest.approx(0.2 + reach)
    assert not found.is_beyond_noise


def test_drift_that_happens_to_both_does_not_widen_it() -> None:
    before = [100.0, 50.0, 25.0, 80.0, 10.0]
    found = speedup_of(before, [1.1 * rate for rate in before])
    assert found.low == pytest.approx(1.1)
    assert found.is_beyond_noise


def test_equal_sides_seldom_look_faster() -> None:
    """One in forty: the interval's upper tail is 2.5%."""
    draw = random.Random(0)
    wrong = sum(
        speedup_of(
            [draw.lognormvariate(0, 0.1) for _ in range(5)],
            [draw.lognormvariate(0, 0.1) for _ in range(5)],
        ).is_beyond_noise
        for _ in range(2000)
    )
    assert 25 <= wrong <= 75


def test_one_round_says_nothing() -> None:
    with pytest.raises(UsageError, match="rounds is 1, which gives no interval"):
        speedup_of([1.0], [2.0])
    with pytest.raises(UsageError, match="rounds is 1, which gives no interval"):
        interleaved(lambda: 1.0, lambda: 1.0, rounds=1)


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, math.inf])
def test_a_rate_of_nothing_is_refused(rate: float) -> None:
    with pytest.raises(UsageError, match="a round gave the rate"):
        speedup_of([1.0, rate], [1.0, 1.0])


@pytest.mark.parametrize(("degrees", "known"), [(4, 2.776), (11, 2.201), (30, 2.042), (120, 1.980)])
def test_quantiles_are_those_of_the_tables(degrees: int, known: float) -> None:
    assert t_quantile(degrees) == pytest.approx(known, abs=1e-3)
