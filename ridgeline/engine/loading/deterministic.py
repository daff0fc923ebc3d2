"""`Recipe(deterministic=True)`: a model whose rows do not know of each other, bit for bit.

`deterministic(model)` is the same model, on the same weights, with every part whose sums could
depend on the number of rows replaced by one whose sums do not: projections, norms, experts. The
given model stays as it is. Attention is the sequences' (fixed_attention.py). What stays is per
element or per row already: embeddings, residuals, rotary angles, sampling.

    runner.passes.model = deterministic(model)         # applied from outside, as quantization is
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ridgeline.errors import UnsupportedError
from ridgeline.kernels.fixed_linear import fixed_linear
from ridgeline.kernels.fixed_linear.agreement import tiles_agree
from ridgeline.kernels.fixed_linear.host import (
    BLOCK,
    activated,
    block_for,
    check_functions,
    in_blocks,
)
from ridgeline.kernels.moe import route
from ridgeline.kernels.rms_norm import reference as norm_reference
from ridgeline.kernels.skinny_linear.fused import FusedParts
from ridgeline.models import Transformer
from ridgeline.models.copies import with_kinds
from ridgeline.models.transformer import (
    Attention,
    Block,
    DenseMLP,
    ExpertMLP,
    Fusion,
    Linear,
    RMSNorm,
)
from ridgeline.parallel.inference.stages import AroundRing, HandedOn, TakenOver
from ridgeline.parallel.inference.tensor import (
    RowExperts,
    RowLinear,
    RowSum,
    VocabEmbedding,
    VocabHead,
    VocabParts,
)
from ridgeline.products import linear


def deterministic(model: Transformer, one_tile: bool | None = None) -> Transformer:
    """A copy that shares the model's weights. `one_tile`: see kernels/fixed_linear; where it is not
    given, the chip is asked.
    """
    device, dtype = model.embed.weight.device, model.embed.weight.dtype
    if device.type == "cpu":
        check_functions()
    elif one_tile is None:
        one_tile = not tiles_agree(device, dtype)
    copy = with_kinds(model, _kind_of)
    if one_tile and any(isinstance(module, FixedExperts) for module in copy.modules()):
        raise UnsupportedError(
            "deterministic needs tiles that give the same bits for a mixture of experts, and this "
            "chip's do not; leave --deterministic out"
        )
    for module in copy.modules():
        if isinstance(module, FixedLinear):
            module.one_tile = bool(one_tile)
    return copy


def _kind_of(kind: type[nn.Module]) -> type[nn.Module]:
    if kind not in REPLACED:
        raise UnsupportedError(
            f"deterministic is not known to hold for {kind.__name__} layers; leave "
            "--deterministic out, or use a model that is not quantized"
        )
    return REPLACED[kind]


class FixedNorm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu":
            return in_blocks(self._defined, BLOCK, x)
        from ridgeline.kernels.rms_norm import triton

        out = triton.rms_norm(x, self.weight, self.eps, self.offset, fixed=True)
        assert isinstance(out, Tensor), "no codes were asked for"
        return out

    def _defined(self, x: Tensor) -> Tensor:
        out = norm_reference.rms_norm(x, self.weight, self.eps, self.offset)
        assert isinstance(out, Tensor), "no codes were asked for"
        return out


class FixedLinear(Linear):
    one_tile = False

    def project(self, x_TD: Tensor, fusion: Fusion) -> Tensor:
        """`activation(norm(x) @ weightᵀ + bias) + residual`, in this order on every device."""
        norm, activation, residual_TO, out_TO = fusion
        if norm is not None:
            x_TD = norm(x_TD)
        if x_TD.device.type != "cpu":
            fused = FusedParts(self.bias, residual_TO, activation=activation)
            return fixed_linear(x_TD, self.weight, fused, self.one_tile, out_TO)
        if out_TO is not None:
            return out_TO.copy_(self.project(x_TD, Fusion(None, activation, residual_TO)))
        y_TO = in_blocks(_product(self.weight, self.bias), block_for(self.weight), x_TD)
        if activation is not None:
            y_TO = activated(y_TO, activation)
        return y_TO if residual_TO is None else residual_TO + y_TO


class FixedExperts(ExpertMLP):
    def forward(self, x_TD: Tensor, norm: RMSNorm, residual_TD: Tensor | None = None) -> Tensor:
        x_TD = norm(x_TD)
        logits_TE = self.router(x_TD)
        out_TD = (self._on_cpu if x_TD.device.type == "cpu" else self._on_gpu)(x_TD, logits_TE)
        return out_TD if residual_TD is None else residual_TD + out_TD

    def _on_gpu(self, x_TD: Tensor, logits_TE: Tensor) -> Tensor:
        from ridgeline.kernels.moe import triton

        weights, experts = triton.route(logits_TE, self.experts_per_token, self.renormalize)
        own = self.own_numbers(experts)
        return triton.mixture_of_experts(
            x_TD,
            weights,
            own,
            self.gate_up,
            self.down,
            self.activation,
            fixed=True,
            is_part=self.is_part,
        )

    def _on_cpu(self, x_TD: Tensor, logits_TE: Tensor) -> Tensor:
        """The definition's loop over experts, each with its rows in blocks."""

        def routed(which: int) -> Tensor:
            count, renormalize = self.experts_per_token, self.renormalize
            return in_blocks(lambda rows: route(rows, count, renormalize)[which], BLOCK, logits_TE)

        weights_TA, experts_TA = routed(0), self.own_numbers(routed(1))
        out_TD = torch.zeros_like(x_TD, dtype=torch.float32)
        for expert in experts_TA.unique().tolist():
            if expert == len(self.down):
                continue  # another rank's
            tokens, slots = torch.where(experts_TA == expert)
            gate_up, down = self.gate_up[expert], self.down[expert]
            inner = in_blocks(_product(gate_up), block_for(gate_up), x_TD[tokens])
            inner = activated(inner, self.activation)
            made = in_blocks(_product(down), block_for(down), inner).float()
            out_TD = out_TD.index_add(0, tokens, made * weights_TA[tokens, slots].unsqueeze(1))
        return out_TD.to(x_TD.dtype)


class FixedAroundRing(AroundRing, FixedNorm):
    pass


class FixedRowLinear(RowSum, FixedLinear):
    pass


class FixedVocabHead(VocabParts, FixedLinear):
    pass


class FixedRowExperts(RowExperts, FixedExperts):
    pass


def _product(weight_OD: Tensor, bias_O: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    return lambda x_BD: linear(x_BD, weight_OD, bias_O)


# Exactly these: a subclass (a quantized projection) may sum in another way. Ranks add their parts
# in their order (`Group.in_order`); of an embedding and of logits there is one part, and no sum.
REPLACED: dict[type[nn.Module], type[nn.Module]] = {
    RMSNorm: FixedNorm,
    AroundRing: FixedAroundRing,
    Linear: FixedLinear,
    ExpertMLP: FixedExperts,
    RowLinear: FixedRowLinear,
    VocabHead: FixedVocabHead,
    RowExperts: FixedRowExperts,
    **{kind: kind for kind in (Transformer, Block, Attention, DenseMLP)},
    **{kind: kind for kind in (nn.Embedding, VocabEmbedding, nn.ModuleList)},
    **{kind: kind for kind in (TakenOver, HandedOn)},
}
