"""What ranks that train one model tell each other in a step. Alone there is nothing to tell.

count = sharing.total_count(own)            # before the passes
sharing.finish(gradients)                   # sums that the backward pass has left open
loss, norm = sharing.totals(loss, gradients)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from ridgeline.training.stepping.gradients import norm_of


class Sharing(Protocol):
    is_alone: bool

    def total_count(self, count: int) -> int:
        """Counted tokens of the whole batch."""

    def finish(self, gradients: Mapping[str, Tensor]) -> None:
        """In place: every rank's gradients become those of the whole batch."""

    def totals(self, loss: Tensor, gradients: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The batch's summed loss, and the norm of all gradients as one vector: the same numbers on
        every rank.
        """

    def total_loss(self, loss: float) -> float:
        """Summed over all ranks that have other tokens."""

    def sum_of(self, number: Tensor) -> Tensor:
        """Over all ranks."""

    def num_weights(self, own: int) -> int:
        """Over all ranks."""


class Alone:
    is_alone = True

    def total_count(self, count: int) -> int:
        return count

    def finish(self, gradients: Mapping[str, Tensor]) -> None:
        return

    def totals(self, loss: Tensor, gradients: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return loss, norm_of(gradients)

    def total_loss(self, loss: float) -> float:
        return loss

    def sum_of(self, number: Tensor) -> Tensor:
        return number

    def num_weights(self, own: int) -> int:
        return own


ALONE: Sharing = Alone()
