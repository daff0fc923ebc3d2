"""`make gpu-training-kernels`: what it checks, and what it says of what fails. Kernels run under
Triton's interpreter here.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import training_kernels
from torch import Tensor

from ridgeline.bench.kernels.ops import KernelResult
from ridgeline.kernels.agreement import compare
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


def test_a_failed_test_of_the_second_process_is_named_with_its_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "test_own.py"
    path.write_text(
        "def test_right() -> None:\n    assert True\n\n\n"
        "def test_wrong() -> None:\n"
        f"    raise AssertionError('an element is off by 1.00 of its size, {'and more ' * 12}')\n"
    )
    monkeypatch.setattr(training_kernels, "TESTS", path)
    (failed,) = training_kernels.end_tests(training_kernels.start_tests())
    assert failed.startswith("test_wrong - AssertionError: an element is off by 1.00 of its size")
    assert failed.rstrip().endswith("and more")
    out = capsys.readouterr().out
    assert "test_own.py: 1 failed" in out
    assert f"FAILED {failed}" in out


def test_codes_that_are_more_than_a_step_off_are_counted_and_the_first_is_shown() -> None:
    case = get_op("rows_to_fp8").small_cases[0]
    codes = torch.full((3, 4), 16.0).to(torch.float8_e4m3fn)
    other = codes.clone()
    other[1, 2], other[2, 0] = 20.0, 18.0  # two steps, and one
    with pytest.raises(AssertionError) as error:
        compare(other, codes, case)
    assert str(error.value) == (
        "1 of 12 codes are more than a step off: row 1 column 2 has 20, not 16"
    )
