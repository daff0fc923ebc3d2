"""On a real GPU: every ceiling is measured, plausible against the datasheet, and quick enough."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ridgeline.hardware import Hardware, detect, measure
from ridgeline.hardware.clocks import read_clocks
from ridgeline.hardware.facts import MEASURED
from ridgeline.timing import time_device, time_graph, time_host

REASON_OF_SUPPORT = "not supported"


@pytest.fixture(scope="session")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Hardware:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RIDGELINE_CACHE", str(tmp_path_factory.mktemp("cache")))
        precision = torch.backends.cuda.matmul.fp32_precision
        start = time.perf_counter()
        hardware = measure(detect("cuda"))
        assert time.perf_counter() - start < 30
        assert torch.backends.cuda.matmul.fp32_precision == precision
        assert len(list(Path(tmp_path_factory.getbasetemp()).rglob("hardware/*.json"))) == 1
    return hardware


def test_every_ceiling_is_measured_or_not_supported(measured: Hardware) -> None:
    assert set(measured.ceilings) | set(measured.absent) == set(MEASURED)
    assert set(measured.absent.values()) <= {REASON_OF_SUPPORT}
    assert {"copy_bandwidth", "read_bandwidth", "matrix_fp16", "graph_step"} <= set(
        measured.ceilings
    )


@pytest.mark.parametrize(
    ("key", "least", "most"),
    [
        ("copy_bandwidth", 0.5, 1.0),
        ("read_bandwidth", 0.5, 1.0),
        ("matrix_fp32", 0.3, 1.05),  # boost clocks may pass the one the datasheet counts with
        ("matrix_tf32", 0.3, 1.0),
        ("matrix_bf16", 0.3, 1.0),
        ("matrix_fp16", 0.3, 1.0),
        ("matrix_fp8", 0.3, 1.0),
        ("matrix_int8", 0.2, 1.0),
        ("h2d_pinned", 0.2, 1.0),
    ],
)
def test_measured_lies_under_the_datasheet(
    measured: Hardware, key: str, least: float, most: float, alone: Callable[[], bool]
) -> None:
    share = measured.share(key)
    if share is None:
        pytest.skip("not supported, or not in the datasheet table")
    assert 0 < share <= most
    assert least < share or not alone()


def test_costs_are_ordered(measured: Hardware) -> None:
    cost = {key: ceiling.value for key, ceiling in measured.ceilings.items()}
    assert 1e-7 < cost["graph_step"] < cost["eager_launch"] < 1e-3
    assert cost["h2d_pageable"] < cost["h2d_pinned"] < cost["copy_bandwidth"]


def test_a_tiny_kernel_is_not_timed_as_a_launch() -> None:
    x = torch.ones(1, device="cuda")
    on_device = time_device(lambda: x.mul_(1.0), target_s=0.1)
    assert on_device.median_s < 20e-6
    in_graph = time_graph(lambda: x.mul_(1.0), num_calls=200, target_s=0.1)
    assert in_graph.median_s < on_device.median_s


def test_device_and_host_agree_on_long_work(alone: Callable[[], bool]) -> None:
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.float16)
    by_events = time_device(lambda: a @ a, target_s=0.2)
    by_clock = time_host(lambda: [a @ a for _ in range(20)], device="cuda", target_s=0.2)
    if not alone():
        pytest.skip("other processes use the GPU, and have a part in both times")
    assert by_clock.median_s / 20 == pytest.approx(by_events.median_s, rel=0.3)


def test_flushing_makes_a_cached_read_cold() -> None:
    l2_bytes = detect("cuda").l2_bytes
    if not l2_bytes:
        pytest.skip("the size of the L2 is not reported")
    x = torch.randn(l2_bytes // 16, device="cuda")  # a quarter of the cache
    warm = time_device(x.sum, target_s=0.1)
    cold = time_device(x.sum, flush_cache=True, target_s=0.1)
    assert cold.median_s > warm.median_s


def test_clocks_are_read() -> None:
    clocks = read_clocks(detect("cuda"))
    if clocks is None:
        pytest.skip("no vendor tool here")
    assert clocks.power_limit_w is None or 10 < clocks.power_limit_w < 3000


def test_sustained_is_no_faster_than_a_burst(measured: Hardware, alone: Callable[[], bool]) -> None:
    if not alone():
        pytest.skip("other processes slow what is measured first")
    burst = measured.ceilings["matrix_bf16"].value
    assert 0.5 * burst < measured.ceilings["matrix_bf16_sustained"].value < 1.02 * burst
