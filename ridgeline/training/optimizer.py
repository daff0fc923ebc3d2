"""AdamW over fp32 masters, with clipping by the norm of all gradients.

Matrices decay, tables included; norms and biases, which have one dim, do not.

    optimizer = PlainAdamW(weights.masters, OptimizerOptions(lr=1e-4))
    norm = optimizer.step(gradients, lr=1e-4)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.training.config import OptimizerOptions


@dataclass(frozen=True)
class Moments:
    """Running means of a parameter's gradient and of its square."""

    mean: Tensor
    square: Tensor


class PlainAdamW:
    def __init__(self, masters: Mapping[str, Tensor], options: OptimizerOptions) -> None:
        self.options = options
        self.num_steps = 0
        self._masters = masters
        self.moments = {
            name: Moments(torch.zeros_like(master), torch.zeros_like(master))
            for name, master in masters.items()
        }

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor], lr: float) -> None:
        """Change the masters by gradients that are clipped already. A parameter without one, such
        as an expert that no token chose, stays.
        """
        self.num_steps += 1
        for name, gradient in gradients.items():
            master = self._masters[name]
            decay = self.options.weight_decay if master.dim() > 1 else 0.0
            self._update(master, gradient, self.moments[name], lr, decay)

    def _update(
        self, master: Tensor, gradient: Tensor, moments: Moments, lr: float, decay: float
    ) -> None:
        beta1, beta2 = self.options.beta1, self.options.beta2
        if decay:
            master.mul_(1 - lr * decay)
        moments.mean.lerp_(gradient, 1 - beta1)
        moments.square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        # Both means begin at zero; the corrections make up for it.
        size = lr / (1 - beta1**self.num_steps)
        correction = math.sqrt(1 - beta2**self.num_steps)
        root = moments.square.sqrt().div_(correction).add_(self.options.eps)
        master.addcdiv_(moments.mean, root, value=-size)


def norm_of(gradients: Mapping[str, Tensor]) -> Tensor:
    """The norm of all gradients as one vector."""
    norms = [torch.linalg.vector_norm(gradient) for gradient in gradients.values()]
    return torch.linalg.vector_norm(torch.stack(norms))


@torch.no_grad()
def clip(gradients: Mapping[str, Tensor], norm: float, max_norm: float | None) -> None:
    """Scale gradients whose norm is above the limit down to it, in place."""
    if max_norm is not None and norm > max_norm:
        for gradient in gradients.values():
            gradient.mul_(max_norm / (norm + 1e-6))
