"""A head's loss without the logits of all rows: the path of a CPU, and what any path must keep."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from allocations import allocations
from kernel_checks import check_gradients, make_inputs

from ridgeline.kernels.agreement import compare
from ridgeline.kernels.linear_cross_entropy import IGNORED, linear_cross_entropy
from ridgeline.kernels.linear_cross_entropy.op import OP
from ridgeline.kernels.op import Case

CPU = torch.device("cpu")


@pytest.mark.parametrize("case", OP.small_cases, ids=lambda case: case.label)
def test_the_path_of_a_cpu_gives_loss_count_and_gradients(case: Case) -> None:
    loss, count = linear_cross_entropy(**make_inputs(case, CPU))
    compare((loss, count), OP.reference(**make_inputs(case, CPU))[:2], case)
    check_gradients(replace(OP, differentiable=linear_cross_entropy), case, CPU)


def inputs(rows: int = 64, vocab_size: int = 1000) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {
        "x_TD": torch.randn(rows, 16, generator=generator, requires_grad=True),
        "weight_VD": torch.randn(vocab_size, 16, generator=generator, requires_grad=True),
        "targets_T": torch.randint(vocab_size, (rows,), generator=generator),
    }


def test_logits_of_all_rows_are_never_held() -> None:
    rows, vocab_size = 512, 8000
    each = inputs(rows, vocab_size)
    peak = allocations(lambda: linear_cross_entropy(**each, chunk_rows=16)).peak_bytes
    assert peak < rows * vocab_size * 4 / 4


def test_the_loss_of_pieces_is_the_loss_of_the_whole() -> None:
    """Sums and counts add up; averages of averages would not."""
    whole = inputs()
    whole["targets_T"][:20] = IGNORED
    total, count = linear_cross_entropy(**whole)
    parts = [
        linear_cross_entropy(whole["x_TD"][part], whole["weight_VD"], whole["targets_T"][part])
        for part in (slice(0, 24), slice(24, 64))
    ]
    assert [int(part[1]) for part in parts] == [4, 40]
    assert count == 44
    torch.testing.assert_close(sum(part[0] for part in parts), total)


def test_ignored_rows_have_no_gradient_and_the_same_bits_come_twice() -> None:
    taken = []
    for _ in range(2):
        each = inputs()
        each["targets_T"][::2] = IGNORED
        linear_cross_entropy(**each)[0].backward()
        taken.append((each["x_TD"].grad, each["weight_VD"].grad))
    assert torch.equal(taken[0][0], taken[1][0])
    assert torch.equal(taken[0][1], taken[1][1])
    assert not taken[0][0][::2].any()
    assert taken[0][0][1::2].any(-1).all()


def test_gradients_follow_the_gradient_of_the_loss_and_only_what_is_wanted() -> None:
    full = inputs()
    (linear_cross_entropy(**full)[0] / 64).backward()
    frozen = inputs()
    frozen["weight_VD"].requires_grad_(False)
    loss, count = linear_cross_entropy(**frozen)
    (loss / count).backward()
    assert torch.equal(full["x_TD"].grad, frozen["x_TD"].grad)
    assert frozen["weight_VD"].grad is None
    with torch.no_grad():
        assert not linear_cross_entropy(**full)[0].requires_grad


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weight_VD": torch.zeros(9, 15)}, "same last dim"),
        ({"weight_VD": torch.zeros(9, 16, dtype=torch.bfloat16)}, "need one dtype"),
        ({"targets_T": torch.zeros(3, dtype=torch.int64)}, "one for each of x's rows"),
        ({"softcap": 0.0}, "softcap is 0.0"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        linear_cross_entropy(**inputs() | change)


def test_a_target_that_is_no_token_makes_the_kernels_loss_nan() -> None:
    each = inputs(4, 10)
    each["targets_T"][1] = 10
    assert OP.launch(**{name: value.detach() for name, value in each.items()})[0].isnan()
