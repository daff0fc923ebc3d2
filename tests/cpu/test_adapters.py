"""LoRA against a plain reference: the same model with `W + scale · B A` in place of its weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from packed import BATCHES, FP32, TINY, tiny
from torch import Tensor, nn

from ridgeline.errors import UsageError
from ridgeline.models import Transformer
from ridgeline.models.families import describe_hf
from ridgeline.models.transformer import Linear
from ridgeline.quantization.linear import QuantizedLinear, quantizable, with_schemes
from ridgeline.quantization.scheme import encode, find_grid, parse_scheme
from ridgeline.training.config import TrainConfig
from ridgeline.training.methods.adapters import (
    AdaptedLinear,
    adapters_of,
    add_adapters,
    base_weight,
)
from ridgeline.training.methods.options import LoraOptions
from ridgeline.training.naive import naive_loss
from ridgeline.training.stepping import gradient_products
from ridgeline.training.stepping.ops import KERNELS, TrainingOps
from ridgeline.training.stepping.step import Trainer

RANK, ALPHA = 3, 12.0
LORA = LoraOptions(rank=RANK, alpha=ALPHA)


def description(**changes: Any) -> Any:
    return describe_hf(TINY | changes, origin="tiny")


def coded(model: Transformer, name: str) -> Transformer:
    scheme = parse_scheme(name)
    weights = {name: layer.weight.detach() for name, layer in quantizable(model).items()}
    fitting = {key: weight for key, weight in weights.items() if scheme.fits(*weight.shape)}
    assert fitting
    return with_schemes(
        model,
        {
            key: (encode(weight, find_grid(weight, scheme), scheme), scheme)
            for key, weight in fitting.items()
        },
    )


def with_adapters(
    model: Transformer, options: LoraOptions = LORA, **changes: Any
) -> dict[str, nn.Parameter]:
    """Adapters that say something: their second matrices are not zero."""
    learned = add_adapters(model, description(**changes), options, seed=1)
    generator = torch.Generator().manual_seed(2)
    for name, parameter in learned.items():
        if ".up." in name:
            parameter.data.normal_(0.0, 0.2, generator=generator)
    return learned


class Merged(Linear):
    """The definition: one plain matrix, made of the base's and the adapter's."""

    def __init__(self, layer: AdaptedLinear) -> None:
        nn.Module.__init__(self)
        delta = torch.zeros(layer.base.out_features, layer.base.in_features)
        for piece, down, up in layer.pairs():
            delta[piece.rows] = layer.scale * (up @ down)
        self.made = base_weight(layer.base, torch.float32) + delta
        self.own_bias = layer.base.bias

    def project(self, x_TD: Tensor, fusion: Any) -> Tensor:
        from ridgeline.models.transformer import projected

        return projected(x_TD, self.made, self.own_bias, fusion)


def reference_gradients(
    model: Transformer, learned: dict[str, nn.Parameter]
) -> tuple[float, dict[str, Tensor]]:
    """Of a copy whose projections are `W + scale · B A`, by autograd."""
    from ridgeline.models.copies import with_kinds

    copy = with_kinds(model, lambda kind: kind)
    for name, layer in adapters_of(model).items():
        parent, _, own = name.rpartition(".")
        setattr(copy.get_submodule(parent), own, Merged(layer))
    for module in list(copy.modules()):
        for own, child in list(module.named_children()):
            if isinstance(child, QuantizedLinear):
                plain = Linear(child.in_features, child.out_features, bias=False)
                plain.weight, plain.bias = nn.Parameter(child.decoded(), False), child.bias
                setattr(module, own, plain)
    loss = naive_loss(copy, BATCHES)
    gradients = torch.autograd.grad(loss, list(learned.values()))
    return loss.item(), dict(zip(learned, gradients, strict=True))


def check_gradients(
    model: Transformer,
    config: TrainConfig = FP32,
    ops: TrainingOps | None = None,
    options: LoraOptions = LORA,
    **changes: Any,
) -> None:
    learned = with_adapters(model, options, **changes)
    loss, expected = reference_gradients(model, learned)
    got_loss, count, got = Trainer(model, config, learned, ops=ops).gradients(BATCHES)
    assert count == 44
    assert got_loss == pytest.approx(loss, abs=1e-5)
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, atol=1e-5, rtol=1e-4, msg=name)
        assert gradient.abs().max() > 1e-4, name


@pytest.mark.sweep(keep=2)
@pytest.mark.parametrize("recomputation", ["none", "elementwise", "attention", "blocks"])
def test_the_gradients_of_adapters(recomputation: Any) -> None:
    check_gradients(tiny(), replace(FP32, recomputation=recomputation))


@pytest.mark.parametrize("scheme", ["int8", "int4-g32", "int4-g32-asym", "fp8", "w8a8-int8"])
def test_the_gradients_through_codes(scheme: str) -> None:
    check_gradients(coded(tiny(intermediate_size=64), scheme), intermediate_size=64)


@pytest.mark.parametrize(
    "changes", [{"model_type": "qwen2"}, {"model_type": "qwen3"}], ids=["biases", "q-norms"]
)
def test_the_gradients_of_other_families(changes: dict[str, Any]) -> None:
    check_gradients(tiny(**changes), **changes)


def test_the_gradients_by_kernels() -> None:
    """The passes that a GPU runs, through Triton's interpreter."""
    check_gradients(tiny(), replace(FP32, recomputation="elementwise"), KERNELS)


