"""Every op against its reference under Triton's interpreter: small and awkward shapes."""

from __future__ import annotations

import pytest
import torch
from kernel_checks import check_forward, check_gradients

from ridgeline.kernels.op import Case, Op
from ridgeline.kernels.registry import all_ops

CPU = torch.device("cpu")
EACH = [
    pytest.param(op, case, id=f"{op.name} {case.label}")
    for op in all_ops()
    for case in op.small_cases
]
WITH_GRADIENTS = [
    param for param in EACH if param.values[1].gradients and param.values[0].differentiable
]


@pytest.mark.parametrize(("op", "case"), EACH)
def test_forward(op: Op, case: Case) -> None:
    check_forward(op, case, CPU)


@pytest.mark.parametrize(("op", "case"), WITH_GRADIENTS)
def test_gradients(op: Op, case: Case) -> None:
    check_gradients(op, case, CPU)
