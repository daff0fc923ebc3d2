"""Products of few rows by cpu.cpp, where they are faster than torch's: with bf16 weights where the
processor has matrix tiles, and in registers where torch's products of few rows are slow. Any number
of rows is right. host_library.py builds it. Letters as in reference.py, and F outputs: O, or half
of it behind an activation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ridgeline.kernels.gated_activation.cpu import KINDS
from ridgeline.kernels.host_library import address, function, is_loaded, rows_of, short_name
from ridgeline.kernels.skinny_linear.fused import NOTHING_FUSED, FusedParts
from ridgeline.products import few_rows_are_slow

DEPTH, SIDE = 32, 16  # of a tile: the depth, and half of the outputs, are multiples

# Up to how many rows torch's product is slower (Xeon with AMX, 1 thread, 2026-11-15: tiles take 0.6
# to 0.8 of its time at 32 rows, as much at 128, 1.3 to 1.6 at 512).
MOST_IN_TILES = 127
MOST_IN_REGISTERS = 32  # Neoverse-N1, 2 threads, 2026-11-16: 0.8 of its time at 32, 1.0 at 64


@cache
def has_tiles() -> bool:
    """Asked once the library is loaded."""
    return function("skinny_linear", "tiles", "")() == 1


def _in_tiles(dtype: torch.dtype, num_outputs: int, depth: int) -> bool:
    fits = depth % DEPTH == 0 and num_outputs % (2 * SIDE) == 0
    return dtype == torch.bfloat16 and fits and has_tiles()


@cache
def _product(dtype: torch.dtype, num_outputs: int, depth: int) -> Callable[..., Any]:
    """The function for such a weight: found once, called 100 times a step."""
    name = "tiles_bf16" if _in_tiles(dtype, num_outputs, depth) else short_name(dtype)
    return function("skinny_linear", name, "plppplpffipllli")


def most_rows(weight_OD: Tensor) -> int:
    """Up to how many rows of x this is the faster product; 0 where it never is."""
    if not (is_loaded() and weight_OD.is_contiguous()):
        return 0
    if _in_tiles(weight_OD.dtype, *weight_OD.shape):
        return MOST_IN_TILES
    return MOST_IN_REGISTERS if few_rows_are_slow(weight_OD.dtype) else 0


def skinny_linear(x_MD: Tensor, weight_OD: Tensor, fused: FusedParts = NOTHING_FUSED) -> Tensor:
    """As the reference, but that the norm is rms_norm's: x is rounded when it is normed. The
    weight's rows lie side by side.
    """
    bias_O, residual_MO, norm_weight_D, eps, offset, activation = fused
    rows = rows_of(x_MD)
    depth = weight_OD.shape[1]
    num_outputs = weight_OD.shape[0] // (1 if activation is None else 2)
    out_MF = torch.empty((*x_MD.shape[:-1], num_outputs), dtype=x_MD.dtype)
    residual = None if residual_MO is None else rows_of(residual_MO)
    _product(weight_OD.dtype, *weight_OD.shape)(
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
