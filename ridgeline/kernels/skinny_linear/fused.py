"""What is folded into a product of few rows, before it and after it: the norm, bias, activation and
residual that skinny_linear and quantized_linear take, as one value.

    few_rows("plain", x, weight, FusedParts(residual_MO=residual), x.dtype)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from ridgeline.kernels.gated_activation.reference import Activation


class FusedParts(NamedTuple):
    """See reference.py."""

    bias_O: Tensor | None = None  # [2O] with an activation
    residual_MO: Tensor | None = None
    norm_weight_D: Tensor | None = None
    eps: float = 1e-6
    offset: float = 0.0  # of the norm's weight
    activation: Activation | None = None

    @property
    def gated(self) -> bool:
        """The weight then has gate rows and up rows."""
        return self.activation is not None


NOTHING_FUSED = FusedParts()


def split_fused(inputs: Mapping[str, Any]) -> tuple[FusedParts, dict[str, Any]]:
    """A product's arguments by name, as what is folded in and the rest."""
    names = FusedParts._fields
    rest = {name: value for name, value in inputs.items() if name not in names}
    return FusedParts(**{name: inputs[name] for name in names if name in inputs}), rest
