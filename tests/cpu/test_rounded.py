"""Training with rounded weights, with pruned ones, and from a teacher, against the plain loop over
a model whose weights *are* the rounded ones: straight through, the gradients are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from packed import BATCHES, FP32, tiny
from torch import Tensor, nn

from ridgeline.data.loading.packing import IGNORED
from ridgeline.errors import UnsupportedError, UsageError
from ridgeline.models import Transformer
from ridgeline.quantization.linear import quantizable
from ridgeline.quantization.methods.sparsity import parse_sparsity
from ridgeline.quantization.scheme import Scheme, decode, encode, find_grid, parse_scheme
from ridgeline.training.config import TrainConfig
from ridgeline.training.documents import PackedDocuments
from ridgeline.training.methods.options import DistillOptions, LoraOptions, QatOptions
from ridgeline.training.methods.rounded import SCALE, RoundedWeights, Rounding, found_roundings
from ridgeline.training.naive import naive_gradients, naive_loss
from ridgeline.training.stepping import distillation
from ridgeline.training.stepping.distillation import divergence
from ridgeline.training.stepping.ops import KERNELS
from ridgeline.training.stepping.step import Trainer

SIZES = {"intermediate_size": 64}  # groups of 32 fit


def rounded_to(weight_OD: Tensor, scheme: Scheme) -> Tensor:
    return decode(encode(weight_OD, find_grid(weight_OD, scheme), scheme), scheme)


def with_weights(change: Callable[[Tensor], Tensor]) -> Transformer:
    """The same small model with other weights in the projections of its layers."""
    model = tiny(**SIZES)
    for linear in quantizable(model).values():
        linear.weight.data = change(linear.weight.data)
    return model


@pytest.mark.parametrize("name", ["int8", "int4-g32", "int4-g32-asym"])
@pytest.mark.parametrize("recomputation", ["none", "blocks"])
def test_the_gradients_of_rounded_weights(name: str, recomputation: Any) -> None:
    scheme = parse_scheme(name)
    reference = with_weights(lambda weight: rounded_to(weight, scheme))
    expected, loss = naive_gradients(reference, BATCHES), naive_loss(reference, BATCHES).item()
    model = tiny(**SIZES)
    trainer = Trainer(
        model,
        replace(FP32, recomputation=recomputation),
        rounded=found_roundings(model, scheme, None),
    )
    got_loss, _, got = trainer.gradients(BATCHES)
    assert got_loss == pytest.approx(loss, abs=1e-6)
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, atol=1e-5, rtol=1e-5, msg=name)
    plain = naive_loss(tiny(**SIZES), BATCHES).item()
    assert abs(plain - loss) > 1e-5, "rounding does nothing here"


def test_the_gradients_by_kernels() -> None:
    scheme = parse_scheme("int4-g32")
    reference = with_weights(lambda weight: rounded_to(weight, scheme))
    model = tiny(**SIZES)
    rounded = found_roundings(model, scheme, None)
    _, _, got = Trainer(model, FP32, ops=KERNELS, rounded=rounded).gradients(BATCHES)
    for name, gradient in naive_gradients(reference, BATCHES).items():
        torch.testing.assert_close(got[name], gradient, atol=1e-5, rtol=1e-5, msg=name)


def test_the_rounded_form_follows_the_weights() -> None:
    model, scheme = tiny(**SIZES), parse_scheme("int4-g32")
    trainer = Trainer(model, FP32, rounded=found_roundings(model, scheme, None))
    losses = [trainer.step(BATCHES, lr=5e-3).loss for _ in range(12)]
    assert losses[-1] < losses[0] - 0.5
    now = trainer.gradients(BATCHES)[0]
    saved = tiny(**SIZES)
    saved.load_state_dict(model.state_dict())
    for linear in quantizable(saved).values():  # as `quantize --method rtn` does it
        linear.weight.data = rounded_to(linear.weight.data, scheme)
    assert naive_loss(saved, BATCHES).item() == pytest.approx(now, abs=1e-5)


def learned_scales(model: Transformer, scheme: Scheme) -> RoundedWeights:
    """Grids a little too small, so that some weights are beyond their range."""
    return RoundedWeights(
        {
            f"{name}.weight": Rounding(
                linear.weight,
                scheme,
                nn.Parameter(find_grid(linear.weight.data, scheme).scale * 0.8),
                find_grid(linear.weight.data, scheme).zero,
            )
            for name, linear in quantizable(model).items()
        }
    )


@pytest.mark.parametrize("name", ["int8", "int4-g32", "int4-g32-asym"])
def test_the_gradients_of_scales(name: str) -> None:
    """By autograd through `scale · (round(w / scale) with the gradient of w / scale)`, clamped."""
    scheme, model = parse_scheme(name), tiny(**SIZES)
    rounded = learned_scales(model, scheme)
    learned = dict(model.named_parameters()) | rounded.scales()
    _, _, got = Trainer(model, FP32, learned, rounded=rounded).gradients(BATCHES)
    reference = tiny(**SIZES)
    low, high = {"int8": (-127.0, 127.0)}.get(name, (0.0, 15.0))
    for key, linear in quantizable(reference).items():
        rounding = rounded.roundings[f"{key}.weight"]
        assert rounding.scale is not None
        scale = rounding.scale.detach().clone().requires_grad_()
        zero = 8.0 if rounding.zero is None else rounding.zero.float()
        zero = 0.0 if name == "int8" else zero
        parts = linear.weight.detach().unflatten(1, (scale.shape[1], -1))
        place = parts / scale[..., None]
        code = place + ((place + 0.5).floor() - place).detach()
        start = zero[..., None] if isinstance(zero, Tensor) else zero
        value = ((code + start).clamp(low, high) - start) * scale[..., None]
        upstream = got[f"{key}.weight"]
        (expected,) = torch.autograd.grad(value.flatten(1), scale, upstream)
        torch.testing.assert_close(
            got[f"{key}.weight{SCALE}"], expected, atol=1e-5, rtol=1e-4, msg=key
        )


@pytest.mark.parametrize("scheme", [None, "int4-g32"])
def test_pruned_weights_stay_zero(scheme: str | None) -> None:
    sparsity = parse_sparsity("2:4")
    model = with_weights(lambda weight: weight.masked_fill(sparsity.mask(weight.abs()), 0.0))
    zeros = {name: layer.weight.data == 0 for name, layer in quantizable(model).items()}
    parsed = None if scheme is None else parse_scheme(scheme)
    rounded = found_roundings(model, parsed, sparsity)
    trainer = Trainer(model, FP32, rounded=rounded)
    losses = [trainer.step(BATCHES, lr=5e-3).loss for _ in range(6)]
    assert losses[-1] < losses[0] - 0.1
    for name, layer in quantizable(model).items():
        assert torch.equal(layer.weight.data == 0, zeros[name]), name
    with pytest.raises(UsageError, match=r"sparsity is 2:4.*prune"):
        found_roundings(tiny(**SIZES), parsed, sparsity)


def test_the_gradients_of_the_divergence(monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks of five rows, with rows that do not count, a soft-cap, and a mixture of losses."""
    monkeypatch.setattr(distillation, "CHUNK_LOGITS", 5 * 131)
    teacher = with_weights(lambda weight: weight * 1.3)
    for share in (1.0, 0.25):
        reference = tiny(**SIZES)
        reference.requires_grad_(True)
        sums, count = [], 0
        for batch in BATCHES:
            hidden, wanted = (
                model(batch.ids, PackedDocuments(batch.positions, batch.starts))
                for model in (reference, teacher)
            )
            counted = batch.targets != IGNORED
            count += int(counted.sum())
            logits = reference.logits(hidden)[counted]
            with torch.no_grad():
                wanted_logits = teacher.logits(wanted)[counted]
            targets = batch.targets[counted].long()
            own = nn.functional.cross_entropy(logits, targets, reduction="sum")
            sums.append(share * divergence(logits, wanted_logits) + (1 - share) * own)
        loss = torch.stack(sums).sum() / count
        names = dict(reference.named_parameters())
        expected = dict(zip(names, torch.autograd.grad(loss, list(names.values())), strict=True))
        config = replace(FP32, distill=DistillOptions("x", share))
        trainer = Trainer(tiny(**SIZES), config, teacher=teacher)
        got_loss, _, got = trainer.gradients(BATCHES)
        assert got_loss == pytest.approx(loss.item(), abs=1e-6)
        for name, gradient in expected.items():
            torch.testing.assert_close(got[name], gradient, atol=1e-5, rtol=1e-4, msg=name)


