"""Packed weights with many rows on the GPU, at the sizes of Llama-3.1-8B's projections."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_checks import make_inputs, poisoned_memory

from ridgeline.kernels.agreement import compare
from ridgeline.kernels.quantized_linear import many_rows
from ridgeline.kernels.quantized_linear.op import (
    W4A16,
    W4A16_64,
    W8A16,
    QuantizedForm,
    case,
    define,
)
from ridgeline.kernels.skinny_linear.fused import split_fused

CUDA = torch.device("cuda")


@pytest.mark.parametrize("form", [W8A16, W4A16, W4A16_64], ids=lambda form: form.name)
@pytest.mark.parametrize("rows", [65, 1000])
@pytest.mark.parametrize(
    ("shape", "extras", "activation"),
    [((4096, 14336), "bias residual", None), ((14336, 4096), "norm", "silu")],
)
def test_it_is_the_product_of_the_reference(
    form: QuantizedForm, rows: int, shape: tuple[int, int], extras: str, activation: str | None
) -> None:
    tried = case(form, (rows, *shape), torch.bfloat16, extras, activation)  # type: ignore[arg-type]
    inputs = make_inputs(tried, CUDA)
    reference = define(**inputs)
    inputs["weight_OW"], inputs["scale"] = inputs.pop("weight"), inputs.pop("weight_scale")
    with poisoned_memory():
        fused, rest = split_fused(inputs)
        found = many_rows.packed_linear(**rest, fused=fused)
    # The norm's result, the weights, the product and the activation are each rounded.
    compare(found, reference, replace(tried, roundings=6))
