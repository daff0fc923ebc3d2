"""Packed weights with many rows: dequantized a piece at a time, then multiplied."""

from __future__ import annotations

import pytest
import torch
from kernel_checks import check_packed_linear, make_inputs

from ridgeline.kernels.dequantize import triton as dequantize
from ridgeline.kernels.dequantize.op import OP
from ridgeline.kernels.quantized_linear import many_rows
from ridgeline.kernels.quantized_linear.op import (
    W4A16,
    W4A16_64,
    W8A16,
    QuantizedForm,
    case,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("form", "extras", "activation", "pieces"),
    [
        (W8A16, "norm bias", "silu", 1),
        (W8A16, "residual", None, 2),
        (W4A16, "", None, 1),
        (W4A16, "norm bias", "gelu", 3),
        (W4A16_64, "bias residual", None, 2),
    ],
)
def test_it_is_the_product_of_the_reference(
    form: QuantizedForm,
    extras: str,
    activation: str | None,
    pieces: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(many_rows, "dequantize_packed", dequantize.dequantize_packed)
    shape = (70, 160, 384)
    if pieces > 1:  # of 128 outputs, the last one shorter
        monkeypatch.setattr(many_rows, "MAX_COPY_BYTES", 1)
    tried = case(form, shape, torch.float16, extras, activation)  # type: ignore[arg-type]
    check_packed_linear(tried, CPU)


def test_a_piece_of_the_outputs_is_what_it_is_in_the_whole() -> None:
    tried = next(c for c in OP.small_cases if "zeros" in c.label and "40x" in c.label)
    inputs = make_inputs(tried, CPU)
    whole = OP.reference(**inputs)
    piece = slice(8, 29)
    cut = {
        **inputs,
        "weight_OW": inputs["weight_OW"][piece],
        "scale": inputs["scale"][:, piece],
        "zero_GO": inputs["zero_GO"][:, piece],
    }
    out = torch.full((21, 496), float("nan"), dtype=torch.bfloat16)[:, :480]
    found = dequantize.dequantize_packed(**cut, out_OD=out)
    assert found is out
    assert torch.equal(found, whole[piece])
