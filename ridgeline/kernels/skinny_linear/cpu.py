"""Products with bf16 weights by cpu.cpp, where the processor has matrix tiles; host_library.py
builds it. For any number of rows. Letters as in reference.py, and F outputs: O, or half of it
behind an activation.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from ridgeline.kernels.gated_activation.cpu import KINDS
from ridgeline.kernels.gated_activation.reference import Activation
from ridgeline.kernels.host_library import address, function, is_loaded, rows_of

DEPTH, SIDE = 32, 16  # of a tile: the depth, and half of the outputs, are multiples


@cache
def _has_tiles() -> bool:
    return function("skinny_linear", "ready", "")() == 1


def supported(weight_OD: Tensor) -> bool:
    num_outputs, depth = weight_OD.shape
    fits = depth % DEPTH == 0 and num_outputs % (2 * SIDE) == 0 and weight_OD.is_contiguous()
    return weight_OD.dtype == torch.bfloat16 and fits and is_loaded() and _has_tiles()


def skinny_linear(
    x_MD: Tensor,
    weight_OD: Tensor,
    bias_O: Tensor | None = None,
    residual_MO: Tensor | None = None,
    norm_weight_D: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    activation: Activation | None = None,
) -> Tensor:
    """As the reference, but that the norm is rms_norm's: x is rounded when it is normed. `weight`
    is one that is `supported`.
    """
    rows = rows_of(x_MD)
    depth = weight_OD.shape[1]
    num_outputs = weight_OD.shape[0] // (1 if activation is None else 2)
    out_MF = torch.empty((*x_MD.shape[:-1], num_outputs), dtype=x_MD.dtype)
    residual = None if residual_MO is None else rows_of(residual_MO)
    function("skinny_linear", "bf16", "plppplpffipllli")(
        rows.data_ptr(),
        rows.stride(0),
        weight_OD.data_ptr(),
        address(bias_O),
        address(residual),
        0 if residual is None else residual.stride(0),
        address(norm_weight_D),
        eps,
        offset,
        KINDS[activation],
        out_MF.data_ptr(),
        rows.shape[0],
        depth,
        num_outputs,
        torch.get_num_threads(),
    )
    return out_MF
