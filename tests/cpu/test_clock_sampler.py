"""Clocks are read while a run lasts."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from ridgeline.hardware import Hardware, detect
from ridgeline.hardware.clocks import Clocks, ClockSampler, median_clocks
from ridgeline.records import Record, Value


def gpu() -> Hardware:
    return replace(detect("cpu"), device_type="cuda", device="cuda:0", name="a GPU")


def test_medians_of_what_was_read() -> None:
    samples = [Clocks(sm_mhz=mhz, power_draw_w=watts) for mhz, watts in
               ((1980.0, 120.0), (1755.0, 690.0), (1740.0, None))]  # fmt: skip
    found = median_clocks(samples)
    assert found == Clocks(sm_mhz=1755.0, power_draw_w=405.0, num_samples=3)
    assert median_clocks([]) is None


def test_a_run_is_sampled_and_its_record_has_it() -> None:
    read = iter(range(1, 1000))

    def reading(_: Hardware) -> Clocks:
        return Clocks(sm_mhz=float(next(read)))

    with ClockSampler(gpu(), interval_s=0.005, read=reading) as clocks:
        deadline = time.monotonic() + 10
        while len(clocks.samples) < 3 and time.monotonic() < deadline:
            time.sleep(0.005)
    count = len(clocks.samples)
    assert count >= 3
    assert clocks.median is not None
    assert clocks.median.num_samples == count
    time.sleep(0.02)
    assert len(clocks.samples) == count  # nobody reads any more
    record = Record.create("x", detect("cpu"), {"a": Value(1.0, "s")}, clocks=clocks.median)
    assert record.clocks == clocks.median
    assert Record.from_json(record.to_json()) == record


def test_a_run_shorter_than_a_reading_has_one() -> None:
    with ClockSampler(gpu(), interval_s=60, read=lambda _: Clocks(sm_mhz=5.0)) as clocks:
        pass
    assert clocks.median == Clocks(sm_mhz=5.0, num_samples=1)


@pytest.mark.parametrize("hardware", [detect("cpu"), gpu()], ids=["cpu", "no tool"])
def test_without_a_tool_there_are_none(hardware: Hardware) -> None:
    with ClockSampler(hardware, interval_s=0.001, read=lambda _: None) as clocks:
        pass
    assert clocks.median is None
