"""What a method is: how good codes are found for the matrices of a block.

A method may first fold scales from one place of the block to another (`fold`), then it makes each
matrix's codes (`apply`). Its fields are its options; calibration.py drives it.

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
    """A block that the data has been through. Folding changes it; it is a copy."""

    block: Block
    weights: dict[str, Tensor]  # each matrix [O, D] in fp32: what will be rounded
    statistics: dict[str, Statistics]  # of each matrix's inputs
    schemes: dict[str, Scheme | None]  # None: the matrix stays as it is
    min_tokens: int  # fewer say too little about a matrix

    def is_known(self, name: str) -> bool:
        """Whether enough tokens came by: an expert may have seen few."""
        return self.statistics[name].num_tokens >= self.min_tokens


@dataclass(frozen=True)
class Method(ABC):
    name: ClassVar[str]
    prunes: ClassVar[bool] = False  # it has work to do without a scheme too

    @property
    def sees_original(self) -> bool:
        """Whether a block is calibrated on what the original hands it, not on what comes out of the
        blocks before it when they are rounded.
        """
        return False

    @property
    def folds(self) -> bool:
        """Whether a matrix's codes depend on what is done to the others of its block."""
        return type(self).fold is not Method.fold

    def fits(self, num_outputs: int, depth: int, scheme: Scheme | None) -> bool:
        """Whether it can treat a matrix of this size."""
        return scheme is None or scheme.fits(num_outputs, depth)

    def fold(self, calibrated: Calibrated) -> None:  # noqa: B027  (nothing to do is the usual)
        """Move scales between the block's parts, its function unchanged. Most methods do not."""

    @abstractmethod
    def apply(
        self, weight_OD: Tensor, statistics: Statistics, scheme: Scheme | None
    ) -> Codes | Tensor:
        """The codes; without a scheme (pruning) the weights themselves, in fp32."""

    def without_data(self, weight_OD: Tensor, scheme: Scheme | None) -> Codes | Tensor:
        """What is done where too few tokens came by: each weight's nearest code."""
        assert scheme is not None, f"{self.name} needs a scheme"
        return encode(weight_OD, find_grid(weight_OD, scheme), scheme)
