"""AdamW by cpu.cpp, for what it has: weights, moments and gradients in fp32. host_library.py builds
it; who trains on a CPU calls `prepare`. The bits are the reference's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.adamw.state import AdamWState
from ridgeline.kernels.host_library import function, is_loaded


def serves(state: AdamWState, grad: Tensor) -> bool:
    tensors = (state.weight, state.first, state.second, grad)
    return is_loaded() and all(each.dtype == torch.float32 and each.is_cpu for each in tensors)


def update(state: AdamWState, grad: Tensor, floats: Tensor, factor: float, lost: Tensor) -> None:
    """One tensor, in place; `floats` are the step's (fp32), `lost` is added to (int64)."""
    function("adamw", "fp32", "pppplpfpi")(
        state.weight.data_ptr(),
        state.first.data_ptr(),
        state.second.data_ptr(),
        grad.data_ptr(),
        grad.numel(),
        floats.data_ptr(),
        factor,
        lost.data_ptr(),
        torch.get_num_threads(),
    )
