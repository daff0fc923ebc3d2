"""Every op against its reference under Triton's interpreter: small and awkward shapes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_checks import check_forward, check_gradients
from torch import Tensor

from ridgeline.cli.kernels import check_problem
from ridgeline.errors import UnsupportedError
from ridgeline.kernels.op import Case, Op
from ridgeline.kernels.registry import all_ops, get_op
from ridgeline.lessons import all_lessons

CPU = torch.device("cpu")
EACH = [
    pytest.param(op, case, id=f"{op.name} {case.label}")
    for op in (*all_ops(), *all_lessons())
    for case in op.small_cases
]
WITH_GRADIENTS = [
    param for param in EACH if param.values[1].gradients and param.values[0].differentiable
]


@pytest.mark.sweep(keep=3, each="op")
@pytest.mark.parametrize(("op", "case"), EACH)
def test_forward(op: Op, case: Case) -> None:
    check_forward(op, case, CPU)


@pytest.mark.parametrize(("op", "case"), WITH_GRADIENTS)
def test_gradients(op: Op, case: Case) -> None:
    check_gradients(op, case, CPU)


def test_the_check_command_passes_right_kernels_and_names_what_is_wrong() -> None:
    op = get_op("rms_norm")
    plain, codes = (next(c for c in op.small_cases if text in c.label) for text in ("1000", "int8"))
    assert check_problem(op, op.launch, plain, CPU) is None
    assert check_problem(op, op.launch, codes, CPU) is None

    def off(**inputs: Any) -> Tensor:
        return op.launch(**inputs) * 1.01  # type: ignore[no-any-return]

    assert "relative error" in str(check_problem(op, off, plain, CPU))


def test_a_variant_that_is_not_there_is_no_problem_but_a_kernel_is() -> None:
    op = get_op("rms_norm")

    def missing(**inputs: Any) -> Tensor:
        raise UnsupportedError("not built")

    assert check_problem(op, missing, op.small_cases[0], CPU) is None
    with pytest.raises(UnsupportedError):
        check_problem(replace(op, launch=missing), missing, op.small_cases[0], CPU)
