"""`make gpu-training-kernels`: what it checks, and what it says of what fails. Kernels run under
Triton's interpreter here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import training_kernels
from torch import Tensor

from ridgeline.bench.kernels.ops import KernelResult
from ridgeline.kernels.cost import OpCost
from ridgeline.kernels.op import Op
from ridgeline.kernels.registry import get_op
from ridgeline.timing import Timing

CPU = torch.device("cpu")


def small(name: str, **changes: Any) -> Op:
    op = get_op(name)
    return replace(op, cases=op.small_cases[:2], **changes)


def test_forward_and_every_gradient_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert training_kernels.check_all([small("linear_cross_entropy")], CPU) == []
    assert "linear_cross_entropy: 4 of 4 checks passed" in capsys.readouterr().out


def test_what_fails_is_named_and_the_rest_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    op = get_op("rotary")

    def turned_back(**inputs: Any) -> Tensor:
        return -torch.as_tensor(op.reference(**inputs))

    failed = training_kernels.check_all([small("rotary", launch=turned_back)], CPU)
    assert [line.split(":")[0] for line in failed] == [
        "rotary 1x1x2 fp32",
        "rotary 1x1x2 bf16 strided",
    ]
    assert "AssertionError relative error 2.00" in failed[0]
    assert "rotary: 2 of 4 checks passed" in capsys.readouterr().out


def test_of_the_norm_only_what_has_gradients_is_training() -> None:
    labels = [case.label for case in training_kernels.cases_of(get_op("rms_norm"), CPU)]
    assert labels
    assert not any("int8" in label or "fp8" in label for label in labels)


def test_a_line_has_our_time_the_limit_and_the_others() -> None:
    result = KernelResult(
        op="adamw",
        case="many",
        timing=Timing.from_samples([2e-3]),
        cost=OpCost(4e9, 4e9),
        bytes_per_s=4e12,
        flops_per_s=0.0,
        share=0.91,
        bound="memory",
        baselines={"eager": 5e-3},
        failed={"liger": "No module named 'liger_kernel'"},
    )
    line = training_kernels.line_of(result)
    assert line == (
        "many: 2.000 ms, 4.00 TB/s 91% of limit; eager 2.50x "
        "(liger: No module named 'liger_kernel')"
    )
