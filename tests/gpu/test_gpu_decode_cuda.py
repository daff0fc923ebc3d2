"""Decode attention's two kernels on a GPU beyond the registry's cases: the same bits each time, in
captured graphs, and behind a kernel that has not ended yet.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ridgeline.errors import UnsupportedError
from ridgeline.kernels.agreement import compare
from ridgeline.kernels.attention.inputs import rows_of
from ridgeline.kernels.decode_attention import cuda, op, triton
from ridgeline.kernels.decode_attention.op import DecodeCase
from ridgeline.kernels.decode_attention.splits import arrival_counters
from ridgeline.kernels.extension import library

CUDA = torch.device("cuda")
KERNELS = {"cuda": cuda.decode_attention, "triton": triton.decode_attention}
SETTING = DecodeCase((5000, 17, 300, 4096), split_tokens=512)
CACHES = [None, torch.int8]


@pytest.fixture(params=list(KERNELS))
def kernel(request: pytest.FixtureRequest) -> Any:
    if request.param == "cuda" and library("decode_attention") is None:
        pytest.skip("decode_attention is not built in CUDA C++")
    return KERNELS[request.param]


def inputs_of(setting: DecodeCase) -> dict[str, Any]:
    return op.make(setting, CUDA, torch.Generator(device=CUDA).manual_seed(0))


@pytest.mark.parametrize("cache", CACHES)
def test_every_run_gives_the_same_bits(cache: torch.dtype | None, kernel: Any) -> None:
    inputs = inputs_of(replace(SETTING, cache=cache))
    first = kernel(**inputs)
    assert all(torch.equal(kernel(**inputs), first) for _ in range(50))
    assert torch.equal(kernel(**inputs | rows_of(inputs, "q_BNH", slice(3, None))), first[3:])
    assert not arrival_counters(1, CUDA).any()


@pytest.mark.parametrize("cache", CACHES)
def test_a_captured_graph_serves_any_lengths(cache: torch.dtype | None, kernel: Any) -> None:
    setting = replace(SETTING, cache=cache)
    inputs = inputs_of(setting)
    kernel(**inputs)  # compiled, and the counters made, before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernel(**inputs)
    for lengths in ((5000, 17, 300, 4096), (513, 0, 299, 4000), (1, 16, 1, 512)):
        inputs["tables"].lengths.copy_(torch.tensor(lengths))
        graph.replay()
        compare(out, op.define(**inputs), op.case(setting))
    assert not arrival_counters(1, CUDA).any()


@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("cache", CACHES)
def test_a_kernel_that_has_not_ended_is_waited_for(
    cache: torch.dtype | None, settled: bool
) -> None:
    """Each call's queries are what the call before wrote, and each may start before that ended."""
    if library("decode_attention") is None:
        pytest.skip("decode_attention is not built in CUDA C++")
    inputs = inputs_of(replace(SETTING, cache=cache))

    def chain(settled: bool = False, pdl: bool = True) -> torch.Tensor:
        q, run = inputs["q_BNH"], inputs["run"]._replace(settled=settled)
        for _ in range(20):
            q = cuda.decode_attention(**inputs | {"q_BNH": q, "run": run}, pdl=pdl)
        return q

    expected = chain(pdl=False)
    assert torch.equal(chain(settled=settled), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(settled=settled)
    for _ in range(5):
        graph.replay()
        assert torch.equal(out, expected)


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("num_warps", [1, 4, 8])
def test_every_cut_is_right(num_warps: int, stages: int) -> None:
    if library("decode_attention") is None:
        pytest.skip("decode_attention is not built in CUDA C++")
    for cache in CACHES:
        setting = replace(SETTING, cache=cache)
        inputs = inputs_of(setting)
        inputs["run"] = inputs["run"]._replace(config=cuda.DecodeCut(num_warps, stages))
        size = num_warps * stages * cuda.stage_bytes(128, inputs["pages"].k_pages.dtype)
        if size > 220 * 1024:  # more than the chip has: said so, not tried
            with pytest.raises(UnsupportedError, match="shared memory"):
                cuda.decode_attention(**inputs)
            continue
        found = cuda.decode_attention(**inputs)
        compare(found, op.define(**inputs), op.case(setting))
