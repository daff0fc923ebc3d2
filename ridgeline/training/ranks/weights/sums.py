"""Sums of gradients that a backward pass leaves open, and the one norm over all ranks.

`fully_shard` has summed over the ranks that have other tokens. Left are weights of which every rank
of `tensor` has a copy but a part of the gradient (norms, routers), copies of KV heads, experts that
several ranks have, and a table that is embedding on the first stage and head on the last.

    sharing = RankSharing(mesh, parts)
    sharing.finish(gradients)
    loss, norm = sharing.totals(loss, gradients)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ridgeline.parallel.holdings import Part
from ridgeline.parallel.mesh import Axis, Mesh
from ridgeline.training.stepping.gradients import norm_pieces


class RankSharing:
    is_alone = False

    def __init__(self, mesh: Mesh, parts: Mapping[str, Part], has_loss: bool = True) -> None:
        self._mesh = mesh
        self._parts = dict(parts)
        # Ranks of `tensor` have the same loss, and stages but the last have none.
        self._tells_loss = has_loss and mesh.place.tensor == 0

    def total_count(self, count: int) -> int:
        """Ranks that have other tokens: their counts are summed."""
        place = self._mesh.place
        own = count if (place.tensor, place.pipeline) == (0, 0) else 0
        return self._mesh.agreed(own, "sum")

    def finish(self, gradients: Mapping[str, Tensor]) -> None:
        mesh, parts = self._mesh, self._parts
        named = {name: gradients[name] for name in parts if name in gradients}
        sum_over(
            mesh.axis("tensor"),
            [each for name, each in named.items() if parts[name].tensor_sum == "all"],
        )
        sum_over(
            mesh.axis("kv"),
            [
                each[segment.rows.start : segment.rows.stop]
                for name, each in named.items()
                if parts[name].tensor_sum == "kv"
                for segment in parts[name].segments
                if segment.is_kv
            ],
        )
        sum_over(
            mesh.axis("expert_copies"),
            [each for name, each in named.items() if parts[name].is_expert],
        )
        sum_over(mesh.axis("tied"), [each for name, each in named.items() if parts[name].is_tied])

    def totals(self, loss: Tensor, gradients: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        own = torch.stack(
            [
                loss.double() if self._tells_loss else torch.zeros_like(loss, dtype=torch.float64),
                squares(self._parts, gradients).to(loss.device),
            ]
        )
        total, square = self._mesh.axis("all").all_reduce(own)
        return total.to(loss.dtype), square.sqrt().float()

    def total_loss(self, loss: float) -> float:
        own = torch.tensor(loss if self._tells_loss else 0.0, dtype=torch.float64)
        control = self._mesh.control
        return float(own if control is None else control.all_reduce(own))

    def sum_of(self, number: Tensor) -> Tensor:
        return self._mesh.axis("all").all_reduce(number.clone())

    def num_weights(self, own: int) -> int:
        return self._mesh.agreed(own, "sum")


def squares(parts: Mapping[str, Part], gradients: Mapping[str, Tensor]) -> Tensor:
    """This rank's share of the squared norm: what several ranks have alike counts once in all."""
    rows: list[Tensor] = []
    copies: list[int] = []
    for name, gradient in gradients.items():
        for segment in parts[name].segments:
            if len(segment.rows):
                own = norm_pieces(gradient[segment.rows.start : segment.rows.stop])
                rows += own
                copies += [segment.copies] * len(own)
    if not rows:
        return torch.zeros((), dtype=torch.float64)
    norms = torch.stack(torch._foreach_norm(rows, 2, dtype=torch.float32)).double()
    shares = torch.tensor(copies, dtype=torch.float64).reciprocal_()
    return (norms.square() * shares.to(norms.device, non_blocking=True)).sum()


def sum_over(axis: Axis, tensors: Sequence[Tensor]) -> None:
    """In place, in fp32, in one message."""
    if axis.size == 1 or not tensors:
        return
    flat = torch.cat([each.float().flatten() for each in tensors])
    axis.all_reduce(flat)
    for each, total in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        each.copy_(total.view(each.shape))
