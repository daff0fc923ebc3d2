"""`ridgeline.train_step` for any module, against a plain fp32 loop."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ridgeline
from ridgeline.errors import NumericsError, UsageError
from ridgeline.training.stepping.precision import LossScale

Batch = tuple[Tensor, Tensor]


def make() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 5))


def draw(rows: int, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 12, generator=generator)
    return x, torch.randint(0, 5, (rows,), generator=generator)


def mean_loss(module: nn.Module, batch: Batch) -> Tensor:
    return functional.cross_entropy(module(batch[0]), batch[1])


def summed_loss(module: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    loss = functional.cross_entropy(module(batch[0]), batch[1], reduction="sum")
    return loss, len(batch[1])


def sgd(module: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=lr)


def plain_steps(module: nn.Module, batches: list[Batch], max_norm: float | None) -> list[float]:
    """The loop that everybody knows, in fp32."""
    optimizer, losses = sgd(module), []
    for batch in batches:
        optimizer.zero_grad()
        loss = mean_loss(module, batch)
        loss.backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(module.parameters(), max_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses


def check_equal(one: nn.Module, other: nn.Module, tolerance: float) -> None:
    for left, right in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(left, right, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("precision", "tolerance"), [("fp32", 1e-6), ("fp16", 2e-3), ("bf16", 1e-2)]
)
@pytest.mark.parametrize("max_norm", [None, 0.2])
def test_steps_are_those_of_a_plain_loop(
    precision: Any, tolerance: float, max_norm: float | None
) -> None:
    batches = [draw(24, seed) for seed in range(6)]
    ours, plain = make(), make()
    step = ridgeline.train_step(ours, mean_loss, sgd(ours), precision, max_norm=max_norm)
    results = [step(batch) for batch in batches]
    losses = plain_steps(plain, batches, max_norm)
    assert [result.loss for result in results] == pytest.approx(losses, abs=tolerance)
    check_equal(ours, plain, tolerance)
    assert not any(result.skipped for result in results)
    assert all(each.dtype == torch.float32 and each.grad is None for each in ours.parameters())


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_parts_of_a_batch_are_the_batch(precision: Any) -> None:
    """Parts of 3 and 21 rows: what counts is every row, not every part."""
    x, y = draw(24)
    ours, plain = make(), make()
    step = ridgeline.train_step(ours, summed_loss, sgd(ours), precision, max_norm=0.2)
    parts = (x[:3], y[:3]), (x[3:], y[3:])
    while (result := step(*parts)).skipped:
        assert precision == "fp16"  # the first scale is too large for a sum
    tolerance = 1e-6 if precision == "fp32" else 2e-3
    assert result.loss == pytest.approx(plain_steps(plain, [(x, y)], 0.2)[0], abs=tolerance)
    check_equal(ours, plain, tolerance)


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_what_the_module_computes_in(precision: Any, dtype: torch.dtype) -> None:
    """Also where the caller is under autocast of another kind."""
    dtypes: list[torch.dtype] = []

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        out = module(batch[0])
        dtypes.append(out.dtype)
        return functional.cross_entropy(out.float(), batch[1])

    module = make()
    step = ridgeline.train_step(module, loss, sgd(module), precision)
    step(draw(4))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        step(draw(4))
    assert dtypes == [dtype, dtype]


def test_clipping_comes_after_unscaling() -> None:
    """Gradients far below the limit are not clipped, whatever the loss is multiplied by."""
    ours, plain = make(), make()
    step = ridgeline.train_step(ours, mean_loss, sgd(ours), "fp16", max_norm=1e3)
    result = step(draw(24))
    plain_steps(plain, [draw(24)], None)
    check_equal(ours, plain, 2e-3)
    assert result.loss_scale == 2.0**16
    assert result.gradient_norm < 10


def test_an_overflow_halves_the_scale_and_changes_nothing() -> None:
    module = make()
    before = copy.deepcopy(module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    step = ridgeline.train_step(module, mean_loss, optimizer, "fp16")
    step.loss_scale = LossScale(2.0**24)
    result = step(draw(4))
    assert result.skipped
    assert not math.isfinite(result.gradient_norm)
    check_equal(module, before, 0.0)
    assert not optimizer.state
    assert step.loss_scale.value == 2.0**23
    while result.skipped:
        result = step(draw(4))
    assert optimizer.state
    assert step.state_dict() == {"loss_scale": result.loss_scale, "good_steps": 1}
    other = ridgeline.train_step(module, mean_loss, optimizer, "fp16")
    other.load_state_dict(step.state_dict())
    assert other.state_dict() == step.state_dict()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_batch_that_is_not_numbers_is_skipped(precision: Any) -> None:
    module = make()
    before = copy.deepcopy(module)
    step = ridgeline.train_step(module, mean_loss, sgd(module), precision, max_norm=1.0)
    x, y = draw(4)
    assert step((x * math.nan, y)).skipped
    check_equal(module, before, 0.0)
    assert not step((x, y)).skipped


def test_the_scale_has_an_end() -> None:
    module = make()
    step = ridgeline.train_step(module, mean_loss, sgd(module), "fp16")
    step.loss_scale = LossScale(LossScale.SMALLEST)
    x, y = draw(4)
    with pytest.raises(NumericsError, match="use precision bf16 or fp32"):
        step((x * math.inf, y))


def test_a_frozen_part_stays() -> None:
    module = make()
    frozen = next(module.parameters())
    frozen.requires_grad_(False)
    before = frozen.clone()
    learned = [each for each in module.parameters() if each.requires_grad]
    step = ridgeline.train_step(module, mean_loss, torch.optim.AdamW(learned, lr=0.1))
    losses = [step(draw(8)).loss for _ in range(10)]
    assert losses[-1] < losses[0]
    assert torch.equal(frozen, before)


def test_what_is_refused() -> None:
    module = make()
    with pytest.raises(UsageError, match="precision is 'bf61'"):
        ridgeline.train_step(module, mean_loss, sgd(module), "bf61")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="tf32 requires a GPU; use fp32"):
        ridgeline.train_step(module, mean_loss, sgd(module), "tf32")
    with pytest.raises(UsageError, match="max_norm is nan"):
        ridgeline.train_step(module, mean_loss, sgd(module), max_norm=math.nan)
    with pytest.raises(UsageError, match="none of the module's parameters"):
        ridgeline.train_step(module, mean_loss, sgd(make()))
    half = make().bfloat16()
    with pytest.raises(UsageError, match=r"0.weight is in bfloat16, .*module.float\(\)"):
        ridgeline.train_step(half, mean_loss, sgd(half), "bf16")
    step = ridgeline.train_step(module, lambda m, b: m(b[0]), sgd(module))
    with pytest.raises(UsageError, match=r"shape \[4, 5\]; it must return a mean"):
        step(draw(4))
    with pytest.raises(UsageError, match="without a batch"):
        step()
