"""A projection whose weights stay in a GGUF file's blocks (block_scheme.py).

Where the C++ kernels were built, the blocks are held as panels, in the order in which they are
multiplied. The plain loop expands them for each product, which defines what is right;
`HostBlockLinear` (engine/loading/host_model.py puts it in) multiplies them as they are.

    layer = BlockLinear(codes, scheme, torch.float32)
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from ridgeline.formats.gguf_blocks import dequantize
from ridgeline.kernels import host_library
from ridgeline.kernels.block_linear import OP, PANEL
from ridgeline.kernels.block_linear.cpu import BlockMatrix, BlockProduct, expand, pack, panel_bytes
from ridgeline.kernels.block_linear.reference import block_linear
from ridgeline.kernels.gated_activation import Activation
from ridgeline.models.transformer import Fusion, RMSNorm, fused_parts
from ridgeline.quantization.block_scheme import BlockScheme
from ridgeline.quantization.linear import QuantizedLinear
from ridgeline.quantization.scheme import Codes


class BlockLinear(QuantizedLinear):
    """`dtype` is that of inputs and outputs."""

    scheme: BlockScheme

    def __init__(
        self, codes: Codes, scheme: BlockScheme, dtype: torch.dtype, bias_O: Tensor | None = None
    ) -> None:
        nn.Module.__init__(self)
        self.scheme, self.dtype, self.gives, self.inputs = scheme, dtype, None, None
        self.zero, self.copied_from = None, 0
        raw = codes.values.contiguous().flatten()
        self.out_features = sum(count for _, count in scheme.rows)
        self.in_features = _depth(scheme, raw.numel())
        self.packed = host_library.load(OP)
        if self.packed:
            raw = torch.cat(
                [
                    pack(part, kind, count, self.in_features)
                    for part, kind, count in _rows(raw, scheme, self.in_features, packed=False)
                ]
            )
        self.weight = nn.Parameter(raw, requires_grad=False)
        self.bias = bias_O if bias_O is None else nn.Parameter(bias_O, requires_grad=False)
        self.register_buffer("copy", None, persistent=False)

    def rows(self) -> list[tuple[Tensor, str, int]]:
        """The parts that are of one type: their bytes, the type, and how many outputs."""
        return _rows(self.weight, self.scheme, self.in_features, self.packed)

    def project(self, x_TD: Tensor, fusion: Fusion) -> Tensor:  # type: ignore[override]
        out_TO = fusion.out
        y_TO = block_linear(x_TD, self.decoded(), fused_parts(self.bias, fusion))
        return y_TO if out_TO is None else out_TO.copy_(y_TO)

    def decoded(self) -> Tensor:
        """The weight [O, D] that the blocks stand for, in fp32."""
        if self.packed:
            parts = [expand(*part, self.in_features) for part in self.rows()]
        else:
            parts = [
                dequantize(raw.numpy(), kind, (count, self.in_features))
                for raw, kind, count in self.rows()
            ]
        return torch.cat(parts)

    def keep_copy(self) -> None:
        """None is needed: many rows are multiplied as blocks too."""


class HostBlockLinear(BlockLinear):
    matrix: BlockMatrix | None = None
    made: tuple[BlockProduct, RMSNorm | None, Activation | None] | None = None

    def project(self, x_TD: Tensor, fusion: Fusion) -> Tensor:  # type: ignore[override]
        if not self.packed:
            return super().project(x_TD, fusion)
        norm, activation, residual_TO, out_TO = fusion
        y_TO = self._product(norm, activation)(x_TD, residual_TO)
        return y_TO if out_TO is None else out_TO.copy_(y_TO)

    def as_matrix(self) -> BlockMatrix:
        if self.matrix is None:
            self.matrix = BlockMatrix(self.rows(), self.in_features, self.bias)
        return self.matrix

    def _product(self, norm: RMSNorm | None, activation: Activation | None) -> BlockProduct:
        """A layer has one norm before it and one activation behind it, so one is kept."""
        if self.made is not None and self.made[1] is norm and self.made[2] == activation:
            return self.made[0]
        weight = None if norm is None else norm.weight
        eps, offset = (1e-6, 0.0) if norm is None else (norm.eps, norm.offset)
        product = BlockProduct(self.as_matrix(), weight, eps, offset, activation)
        self.made = (product, norm, activation)
        return product


def _depth(scheme: BlockScheme, num_bytes: int) -> int:
    """Columns of a matrix whose blocks take so many bytes; 256 are whole blocks of any type."""
    return num_bytes * 256 // scheme.num_bytes(256)


def _rows(
    values: Tensor, scheme: BlockScheme, depth: int, packed: bool
) -> list[tuple[Tensor, str, int]]:
    sizes = [
        -(-count // PANEL) * panel_bytes(kind, depth)
        if packed
        else BlockScheme("", "blocks", rows=((kind, count),)).num_bytes(depth)
        for kind, count in scheme.rows
    ]
    ends = torch.tensor([0, *sizes]).cumsum(0).tolist()
    parts = [values[start:end] for start, end in pairwise(ends)]
    return [(part, *row) for part, row in zip(parts, scheme.rows, strict=True)]
