"""RMSNorm with its residual's sum inside, differentiated: what is used of it and what is not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ridgeline.kernels.rms_norm import add_rms_norm, reference


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((6, 40), (6, 40), (40,))
    return [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)], ids=["norm", "sum", "both"])
def test_gradients_of_what_is_used(used: tuple[int, ...]) -> None:
    """Behind the last layer the sum is not used, and a norm's result may not be either."""
    own, plain = inputs(), inputs()
    outs = add_rms_norm(*own, 1e-6, 1.0)
    expected = reference.rms_norm(plain[0], plain[2], 1e-6, 1.0, residual_TD=plain[1])
    for results in (outs, expected):
        sum((results[number] * results[number]).sum() for number in used).backward()
    for result, wanted in zip(own, plain, strict=True):
        if wanted.grad is None:
            assert result.grad is None
        else:
            torch.testing.assert_close(result.grad, wanted.grad)


def test_the_weights_gradient_has_the_same_bits_each_time() -> None:
    taken = []
    for _ in range(2):
        x, residual, weight = inputs()
        add_rms_norm(x, residual, weight, 1e-6, 0.0)[0].sum().backward()
        taken.append(weight.grad)
    assert torch.equal(*taken)
