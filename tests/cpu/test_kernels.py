"""Every op against its reference under Triton's interpreter: small and awkward shapes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_checks import check_forward, check_gradients

from ridgeline.cli.kernels import check_problem
from ridgeline.kernels.op import Case, Op
from ridgeline.kernels.registry import all_ops, get_op

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


def test_the_check_command_passes_right_kernels_and_names_what_is_wrong() -> None:
    op = get_op("rms_norm")
    plain, codes = (next(c for c in op.small_cases if text in c.label) for text in ("1000", "int8"))
    assert check_problem(op, plain, CPU) is None
    assert check_problem(op, codes, CPU) is None
    off = replace(op, launch=lambda **inputs: op.launch(**inputs) * 1.01)
    assert "relative error" in str(check_problem(off, plain, CPU))
