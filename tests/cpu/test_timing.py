"""The timer against work of known duration; physical bounds only, since the machine may be busy."""

import time

import pytest
import torch

from ridgeline.timing import Timing, measure, time_host

pytestmark = pytest.mark.smoke


def test_summary_of_samples() -> None:
    timing = Timing.from_samples([5.0, 1.0, 2.0, 3.0, 4.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0])
    assert timing == Timing(median_s=6.0, min_s=1.0, p10_s=2.0, p90_s=10.0, num_samples=11)
    assert timing.spread == pytest.approx(8 / 6)


def test_one_sample_has_no_spread() -> None:
    timing = Timing.from_samples([0.25])
    assert (timing.median_s, timing.spread, timing.num_samples) == (0.25, 0.0, 1)


def test_no_samples_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Timing.from_samples([])


def test_a_sleep_takes_its_time() -> None:
    timing = time_host(lambda: time.sleep(0.01), target_s=0.1)
    assert 0.01 <= timing.min_s <= timing.p10_s <= timing.median_s <= timing.p90_s
    assert timing.min_s < 0.03  # the fastest of five is not delayed by a busy machine five times
    assert timing.num_samples >= 5


def test_short_calls_are_grouped() -> None:
    """A call far below the clock's cost gets a plausible per-call time, not the clock's."""
    timing = time_host(lambda: None, target_s=0.02)
    assert 0 < timing.min_s < 1e-6


def test_target_bounds_the_number_of_samples() -> None:
    calls = []

    def work() -> None:
        calls.append(1)
        time.sleep(0.005)

    time_host(work, target_s=0.05, min_samples=3, warmup_s=0.0)
    assert 3 + 2 <= len(calls) <= 10 + 2  # two warm-up calls, then at most target / duration


def test_slow_work_still_gets_min_samples() -> None:
    timing = time_host(lambda: time.sleep(0.02), target_s=0.001, min_samples=4, warmup_s=0.0)
    assert timing.num_samples == 4


def test_the_slow_first_call_is_not_counted() -> None:
    calls = []

    def compiles_first() -> None:
        calls.append(1)
        time.sleep(0.2 if len(calls) == 1 else 0.002)

    timing = time_host(compiles_first, target_s=0.05, warmup_s=0.0)
    assert timing.median_s < 0.2
    assert len(calls) > timing.num_samples  # the first is none of the samples


def test_inputs_rotate() -> None:
    seen: list[int] = []

    def work(number: int) -> None:
        seen.append(number)
        time.sleep(0.001)

    time_host(work, inputs=[(0,), (1,), (2,)], target_s=0.01, warmup_s=0.0)
    assert seen == [index % 3 for index in range(len(seen))]
    assert len(seen) >= 7


def test_measure_uses_the_clock_on_a_cpu() -> None:
    x = torch.ones(1000)
    assert 0 < measure(x.sum, "cpu", target_s=0.02).median_s < 0.05


def test_errors_of_the_timed_function_pass_through() -> None:
    with pytest.raises(ZeroDivisionError):
        time_host(lambda: 1 / 0)
