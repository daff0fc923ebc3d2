"""SwiGLU and GeGLU by cpu.cpp; host_library.py builds it. See reference.py for what they are."""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.gated_activation.reference import Activation
from ridgeline.kernels.host_library import function, rows_of, short_name

KINDS: dict[Activation | None, int] = {None: 0, "silu": 1, "gelu": 2, "gelu_tanh": 3}


def gated_activation(gate_up_T2F: Tensor, activation: Activation) -> Tensor:
    rows = rows_of(gate_up_T2F)
    size = rows.shape[1] // 2
    out = torch.empty((*gate_up_T2F.shape[:-1], size), dtype=rows.dtype)
    function("gated_activation", short_name(rows.dtype), "plpllii")(
        rows.data_ptr(),
        rows.stride(0),
        out.data_ptr(),
        rows.shape[0],
        size,
        KINDS[activation],
        torch.get_num_threads(),
    )
    return out


def silu_backward(gate_up_T2F: Tensor, grad_TF: Tensor, remakes: bool = False) -> Tensor:
    """The gradient for gate and up. With `remakes` **grad is overwritten** by the activation's
    result.
    """
    rows = rows_of(gate_up_T2F)
    assert grad_TF.is_contiguous(), "it may be overwritten"
    size = rows.shape[1] // 2
    out = torch.empty(gate_up_T2F.shape, dtype=rows.dtype)
    function("gated_activation", f"silu_gradient_{short_name(rows.dtype)}", "plppllii")(
        rows.data_ptr(),
        rows.stride(0),
        grad_TF.data_ptr(),
        out.data_ptr(),
        rows.shape[0],
        size,
        int(remakes),
        torch.get_num_threads(),
    )
    return out
