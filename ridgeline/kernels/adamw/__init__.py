"""AdamW with an exact fp32 master in four bytes a weight, moments in fp32, bf16 or 8 bits, clipping
and decoupled weight decay, in one pass over memory and few launches for many tensors.

    states = [new_state(p, AdamWFormat("exact", "bf16"), salt=i) for i, p in enumerate(weights)]
    lost = AdamWUpdate(states).step(grads, AdamWStep(lr=1e-4, step=1), clip)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ridgeline.kernels.adamw import cpu, reference
from ridgeline.kernels.adamw.state import (
    AdamWFormat,
    AdamWState,
    AdamWStep,
    joined,
    new_state,
    on_device,
    split,
)

__all__ = ["AdamWFormat", "AdamWState", "AdamWStep", "AdamWUpdate", "joined", "new_state", "split"]


class AdamWUpdate:
    """Updates these tensors together. On a GPU it keeps the table of where they lie, which changes
    only when a gradient does.
    """

    def __init__(self, states: Sequence[AdamWState]) -> None:
        self.states = list(states)
        self._tables: dict[tuple[AdamWFormat, torch.dtype], Any] = {}

    def step(
        self,
        grads: Sequence[Tensor | None],
        step: AdamWStep | Tensor,
        clip: Tensor | None = None,
    ) -> Tensor:
        """In place. `clip` multiplies all gradients (fp32, no dims); where it is not finite nothing
        changes. A weight without a gradient stays. For a captured step `step` is
        `AdamWStep.numbers()` on the device.

        Returns the count (int64, no dims) of updates that rounding threw away.
        """
        self._check(grads)
        pairs = [(s, g) for s, g in zip(self.states, grads, strict=True) if g is not None]
        if not pairs:
            return torch.zeros((), dtype=torch.int64)
        states, given = [state for state, _ in pairs], [grad for _, grad in pairs]
        device = states[0].weight.device
        if clip is None:
            clip = torch.ones((), device=device)
        if device.type == "cpu":
            assert isinstance(step, AdamWStep), "numbers on a device are for GPUs"
            return self._on_host(pairs, step, clip)
        if isinstance(step, AdamWStep):
            step = on_device(step.numbers(), device)
        return self.launch(states, given, step, clip)

    def _on_host(
        self, pairs: Sequence[tuple[AdamWState, Tensor]], step: AdamWStep, clip: Tensor
    ) -> Tensor:
        """By the compiled pass where it serves, else by the reference: the bits are the same."""
        served = [cpu.serves(state, grad) for state, grad in pairs]
        rest = [pair for pair, is_served in zip(pairs, served, strict=True) if not is_served]
        lost = reference.adamw_([s for s, _ in rest], [g for _, g in rest], step, clip)
        factor, floats = clip.item(), step.numbers()[:-1].view(torch.float32)
        if math.isfinite(factor):
            for (state, grad), is_served in zip(pairs, served, strict=True):
                if is_served:
                    cpu.update(state, grad, floats, factor, lost)
        return lost

    def launch(
        self, states: Sequence[AdamWState], grads: Sequence[Tensor], numbers: Tensor, clip: Tensor
    ) -> Tensor:
        """One launch for each format and dtype of gradients."""
        from ridgeline.kernels.adamw import triton

        groups: dict[tuple[AdamWFormat, torch.dtype], list[int]] = {}
        for index, (state, grad) in enumerate(zip(states, grads, strict=True)):
            groups.setdefault((state.format, grad.dtype), []).append(index)
        lost = []
        for key, members in groups.items():
            own = [states[index] for index in members]
            own_grads = [grads[index] for index in members]
            table = self._tables.get(key)
            parts = [triton.addresses(s, g) for s, g in zip(own, own_grads, strict=True)]
            if table is None or table.addresses != parts:
                table = self._tables[key] = triton.tabulate(own, own_grads)
            lost.append(triton.update(table, key[1], numbers, clip).sum())
        return torch.stack(lost).sum()

    def _check(self, grads: Sequence[Tensor | None]) -> None:
        if len(grads) != len(self.states):
            raise ValueError(f"{len(grads)} gradients for {len(self.states)} weights")
        for index, (state, grad) in enumerate(zip(self.states, grads, strict=True)):
            if grad is None:
                continue
            if grad.shape != state.weight.shape or not grad.is_contiguous():
                raise ValueError(
                    f"gradient {index} is {tuple(grad.shape)}, strides {grad.stride()}; "
                    f"it must be contiguous and {tuple(state.weight.shape)}"
                )
