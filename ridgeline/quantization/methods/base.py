"""What a quantization method is: how good codes are found for the matrices of a block.

A method may first move scales within the block (`fold`), then it computes each matrix's codes
(`apply`). Its fields are its options; calibration.py drives it.

Letters: O outputs, D depth.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ridgeline.models.transformer import Block
from ridgeline.quantization.scheme import Codes, Scheme, encode, find_grid
from ridgeline.quantization.statistics import Statistics


@dataclass
class Calibrated:
    """A block with statistics of its inputs. Folding changes it; it is a copy."""

    block: Block
    weights: dict[str, Tensor]  # each matrix [O, D] in fp32: what will be rounded
    statistics: dict[str, Statistics]  # of each matrix's inputs
    schemes: dict[str, Scheme | None]  # None: the matrix stays as it is
    min_tokens: int  # fewer tokens say too little about a matrix

    def is_known(self, name: str) -> bool:
        """Whether enough tokens were seen: an expert may get few."""
        return self.statistics[name].num_tokens >= self.min_tokens


@dataclass(frozen=True)
class Method(ABC):
    name: ClassVar[str]
    prunes: ClassVar[bool] = False  # it also works without a scheme

    @property
    def sees_original(self) -> bool:
        """Whether a block is calibrated on the original's activations, rather than on those of the
        rounded blocks before it.
        """
        return False

    @property
    def folds(self) -> bool:
        """Whether a matrix's codes depend on the other matrices of its block."""
        return type(self).fold is not Method.fold

    def fits(self, num_outputs: int, depth: int, scheme: Scheme | None) -> bool:
        """Whether the method supports a matrix of this size."""
        return scheme is None or scheme.fits(num_outputs, depth)

    def fold(self, calibrated: Calibrated) -> None:  # noqa: B027  (nothing to do is the usual)
        """Move scales between the block's parts without changing its function. Most do not."""

    @abstractmethod
    def apply(
        self, weight_OD: Tensor, statistics: Statistics, scheme: Scheme | None
    ) -> Codes | Tensor:
        """The codes; without a scheme (pruning) the weights themselves, in fp32."""

    def without_data(self, weight_OD: Tensor, scheme: Scheme | None) -> Codes | Tensor:
        """Fallback where there were too few tokens: each weight's nearest code."""
        assert scheme is not None, f"{self.name} needs a scheme"
        return encode(weight_OD, find_grid(weight_OD, scheme), scheme)
