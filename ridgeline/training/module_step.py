"""A training step for any `nn.Module` and any torch optimizer, in a precision of choice.

    step = ridgeline.train_step(module, loss, optimizer, precision="fp16", max_norm=1.0)
    for batch in batches:
        result = step(batch)                    # or step(part, part): one update for both
        result.loss, result.gradient_norm, result.skipped

`loss(module, batch)` returns a mean, or a sum and a count: parts of a batch that differ in what
they count then weigh as they should. Weights stay in fp32; in bf16 and fp16 the forward pass runs
under autocast, the backward pass does not. fp16's loss is multiplied by a scale that follows what
overflows; gradients are divided by it before they are clipped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from ridgeline.errors import UsageError, near_matches
from ridgeline.training.stepping.precision import LossScale
from ridgeline.training.stepping.step import tf32_products

ModulePrecision = Literal["fp32", "tf32", "bf16", "fp16"]
ModuleLoss = Callable[[Any, Any], Tensor | tuple[Tensor, Tensor | int]]
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class ModuleStepResult:
    loss: float  # over the whole batch, before the update
    gradient_norm: float  # before clipping
    skipped: bool  # gradients were not numbers: nothing was changed
    loss_scale: float | None  # that this step ran with, in fp16


def train_step(
    module: nn.Module,
    loss: ModuleLoss,
    optimizer: torch.optim.Optimizer,
    precision: ModulePrecision = "fp32",
    *,
    max_norm: float | None = None,
) -> ModuleStep:
    """A step to call with a batch, or with the parts of one. `max_norm` clips the gradients of all
    parameters together.
    """
    return ModuleStep(module, loss, optimizer, precision, max_norm)


class ModuleStep:
    def __init__(
        self,
        module: nn.Module,
        loss: ModuleLoss,
        optimizer: torch.optim.Optimizer,
        precision: ModulePrecision,
        max_norm: float | None,
    ) -> None:
        if max_norm is not None and not (math.isfinite(max_norm) and max_norm > 0):
            raise UsageError(f"max_norm is {max_norm}; it must be finite and above 0")
        self.module = module
        self.optimizer = optimizer
        self.loss_scale = LossScale() if precision == "fp16" else None
        self._loss = loss
        self._precision = precision
        self._max_norm = max_norm
        self._parameters = learned_parameters(module, optimizer)
        self._device = self._parameters[0].device.type
        check_module_precision(precision, self._device)

    def __call__(self, *batches: Any) -> ModuleStepResult:
        if not batches:
            raise UsageError("a step was called without a batch; give one, or its parts")
        self.module.zero_grad(set_to_none=True)
        self.optimizer.zero_grad(set_to_none=True)
        with tf32_products(self._precision == "tf32"):
            total, weight = self._accumulate(batches)
        scale = None if self.loss_scale is None else self.loss_scale.value
        norm = self._normalize(1.0 / (weight * (scale or 1.0)))
        is_finite = math.isfinite(norm)
        if is_finite:
            self._clip(norm)
            self.optimizer.step()
        self.module.zero_grad(set_to_none=True)
        self.optimizer.zero_grad(set_to_none=True)
        if self.loss_scale is not None:
            self.loss_scale.after(is_finite)
        return ModuleStepResult(total / weight, norm, not is_finite, scale)

    def _accumulate(self, batches: tuple[Any, ...]) -> tuple[float, float]:
        """The summed loss and what it is divided by; gradients are those of the scaled sum."""
        scale = 1.0 if self.loss_scale is None else self.loss_scale.value
        totals, weights = [], []
        for batch in batches:
            with self._autocast():
                value = self._loss(self.module, batch)
            total, weight = value if isinstance(value, tuple) else (value, 1)
            if total.dim():
                raise UsageError(
                    f"loss returned a tensor of shape {list(total.shape)}; it must return a mean, "
                    "or a sum and a count"
                )
            (total.float() * scale).backward()
            totals.append(total.detach().float())
            weights.append(float(weight))
        if not sum(weights) > 0:
            raise UsageError("loss counted nothing in this batch: there is nothing to learn")
        return torch.stack(totals).sum().item(), sum(weights)

    def _autocast(self) -> Any:
        """Off where none is wanted: a caller's own does not reach in."""
        if self._device not in ("cpu", "cuda"):
            return nullcontext()
        dtype = AUTOCAST.get(self._precision)
        return torch.autocast(self._device, dtype=dtype, enabled=dtype is not None)

    def _gradients(self) -> list[Tensor]:
        return [each.grad for each in self._parameters if each.grad is not None]

    def _normalize(self, factor: float) -> float:
        """Gradients of the mean instead of the scaled sum; returns their norm. The norm is taken
        afterwards: an fp16 scale would make it overflow where the gradients do not.
        """
        gradients = self._gradients()
        if not gradients:
            raise UsageError("loss does not depend on any parameter that the optimizer has")
        for gradient in gradients:
            gradient.mul_(factor)
        norms = [torch.linalg.vector_norm(_values(each), dtype=torch.float32) for each in gradients]
        device = norms[0].device
        return torch.linalg.vector_norm(torch.stack([each.to(device) for each in norms])).item()

    def _clip(self, norm: float) -> None:
        if self._max_norm is not None and norm > self._max_norm:
            for gradient in self._gradients():
                gradient.mul_(self._max_norm / (norm + 1e-6))

    def state_dict(self) -> dict[str, float]:
        """What the step knows itself; module and optimizer have their own."""
        if self.loss_scale is None:
            return {}
        return {"loss_scale": self.loss_scale.value, "good_steps": self.loss_scale.num_good}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        if self.loss_scale is not None and "loss_scale" in state:
            self.loss_scale = LossScale(state["loss_scale"], int(state["good_steps"]))


def _values(gradient: Tensor) -> Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def learned_parameters(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Those of the optimizer that are learned; none may be in 16 bits, which lose updates."""
    names = {id(each): name for name, each in module.named_parameters()}
    parameters = [
        each for group in optimizer.param_groups for each in group["params"] if each.requires_grad
    ]
    if not any(id(each) in names for each in parameters):
        raise UsageError("the optimizer has none of the module's parameters that are learned")
    for each in parameters:
        if each.dtype in (torch.bfloat16, torch.float16):
            name = names.get(id(each), "a parameter")
            raise UsageError(
                f"{name} is in {str(each.dtype).removeprefix('torch.')}, in which small updates "
                "are lost; give a module in fp32 (module.float()), and precision says what it "
                "computes in"
            )
    return parameters


def check_module_precision(precision: str, device: str) -> None:
    known = get_args(ModulePrecision)
    if precision not in known:
        near = near_matches(precision, known)
        raise UsageError(f"precision is {precision!r}{near}; give one of {', '.join(known)}")
    if precision == "tf32" and device == "cpu":
        raise UsageError("precision tf32 requires a GPU; use fp32")
