"""Products with blocks by cpu.cpp, for any number of rows; `host_library.load("block_linear")`
comes first. Panels are the file's blocks in the order in which they are multiplied (panels.h).

    panels = pack(raw, "Q4_1", num_outputs, depth)
    product = BlockProduct(BlockMatrix([(panels, "Q4_1", num_outputs)], depth))
    y_MO = product(x_MD, residual_MO)
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from ridgeline.kernels.block_linear import MOST_PARTS, OP, PANEL, TYPES
from ridgeline.kernels.gated_activation.cpu import KINDS
from ridgeline.kernels.gated_activation.reference import Activation
from ridgeline.kernels.host_library import address, function

Rows = tuple[Tensor, str, int]  # panels, their type, and how many outputs they have


class _Part(ctypes.Structure):
    """As panels.h has it."""

    _fields_ = (("panels", c_void_p), *((n, c_int64) for n in ("outputs", "panel_bytes", "format")))


class _Matrix(ctypes.Structure):
    _fields_ = (
        ("parts", _Part * MOST_PARTS),
        *((name, c_int64) for name in ("num_parts", "depth", "outputs")),
        ("bias", c_void_p),
    )


class _Product(ctypes.Structure):
    _fields_ = (
        ("matrix", c_void_p),
        ("norm", c_void_p),
        ("eps", c_float),
        ("offset", c_float),
        ("activation", c_int32),
    )


def panel_bytes(kind: str, depth: int) -> int:
    return int(function(OP, "panel_bytes", "il")(TYPES[kind], depth))


def pack(raw: Tensor, kind: str, num_outputs: int, depth: int) -> Tensor:
    """A file's bytes of so many outputs, as panels."""
    assert raw.is_contiguous(), "blocks lie one after the other"
    panels = torch.zeros(-(-num_outputs // PANEL) * panel_bytes(kind, depth), dtype=torch.uint8)
    threads = torch.get_num_threads()
    run = function(OP, "pack", "ipllpi")
    run(TYPES[kind], raw.data_ptr(), num_outputs, depth, panels.data_ptr(), threads)
    return panels


def expand(panels: Tensor, kind: str, num_outputs: int, depth: int) -> Tensor:
    """The weights [O, D] in fp32."""
    out_OD = torch.empty(num_outputs, depth)
    run = function(OP, "expand", "ipllpi")
    threads = torch.get_num_threads()
    run(TYPES[kind], panels.data_ptr(), num_outputs, depth, out_OD.data_ptr(), threads)
    return out_OD


class BlockMatrix:
    """A matrix as the kernels take it: `address` stays good as long as this is held."""

    def __init__(self, rows: Sequence[Rows], depth: int, bias_O: Tensor | None = None) -> None:
        bias_O = None if bias_O is None else bias_O.float().contiguous()
        self._held = (*(panels for panels, _, _ in rows), bias_O)
        self.depth, self.num_outputs = depth, sum(count for _, _, count in rows)
        parts = (_Part * MOST_PARTS)(
            *(
                _Part(panels.data_ptr(), count, panel_bytes(kind, depth), TYPES[kind])
                for panels, kind, count in rows
            )
        )
        self._matrix = _Matrix(parts, len(rows), depth, self.num_outputs, address(bias_O))
        self.address = ctypes.addressof(self._matrix)


class BlockProduct:
    """`act(rounded(norm(x)) @ weightᵀ + bias) + residual`, as reference.py has it; fp32 inside."""

    def __init__(
        self,
        matrix: BlockMatrix,
        norm_weight_D: Tensor | None = None,
        eps: float = 1e-6,
        offset: float = 0.0,
        activation: Activation | None = None,
    ) -> None:
        norm_weight_D = None if norm_weight_D is None else norm_weight_D.float().contiguous()
        self._held = (matrix, norm_weight_D)
        self.num_outputs = matrix.num_outputs // (1 if activation is None else 2)
        self._product = _Product(
            matrix.address, address(norm_weight_D), eps, offset, KINDS[activation]
        )
        self._address = ctypes.addressof(self._product)
        self._run = function(OP, "multiply", "pplplpli")

    def __call__(self, x_MD: Tensor, residual_MO: Tensor | None = None) -> Tensor:
        x = x_MD.float()
        x = x if x.stride(1) == 1 else x.contiguous()
        residual = None if residual_MO is None else residual_MO.float().contiguous()
        out_MO = torch.empty(x.shape[0], self.num_outputs)
        self._run(
            self._address,
            x.data_ptr(),
            x.stride(0),
            address(residual),
            self.num_outputs,
            out_MO.data_ptr(),
            x.shape[0],
            torch.get_num_threads(),
        )
        return out_MO.to(x_MD.dtype)