def test_a_model_is_its_own_best_pupil() -> None:
    trainer = Trainer(tiny(), replace(FP32, distill=DistillOptions("x")), teacher=tiny())
    loss, _, gradients = trainer.gradients(BATCHES)
    assert loss == pytest.approx(0.0, abs=1e-6)
    assert max(each.abs().max().item() for each in gradients.values()) < 1e-6


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: QatOptions("w8a8-int8"), "rounds inputs too"),
        (lambda: QatOptions("int5"), "int5"),
        (lambda: QatOptions(sparsity="3"), "sparsity '3'"),
        (lambda: DistillOptions("demo", 1.5), "distill_weight is 1.5"),
        (lambda: TrainConfig(qat=QatOptions("int8"), lora=LoraOptions(4)), "--lora"),
        (lambda: TrainConfig(qat=QatOptions("int8"), precision="fp8"), "--precision bf16"),
    ],
)
def test_orders_that_make_no_sense(make: Callable[[], Any], line: str) -> None:
    with pytest.raises(UsageError, match=line):
        make()


def test_what_cannot_be_trained_rounded() -> None:
    with pytest.raises(UsageError, match="fits none"):
        found_roundings(tiny(hidden_size=48, intermediate_size=48, head_dim=12),
                        parse_scheme("int4-g128"), None)  # fmt: skip
    model = tiny()
    layers = tuple(replace(layer, experts=object()) for layer in model.config.layers)
    model.config = replace(model.config, layers=layers)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="experts"):
        found_roundings(model, parse_scheme("int8"), None)
