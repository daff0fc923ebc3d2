"""Quantization-aware training: layers that compute with rounded weights (and inputs, where the
scheme rounds them) and whose gradients pass as if nothing had been rounded.

The copy shares its parameters with the model, so an optimizer trains the model itself towards
weights that round well. The same layers, with `weights=False`, show what rounding inputs costs.

Letters: T tokens, D depth, O outputs, E experts.

    trained = fake_quantized(model, parse_scheme("int4-g64"))
    loss = loss_of(trained(tokens_T, sequences)); loss.backward()
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ridgeline.kernels.gated_activation import gated_activation
from ridgeline.kernels.moe import mixture_of_experts, route
from ridgeline.models import Transformer
from ridgeline.models.copies import with_kinds
from ridgeline.models.transformer import ExpertMLP, Fusion, Linear, RMSNorm
from ridgeline.products import linear
from ridgeline.quantization.scheme import Scheme, decode, encode, find_grid
from ridgeline.quantization.statistics import round_inputs


def straight_through(value: Tensor, rounded: Tensor) -> Tensor:
    """`rounded`, with the gradient of `value`."""
    return value + (rounded.to(value.dtype) - value).detach()


def fake_quantize(weight_OD: Tensor, scheme: Scheme) -> Tensor:
    """What the weights would be after rounding to nearest."""
    with torch.no_grad():
        decoded_OD = decode(encode(weight_OD, find_grid(weight_OD, scheme), scheme), scheme)
    return straight_through(weight_OD, decoded_OD)


def fake_quantize_inputs(x_TD: Tensor, scheme: Scheme) -> Tensor:
    with torch.no_grad():
        rounded_TD = round_inputs(x_TD, scheme)
    return straight_through(x_TD, rounded_TD)


class FakeQuantLinear(Linear):
    """A linear's parameters, with rounding around their product."""

    def __init__(self, linear: nn.Linear, scheme: Scheme, weights: bool = True) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.scheme, self.rounds_weights = scheme, weights

    def project(self, x_TD: Tensor, fusion: Fusion) -> Tensor:
        norm, activation, residual_TO, out_TO = fusion
        assert out_TO is None, "only the head's result has a place of its own"
        x_TD = fake_quantize_inputs(x_TD if norm is None else norm(x_TD), self.scheme)
        weight_OD = fake_quantize(self.weight, self.scheme) if self.rounds_weights else self.weight
        y_TO = linear(x_TD, weight_OD, self.bias)
        if activation is not None:
            y_TO = gated_activation(y_TO, activation)
        return y_TO if residual_TO is None else residual_TO + y_TO


class FakeQuantExperts(ExpertMLP):
    """Experts with rounded weights. Of their inputs, those of gate and up are rounded; those of
    down arise inside the expert pass and are not.
    """

    scheme: Scheme
    rounds_weights: bool

    def forward(self, x_TD: Tensor, norm: RMSNorm, residual_TD: Tensor | None = None) -> Tensor:
        x_TD = norm(x_TD)
        weights_TA, experts_TA = route(self.router(x_TD), self.experts_per_token, self.renormalize)
        x_TD = fake_quantize_inputs(x_TD, self.scheme)
        gate_up, down = self._rounded(self.gate_up), self._rounded(self.down)
        out_TD = mixture_of_experts(x_TD, weights_TA, experts_TA, gate_up, down, self.activation)
        return out_TD if residual_TD is None else residual_TD + out_TD

    def _rounded(self, stacked_EOD: Tensor) -> Tensor:
        if not self.rounds_weights:
            return stacked_EOD
        return torch.stack([fake_quantize(weight_OD, self.scheme) for weight_OD in stacked_EOD])


def fake_quantized(model: Transformer, scheme: Scheme, *, weights: bool = True) -> Transformer:
    """A copy of the model that shares its parameters and rounds in every block; matrices that the
    scheme does not fit, routers, embeddings and the head stay.
    """
    copy = with_kinds(model, lambda kind: FakeQuantExperts if kind is ExpertMLP else kind)
    for module in list(copy.layers.modules()):
        if isinstance(module, FakeQuantExperts):
            module.scheme, module.rounds_weights = scheme, weights and _fit(module, scheme)
        for name, child in list(module.named_children()):
            if type(child) is Linear and name != "router" and scheme.fits(*_size(child)):
                setattr(module, name, FakeQuantLinear(child, scheme, weights))
    return copy


def _size(linear: nn.Linear) -> tuple[int, int]:
    return linear.out_features, linear.in_features


def _fit(experts: ExpertMLP, scheme: Scheme) -> bool:
    shapes = (experts.gate_up.shape, experts.down.shape)
    return all(scheme.fits(shape[1], shape[2]) for shape in shapes)
