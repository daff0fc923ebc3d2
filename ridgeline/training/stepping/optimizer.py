"""AdamW over the weights' states: clipping, decay, update and rounding in one pass (kernels/adamw).

Matrices decay, tables included; norms and biases, which have one dim, do not.

    optimizer = Optimizer(weights, OptimizerOptions(lr=1e-4))
    lost = optimizer.step(gradients, lr=1e-4, scale=scale)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.kernels.adamw import AdamWStep, AdamWUpdate
from ridgeline.training.config import OptimizerOptions
from ridgeline.training.stepping.precision import Weights


@dataclass(frozen=True)
class DecayGroup:
    names: list[str]
    update: AdamWUpdate
    weight_decay: float


class Optimizer:
    def __init__(self, weights: Weights, options: OptimizerOptions, seed: int = 0) -> None:
        self.options = options
        self.seed = seed  # of random roundings
        self.num_steps = 0
        self._weights = weights
        matrices = [name for name, each in weights.parameters.items() if each.dim() > 1]
        vectors = [name for name in weights.parameters if name not in matrices]
        self._groups = [
            DecayGroup(names, AdamWUpdate([weights.states[name] for name in names]), decay)
            for names, decay in ((matrices, options.weight_decay), (vectors, 0.0))
            if names
        ]

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor], lr: float, scale: Tensor) -> Tensor:
        """Change the weights by gradients times `scale`; where that is not finite nothing changes.
        A parameter without a gradient stays. Returns how many updates rounding threw away.
        """
        self.num_steps += 1
        lost = []
        for group in self._groups:
            grads = [gradients.get(name) for name in group.names]
            lost.append(group.update.step(grads, self._numbers(lr, group), scale))
        self._weights.copy_masters()
        return torch.stack(lost).sum()

    def _numbers(self, lr: float, group: DecayGroup) -> AdamWStep:
        return AdamWStep(
            lr=lr,
            step=self.num_steps,
            beta1=self.options.beta1,
            beta2=self.options.beta2,
            eps=self.options.eps,
            weight_decay=group.weight_decay,
            seed=self.seed,
        )
