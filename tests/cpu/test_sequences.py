"""Sequences of kernels against the same by references, and how many kernels a decode layer is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_checks import check_forward, make_inputs

from ridgeline.bench.kernels.decode_layer import OP as LAYER
from ridgeline.bench.kernels.decode_layer import TINY, case
from ridgeline.bench.kernels.sequences import all_sequences, get_sequence
from ridgeline.errors import UsageError
from ridgeline.kernels.launch import recording
from ridgeline.kernels.op import Case, Op
from ridgeline.kernels.targets import TARGETS

CPU = torch.device("cpu")
EACH = [
    pytest.param(op, tried, id=f"{op.name} {tried.label}")
    for op in all_sequences()
    for tried in op.small_cases
]


@pytest.mark.sweep(keep=3)
@pytest.mark.parametrize(("op", "tried"), EACH)
def test_it_agrees_with_its_references(op: Op, tried: Case) -> None:
    check_forward(op, tried, CPU)


@pytest.mark.parametrize("form", ["bf16", "fp8", "int4"])
def test_a_decode_layer_is_five_kernels(form: str) -> None:
    """At the real context: attention splits the sequence, and is one kernel all the same."""
    inputs = make_inputs(case(1, 1024, form, "launchers", TINY), CPU)
    with recording(TARGETS["sm_90"]) as calls:
        LAYER.launch(**inputs)
    assert len(calls) <= 5, [call.kernel.__name__ for call in calls]


@pytest.mark.parametrize("op", all_sequences(), ids=lambda op: op.name)
def test_baselines_do_the_same_work(op: Op) -> None:
    """By their shapes: torch's own layer attends to other tokens, those that lie together."""
    inputs = make_inputs(op.small_cases[0], CPU)
    expected = op.reference(**make_inputs(op.small_cases[0], CPU))
    for baseline in op.baselines.values():
        found: Any = baseline(**inputs)
        found = found[0] if isinstance(found, tuple) else found
        assert found.shape == expected.shape
        assert found.dtype == expected.dtype


def test_the_cost_of_a_layer_is_its_weights_and_its_cache() -> None:
    inputs = make_inputs(case(2, 32, "bf16", "launchers", TINY), CPU)
    cost = LAYER.cost(**inputs)
    weights = sum(2 * outputs * depth for outputs, depth in TINY.projections.values())
    cache = 2 * 32 * 2 * TINY.num_kv_heads * TINY.head_dim * 2
    assert weights + cache < cost.read_bytes < 1.01 * (weights + cache)
    assert cost.flops > weights  # two rows, two operations a weight, two bytes a weight


def test_an_unknown_sequence_is_answered_with_those_there_are() -> None:
    with pytest.raises(UsageError, match="decode_layer"):
        get_sequence("decode_layers")
