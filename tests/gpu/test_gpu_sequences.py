"""Sequences of kernels on the GPU, at real sizes, against the same by references."""

from __future__ import annotations

import pytest
import torch
from kernel_checks import check_forward, make_inputs

from ridgeline.bench.kernels.decode_layer import OP as LAYER
from ridgeline.bench.kernels.sequences import all_sequences
from ridgeline.kernels.launch import target_of
from ridgeline.kernels.op import Case, Op

CUDA = torch.device("cuda")
EACH = [
    pytest.param(op, tried, id=f"{op.name} {tried.label}")
    for op in all_sequences()
    for tried in op.cases
]


@pytest.mark.parametrize(("op", "tried"), EACH)
def test_it_agrees_with_its_references(op: Op, tried: Case) -> None:
    if not op.supports(target_of(torch.empty(0, device=CUDA)), tried):
        pytest.skip("not supported on this GPU")
    check_forward(op, tried, CUDA)


def test_a_layer_replayed_from_a_graph_gives_the_same() -> None:
    """Five kernels that start before the last one ended: none may run ahead of what it reads."""
    inputs = make_inputs(LAYER.cases[0], CUDA)
    expected = LAYER.launch(**inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x = inputs["x_BD"]
        for _ in range(8):
            x = LAYER.launch(**{**inputs, "x_BD": x})
    graph.replay()
    torch.cuda.synchronize()
    eager = inputs["x_BD"]
    for _ in range(8):
        eager = LAYER.launch(**{**inputs, "x_BD": eager})
        torch.cuda.synchronize()
    assert torch.equal(x, eager)
    assert torch.equal(LAYER.launch(**inputs), expected)
