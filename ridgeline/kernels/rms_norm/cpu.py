"""RMSNorm by cpu.cpp; host_library.py builds it. See reference.py for what it is."""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.host_library import address, function, rows_of, short_name


def rms_norm(
    x_TD: Tensor,
    weight_D: Tensor,
    eps: float,
    offset: float = 0.0,
    residual_TD: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """bf16, fp16 or fp32, x and weight alike; with a residual also the sum."""
    assert weight_D.dtype == x_TD.dtype, f"x in {x_TD.dtype}, weight in {weight_D.dtype}"
    rows = rows_of(x_TD)
    out = torch.empty(x_TD.shape, dtype=x_TD.dtype)
    residual, total = None, None
    if residual_TD is not None:
        residual, total = rows_of(residual_TD), torch.empty_like(out)
    function("rms_norm", short_name(x_TD.dtype), "plplpffpplli")(
        rows.data_ptr(),
        rows.stride(0),
        address(residual),
        0 if residual is None else residual.stride(0),
        weight_D.contiguous().data_ptr(),
        eps,
        offset,
        out.data_ptr(),
        address(total),
        rows.shape[0],
        rows.shape[1],
        torch.get_num_threads(),
    )
    return out if total is None else (out, total)


def rms_norm_backward(
    hidden_TD: Tensor,
    weight_D: Tensor,
    grad_TD: Tensor,
    eps: float,
    offset: float = 0.0,
    grad_hidden_TD: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Gradients for what was normed, of which `grad_hidden_TD` is a part, and for the weight."""
    hidden, grad = rows_of(hidden_TD).contiguous(), rows_of(grad_TD)
    added = None if grad_hidden_TD is None else rows_of(grad_hidden_TD).contiguous()
    threads = torch.get_num_threads()
    out = torch.empty(hidden_TD.shape, dtype=hidden.dtype)
    sums = torch.zeros(threads, hidden.shape[1])
    function("rms_norm", f"gradient_{short_name(hidden.dtype)}", "ppplpffpplli")(
        hidden.data_ptr(),
        weight_D.contiguous().data_ptr(),
        grad.data_ptr(),
        grad.stride(0),
        address(added),
        eps,
        offset,
        out.data_ptr(),
        sums.data_ptr(),
        hidden.shape[0],
        hidden.shape[1],
        threads,
    )
    return out, sums.sum(0).to(weight_D.dtype)
