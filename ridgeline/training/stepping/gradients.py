"""Gradients of a batch: one backward pass's as autograd leaves them, several passes' summed in
fp32. In bf16 a sum of eight would lose what the later ones add.

    sums.begin(len(batches))
    for batch in batches:
        trainer.loss(batch).backward()
        sums.add()
    gradients = sums.take()
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from ridgeline.training.stepping.gradient_products import SUM

NORM_PIECE = 2**20


class GradientSum:
    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        messages: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """`messages`: parameters whose sums lie one behind the other. With them a single pass is
        summed too.
        """
        self._parameters = parameters
        self._sums: dict[str, Tensor] = {}  # that passes add to now
        self._kept: dict[str, Tensor] = {}
        self._names = {} if messages is None else dict(messages)
        self.messages: dict[str, Tensor] = {}

    def begin(self, num_passes: int) -> None:
        """Several passes sum into memory that is kept from step to step, where captured passes
        find it too; products add to it themselves (fused.py).
        """
        if num_passes == 1 and not self._names:
            self._detach()
            return
        if not self.messages:
            self._make_messages()
        for name, parameter in self._parameters.items():
            if name in self._kept:
                self._kept[name].zero_()
            else:
                own = local_tensor(parameter)
                self._kept[name] = torch.zeros_like(own, dtype=torch.float32)
            setattr(parameter, SUM, self._kept[name])
        self._sums = self._kept

    def _make_messages(self) -> None:
        for message, names in self._names.items():
            own = [local_tensor(self._parameters[name]) for name in names]
            sizes = [each.numel() for each in own]
            memory = torch.empty(sum(sizes), dtype=torch.float32, device=own[0].device)
            for name, each, part in zip(names, own, memory.split(sizes), strict=True):
                self._kept[name] = part.view(each.shape)
            self.messages[message] = memory

    def _detach(self) -> None:
        for name in self._sums:
            delattr(self._parameters[name], SUM)
        self._sums = {}

    def add(self, names: Iterable[str] | None = None) -> None:
        """After a backward pass: what autograd has, where sums are kept; of all parameters, or of
        those that the pass is through with.
        """
        for name in self._sums if names is None else names:
            total = self._sums[name]
            parameter = self._parameters[name]
            if parameter.grad is not None:
                total += local_tensor(parameter.grad)
                parameter.grad = None

    def take(self) -> dict[str, Tensor]:
        """By the parameters' names; the parameters keep none. A parameter that no token reached,
        such as that of an expert, has none, or zeros.
        """
        if self._sums:
            return dict(self._sums)
        gradients = {}
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                gradients[name], parameter.grad = local_tensor(parameter.grad), None
        return gradients


def local_tensor(tensor: Tensor) -> Tensor:
    """What lies on this rank, the memory itself; `fully_shard` leaves it a part of a tensor."""
    to_local = getattr(tensor, "to_local", None)
    if to_local is None:
        return tensor.detach()
    with torch.no_grad():
        local: Tensor = to_local()
    return local


def norm_pieces(tensor: Tensor) -> Sequence[Tensor]:
    """What norms are taken of one by one: a CPU adds squares up in fp32, and of matrices of up to
    34 M weights two ways to do it differed by 0.035% (2026-11-19).
    """
    if tensor.is_cuda or tensor.numel() <= NORM_PIECE:
        return (tensor,)
    return tensor.reshape(-1).split(NORM_PIECE)


def norm_of(gradients: Mapping[str, Tensor]) -> Tensor:
    """The norm of all gradients as one vector, in fp32 and on their device."""
    norms = torch._foreach_norm(list(gradients.values()), 2, dtype=torch.float32)
    return torch.linalg.vector_norm(torch.stack(norms))


def scale_of(norm: Tensor, factor: float, max_norm: float | None) -> Tensor:
    """What gradients are multiplied by: `factor`, which gives them this norm, and less where the
    norm is above the limit. Not finite where the norm is not.
    """
    scale = torch.full_like(norm, factor)
    if max_norm is not None:
        scale = scale * (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return torch.where(norm.isfinite(), scale, torch.nan)
