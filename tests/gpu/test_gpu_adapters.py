"""Adapters and rounded weights on a GPU, in bf16 and fp8, against the step in fp32 on a CPU."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from packed import FP32, TINY, draw, pack, tiny
from torch import Tensor

from ridgeline.data.loading.packing import PackedBatch
from ridgeline.models.copies import on_device
from ridgeline.models.families import describe_hf
from ridgeline.quantization.linear import quantizable, with_schemes
from ridgeline.quantization.scheme import encode, find_grid, parse_scheme
from ridgeline.training.methods.adapters import add_adapters
from ridgeline.training.methods.options import LoraOptions
from ridgeline.training.methods.rounded import found_roundings
from ridgeline.training.stepping.precision import has_fp8
from ridgeline.training.stepping.step import Trainer

SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256}
BATCH = pack(*draw(64, 32, 32))


def there(batch: PackedBatch) -> PackedBatch:
    values = {entry.name: getattr(batch, entry.name) for entry in fields(batch)}
    moved = {key: x.cuda() if isinstance(x, Tensor) else x for key, x in values.items()}
    return PackedBatch(**moved)


def gradients(device: str, precision: Any, scheme: str | None) -> tuple[float, dict[str, Tensor]]:
    model = tiny(**SIZES)
    if scheme is not None:
        chosen = parse_scheme(scheme)
        weights = {name: layer.weight.detach() for name, layer in quantizable(model).items()}
        codes = {n: encode(w, find_grid(w, chosen), chosen) for n, w in weights.items()}
        model = with_schemes(model, {name: (each, chosen) for name, each in codes.items()})
    model = on_device(model, device)
    if precision != "fp32":
        for module in model.modules():
            for name, value in list(module._parameters.items()):
                if value is not None and value.dtype == torch.float32 and name != "scale":
                    value.data = value.data.bfloat16()
    learned = add_adapters(model, describe_hf(TINY | SIZES, origin="tiny"), LoraOptions(4), seed=1)
    generator = torch.Generator().manual_seed(2)
    for name, parameter in learned.items():
        if ".up." in name:
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator).to(device)
    trainer = Trainer(model, replace(FP32, precision=precision), learned)
    loss, _, made = trainer.gradients([BATCH if device == "cpu" else there(BATCH)])
    return loss, {name: value.cpu() for name, value in made.items()}


@pytest.mark.parametrize("precision", ["bf16", "fp8", "fp8-row"])
@pytest.mark.parametrize("scheme", [None, "int4-g64", "int8", "fp8"])
def test_adapters(precision: Any, scheme: str | None) -> None:
    if precision != "bf16" and not has_fp8("cuda"):
        pytest.skip("no fp8 here")
    loss, expected = gradients("cpu", "fp32", scheme)
    got_loss, got = gradients("cuda", precision, scheme)
    assert got_loss == pytest.approx(loss, abs=0.05)
    for name, gradient in expected.items():
        alike = torch.cosine_similarity(got[name].flatten(), gradient.flatten(), dim=0)
        assert alike > (0.98 if precision == "bf16" else 0.9), name


def test_rounded_weights() -> None:
    results = []
    for device, precision in (("cpu", "fp32"), ("cuda", "bf16")):
        model = on_device(tiny(**SIZES), device)  # drawn on a GPU they would be other weights
        rounded = found_roundings(model, parse_scheme("int4-g64"), None)
        trainer = Trainer(model, replace(FP32, precision=precision), rounded=rounded)  # type: ignore[arg-type]
        results.append(trainer.gradients([BATCH if device == "cpu" else there(BATCH)]))
    (loss, _, expected), (got_loss, _, got) = results
    assert got_loss == pytest.approx(loss, abs=0.05)
    for name, gradient in expected.items():
        alike = torch.cosine_similarity(got[name].cpu().flatten(), gradient.flatten(), dim=0)
        assert alike > 0.95, name
