"""A projection with quantized weights, which replaces a `Linear` of models/transformer.py, and how
it is put into a model.

Codes and scales are kept as kernels/quantized_linear reads them: 4-bit codes in packed words, on a
GPU int8 too. Where a scheme has 8-bit inputs, x is rounded to codes with one scale per token: by
the norm before the product, by the activation between an MLP's two products, or separately.

    codes = encode(weight_OD, find_grid(weight_OD, scheme), scheme)
    model = with_schemes(model, {"layers.0.mlp.down": (codes, scheme)})

Letters: T tokens, O outputs, D depth, G groups of the depth.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ridgeline.errors import UsageError, near_matches
from ridgeline.formats.packing import pack_int4, pack_int8
from ridgeline.kernels.dequantize import dequantize_packed
from ridgeline.kernels.dequantize.reference import dequantize
from ridgeline.kernels.gated_activation import gated_activation
from ridgeline.kernels.quantize_rows import quantize_rows
from ridgeline.kernels.quantized_linear import Operands, quantized_linear
from ridgeline.kernels.rms_norm import rms_norm
from ridgeline.kernels.skinny_linear.fused import FusedParts
from ridgeline.models import Transformer
from ridgeline.models.copies import with_kinds
from ridgeline.models.transformer import (
    DenseMLP,
    Fusion,
    Linear,
    Projection,
    RMSNorm,
    fused_parts,
    projected,
)
from ridgeline.quantization.scheme import BLOCK, Codes, Scheme

WORD_PIECE = 16  # int8 codes in a piece of packed words
# Products of fewer rows are bound by reading weights, so x stays in 16 bits where a kernel supports
# it: no rounding kernel, and no rounding error.
ROUNDED_FROM = 2
# From here on products with 16-bit inputs are bound by compute or by converting codes, and a copy
# of the weight in the model's dtype is faster, where there is one.
COPIED_FROM = 17


class CodedRows(NamedTuple):
    """The rounded output of one product, for a next product that takes codes."""

    codes: Tensor  # [T, D]
    scale: Tensor  # [T], or [T, D / 128]


class Stored(NamedTuple):
    weight: Tensor
    scale: Tensor
    zero: Tensor | None


class QuantizedLinear(Projection):
    """`dtype` is the model's: of inputs, outputs and the scales of groups."""

    weight: nn.Parameter
    scale: nn.Parameter
    zero: nn.Parameter | None
    bias: nn.Parameter | None
    gives: torch.dtype | None  # of the codes that the product after the activation takes
    copy: Tensor | None  # of the weight in the model's dtype, for many rows
    copied_from: int  # from this many rows on

    def __init__(
        self, codes: Codes, scheme: Scheme, dtype: torch.dtype, bias_O: Tensor | None = None
    ) -> None:
        super().__init__()
        self.scheme, self.dtype, self.gives = scheme, dtype, None
        self.out_features, self.in_features = codes.values.shape
        self.inputs = scheme.input_dtype
        stored = kernel_form(codes, scheme, dtype)
        self.weight = _constant(stored.weight)
        self.scale = _constant(stored.scale)
        self.zero = None if stored.zero is None else _constant(stored.zero)
        self.bias = None if bias_O is None else _constant(bias_O)
        self.register_buffer("copy", None, persistent=False)
        self.copied_from = COPIED_FROM

    def project(self, x_TD: Tensor | CodedRows, fusion: Fusion) -> Tensor | CodedRows:
        """As `Linear`: `activation(norm(x) @ weightᵀ + bias) + residual`."""
        norm, activation, residual_TO, out_TO = fusion
        if self.copy is not None and isinstance(x_TD, Tensor) and len(x_TD) >= self.copied_from:
            return projected(x_TD, self.copy, self.bias, fusion)
        if out_TO is not None:
            y_TO = self.project(x_TD, fusion._replace(out=None))
            assert isinstance(y_TO, Tensor), "codes cannot be written to out"
            return out_TO.copy_(y_TO)
        if isinstance(x_TD, Tensor) and self.takes_plain(x_TD):
            given = Operands(x_TD, self.weight, self.scale, self.zero)
            return quantized_linear(given, fused_parts(self.bias, fusion), x_TD.dtype)
        codes_TD, x_scale = x_TD if isinstance(x_TD, CodedRows) else self.rounded(x_TD, norm)
        gives = None if activation is None else self.gives
        assert gives is None or residual_TO is None, "codes have no residual"
        given = Operands(codes_TD, self.weight, self.scale, self.zero, x_scale)
        inner = activation if gives is None else None
        fused = FusedParts(self.bias, residual_TO, activation=inner)
        y_TO = quantized_linear(given, fused, self.dtype)
        if activation is None or gives is None:
            return y_TO
        return CodedRows(*gated_activation(y_TO, activation, gives))

    def keep_copy(self) -> None:
        """Hold the weight in the model's dtype too."""
        self.copy = self.decoded().to(self.dtype)

    def takes_plain(self, x_TD: Tensor) -> bool:
        """Whether x is multiplied without rounding. On a CPU it is rounded whatever the number of
        rows.
        """
        if self.inputs is None:
            return True
        few = x_TD.is_cuda and x_TD.numel() < ROUNDED_FROM * x_TD.shape[-1]
        return few and self.scheme.spread != "block"

    def rounded(self, x_TD: Tensor, norm: RMSNorm | None = None) -> CodedRows:
        """x, after its norm, as codes."""
        assert self.inputs is not None, f"{self.scheme.name} has no 8-bit inputs"
        if self.scheme.spread == "block":
            return quantize_blocks(x_TD if norm is None else norm(x_TD), self.inputs)
        if norm is None:
            return CodedRows(*quantize_rows(x_TD, self.inputs))
        codes_TD, scale_T = rms_norm(
            x_TD, norm.weight, norm.eps, norm.offset, quantized=self.inputs
        )
        return CodedRows(codes_TD, scale_T)

    def expanded(self, dtype: torch.dtype) -> Tensor:
        """The same in the model's dtype, in one pass where a GPU has packed codes."""
        if self.weight.dtype == torch.int32:
            return dequantize_packed(self.weight, self.scale, self.zero, self.in_features, dtype)
        return self.decoded().to(dtype)

    def decoded(self) -> Tensor:
        """The weight [O, D] that the codes stand for, in fp32."""
        return dequantize(self.weight, self.scale, self.zero, self.in_features)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.scheme.name}"


