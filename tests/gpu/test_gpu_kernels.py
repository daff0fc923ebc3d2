"""Every op against its reference on the GPU: all shapes, offsets past 2^31 included."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kernel_checks import check_forward, check_gradients

from ridgeline.errors import UnsupportedError
from ridgeline.kernels.launch import target_of
from ridgeline.kernels.op import Case, Op
from ridgeline.kernels.registry import all_ops
from ridgeline.lessons import all_lessons

CUDA = torch.device("cuda")
EACH = [
    pytest.param(op, case, id=f"{op.name} {case.label}")
    for op in (*all_ops(), *all_lessons())
    for case in op.cases
]
WITH_GRADIENTS = [
    param for param in EACH if param.values[1].gradients and param.values[0].differentiable
]


@pytest.mark.parametrize(("op", "case"), EACH)
def test_forward(op: Op, case: Case, one_of_few: Callable[[], None]) -> None:
    if not op.supports(target_of(torch.empty(0, device=CUDA)), case):
        pytest.skip("not supported on this GPU")
    if case not in op.small_cases:
        one_of_few()
    check_forward(op, case, CUDA)


VARIANTS = [
    pytest.param(op, name, case, id=f"{op.name} {name} {case.label}")
    for op in all_ops()
    for name in op.variants
    for case in op.cases
]


@pytest.mark.parametrize(("op", "name", "case"), VARIANTS)
def test_variant(op: Op, name: str, case: Case, one_of_few: Callable[[], None]) -> None:
    if not op.supports(target_of(torch.empty(0, device=CUDA)), case):
        pytest.skip("not supported on this GPU")
    if case not in op.small_cases:
        one_of_few()
    try:
        check_forward(op, case, CUDA, op.variants[name])
    except UnsupportedError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(("op", "case"), WITH_GRADIENTS)
def test_gradients(op: Op, case: Case, one_of_few: Callable[[], None]) -> None:
    if case not in op.small_cases:
        one_of_few()
    check_gradients(op, case, CUDA)
