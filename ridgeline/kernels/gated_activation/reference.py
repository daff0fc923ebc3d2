"""The definition of the gated activations, in fp32 or in fp64. Letters: T tokens, F MLP size."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from ridgeline.formats.scaling import quantize_rows

Activation = Literal["silu", "gelu", "gelu_tanh"]


def gated_activation(
    gate_up_T2F: Tensor, activation: Activation, quantized: torch.dtype | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """`act(gate) · up`, where gate is the first half of each row and up the second.

    Returns the result in the input's dtype, or with `quantized` its 8-bit codes and one scale a
    row, made from the fp32 product.
    """
    wide = torch.promote_types(gate_up_T2F.dtype, torch.float32)
    gate, up = gate_up_T2F.to(wide).chunk(2, dim=-1)
    if activation == "silu":
        activated = functional.silu(gate)
    elif activation == "gelu":
        activated = functional.gelu(gate)
    else:
        activated = functional.gelu(gate, approximate="tanh")
    out_TF = activated * up
    return out_TF.to(gate_up_T2F.dtype) if quantized is None else quantize_rows(out_TF, quantized)
