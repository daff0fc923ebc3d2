"""Packed weights with many rows on the GPU, at the sizes of Llama-3.1-8B's projections."""

from __future__ import annotations

import pytest
import torch
from kernel_checks import check_packed_linear

from ridgeline.kernels.quantized_linear.op import (
    W4A16,
    W4A16_64,
    W8A16,
    QuantizedForm,
    case,
)

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
    check_packed_linear(tried, CUDA)
