"""The definition of the gated activations, in fp32 whatever the input's dtype. Letters: T tokens, F
MLP size.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor
from torch.nn import functional

Activation = Literal["silu", "gelu", "gelu_tanh"]


def gated_activation(gate_up_T2F: Tensor, activation: Activation) -> Tensor:
    """`act(gate) · up`, where gate is the first half of each row and up the second."""
    gate, up = gate_up_T2F.float().chunk(2, dim=-1)
    if activation == "silu":
        activated = functional.silu(gate)
    elif activation == "gelu":
        activated = functional.gelu(gate)
    else:
        activated = functional.gelu(gate, approximate="tanh")
    return (activated * up).to(gate_up_T2F.dtype)