def _constant(tensor: Tensor) -> nn.Parameter:
    if isinstance(tensor, nn.Parameter):
        return tensor
    return nn.Parameter(tensor.contiguous(), requires_grad=False)


def kernel_form(codes: Codes, scheme: Scheme, dtype: torch.dtype) -> Stored:
    """As kernels/quantized_linear/reference.py lists the forms."""
    values_OD, (scale, zero) = codes.values, codes.grid
    if scheme.weight == "int4":
        zero_GO = None if zero is None else zero.t().contiguous()
        return Stored(pack_int4(values_OD), scale.t().to(dtype).contiguous(), zero_GO)
    if scheme.spread == "block":
        return Stored(values_OD, scale.contiguous(), None)
    # A tensor's scale is laid out for each output: products of many rows want that of x alike.
    scale_O = scale.flatten().expand(len(values_OD)).contiguous()
    in_words = scheme.weight == "int8" and scheme.inputs == "16-bit" and values_OD.is_cuda
    if in_words and values_OD.shape[1] % WORD_PIECE == 0:
        return Stored(pack_int8(values_OD), scale_O, None)
    return Stored(values_OD, scale_O, None)


def quantize_blocks(x_TD: Tensor, dtype: torch.dtype) -> CodedRows:
    """Codes with a scale for each 128 columns of a row."""
    codes, scale = quantize_rows(x_TD.unflatten(-1, (-1, BLOCK)), dtype)
    return CodedRows(codes.flatten(-2), scale.contiguous())


def keep_copies(model: nn.Module, copied_from: Mapping[tuple[int, int], int] | None = None) -> None:
    """Keep a copy of every layer whose inputs stay in 16 bits. `copied_from` says by shape from how
    many rows on the copy is used, where that is known.
    """
    for module in model.modules():
        if isinstance(module, QuantizedLinear) and module.inputs is None:
            module.keep_copy()
            shape = (module.out_features, module.in_features)
            module.copied_from = (copied_from or {}).get(shape, COPIED_FROM)


def quantizable(model: nn.Module) -> dict[str, Linear]:
    """A model's projections by name, without embedding, head, norms, routers and experts."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, Linear) and not name.endswith((".router", "head"))
    }


def schemes_of(model: nn.Module) -> dict[str, Scheme]:
    """Schemes of the quantized projections, by name."""
    layers = ((name, m) for name, m in model.named_modules() if isinstance(m, QuantizedLinear))
    return {name: module.scheme for name, module in layers}


def with_schemes(model: Transformer, changes: Mapping[str, tuple[Codes, Scheme]]) -> Transformer:
    """A copy of the model that shares all but the projections named, which have these codes."""
    known = quantizable(model)
    copy = with_kinds(model, lambda kind: kind)
    for name, (codes, scheme) in changes.items():
        if name not in known:
            raise UsageError(
                f"{name!r} is not a projection of the model that can be quantized"
                f"{near_matches(name, known)}"
            )
        plain = known[name]
        replace_layer(copy, name, QuantizedLinear(codes, scheme, plain.weight.dtype, plain.bias))
    return copy


def replace_layer(model: Transformer, name: str, layer: QuantizedLinear) -> None:
    """Replace a layer of the model, **in place**."""
    parent_name, _, own_name = name.rpartition(".")
    parent = model.get_submodule(parent_name)
    setattr(parent, own_name, layer)
    if isinstance(parent, DenseMLP):
        first, second = parent.gate_up, parent.down
        if isinstance(first, QuantizedLinear):
            first.gives = _wanted_codes(first, second)


def _wanted_codes(first: QuantizedLinear, second: nn.Module) -> torch.dtype | None:
    """The codes that an MLP's second product takes from the activation, with one scale per row."""
    if first.inputs is None or not isinstance(second, QuantizedLinear):
        return None
    return None if second.scheme.spread == "block" else second.inputs