def test_some_projections_alone() -> None:
    """q and v of a product of three, and the rest frozen as it is."""
    model = tiny()
    check_gradients(model, options=replace(LORA, targets="q_proj, v_proj"))
    assert {name.rpartition(".")[2] for name in adapters_of(model)} == {"qkv"}
    with pytest.raises(UsageError, match=r"'q_poj'.*q_proj"):
        add_adapters(tiny(), description(), replace(LORA, targets="q_poj"), seed=0)


def test_a_new_adapter_changes_nothing() -> None:
    model = tiny()
    before = naive_loss(model, BATCHES).item()
    learned = add_adapters(model, description(), LORA, seed=0)
    assert Trainer(model, FP32, learned).gradients(BATCHES)[0] == pytest.approx(before, abs=1e-6)


def test_the_base_has_no_gradients_and_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """No weight-gradient products but the adapters' own, nothing kept for frozen weights."""
    shapes: list[tuple[int, ...]] = []
    plain = gradient_products.product

    def counted(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
        shapes.append((left.shape[0], right.shape[1]))
        return plain(left, right, bias)

    monkeypatch.setattr(gradient_products, "product", counted)
    model = tiny()
    base = {name: value.clone() for name, value in model.named_parameters()}
    learned = with_adapters(model)
    trainer = Trainer(model, FP32, learned)
    trainer.step(BATCHES[:1], lr=1e-2)
    assert shapes
    assert all(RANK in shape or 3 * RANK in shape or 2 * RANK in shape for shape in shapes)
    assert set(trainer.weights.states) == set(learned)
    now = dict(model.named_parameters())
    for name, before in base.items():
        kept = now.get(name)
        if kept is None:
            owner, _, own = name.rpartition(".")
            kept = now[f"{owner}.base.{own}"]
        assert kept.grad is None
        assert not kept.requires_grad
        assert torch.equal(kept, before), name


def test_frozen_codes_are_made_once() -> None:
    """With fp8 products the optimizer's step forgets the codes of what it changed alone."""
    from ridgeline.training.stepping.fp8 import Fp8Weights

    frozen, learned = nn.Parameter(torch.randn(16, 16), False), nn.Parameter(torch.randn(16, 16))
    weights = Fp8Weights()
    first, second = weights.codes(frozen, "tensor"), weights.codes(learned, "tensor")
    weights.forget()
    assert weights.codes(frozen, "tensor") is first
    assert weights.codes(learned, "tensor") is not second


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_other_precisions_learn(precision: Any) -> None:
    model = tiny()
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    model = model.to(dtype)
    learned = add_adapters(model, description(), LORA, seed=0)
    trainer = Trainer(model, replace(FP32, precision=precision), learned)
    losses = [trainer.step(BATCHES, lr=3e-2).loss for _ in range(8)]
    assert losses[-1] < losses[0] - 0.3
