"""Products with 4-bit groups on a CPU, which are made in integers for x in bf16 where it can: as
near to the exact product as its own rounding, whatever the sizes and the outliers of x.
"""

from __future__ import annotations

import pytest
import torch
from kernel_checks import poisoned_memory
from torch import Tensor

from ridgeline.kernels import host_library
from ridgeline.kernels.quantized_linear.cpu import MAX_ROWS, HostProduct
from ridgeline.kernels.tolerance import check
from ridgeline.quantization.nearest import nearest
from ridgeline.quantization.scheme import parse_scheme

SCHEMES = ["int4-g32", "int4-g64", "int4-g128", "int4-g32-asym", "int4-g64-asym", "int4-g128-asym"]
DEPTHS = {32: (32, 96, 160, 544), 64: (64, 192, 576), 128: (128, 384)}  # in and out of 128
pytestmark = pytest.mark.skipif(host_library.find_compiler() is None, reason="no C++ compiler")


@pytest.fixture(scope="module", autouse=True)
def built() -> bool:
    return host_library.prepare()


def product_of(
    name: str, outputs: int, depth: int, dtype: torch.dtype
) -> tuple[HostProduct, Tensor]:
    """And the weight that its codes stand for, in fp64."""
    generator = torch.Generator().manual_seed(depth + outputs)
    weight_OD = torch.randn(outputs, depth, generator=generator) * depth**-0.5
    layer = nearest("a layer", weight_OD + 0.02, None, parse_scheme(name), dtype)
    return HostProduct(
        depth, dtype, layer.weight, layer.scale, layer.zero
    ), layer.decoded().double()


def inputs_of(rows: int, depth: int, dtype: torch.dtype) -> Tensor:
    """With a mean, so that zero points count, and columns that are far larger than the rest."""
    x = torch.randn(rows, depth, generator=torch.Generator().manual_seed(rows)) + 0.5
    x[:, 3::40] *= 60
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", SCHEMES)
def test_as_exact_as_the_result(name: str, dtype: torch.dtype) -> None:
    """Rows by fours, twos and ones; outputs that fill no vector."""
    for depth in DEPTHS[parse_scheme(name).group]:
        for rows, outputs in ((1, 16), (1, 37), (2, 5), (7, 33), (MAX_ROWS, 17)):
            product, weight_OD = product_of(name, outputs, depth, dtype)
            x_TD = inputs_of(rows, depth, dtype)
            exact = (x_TD.double() @ weight_OD.t()).to(dtype)
            with poisoned_memory():
                found = product(x_TD)
            check(found, exact, dtype, depth)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_what_is_no_number_stays_none(wrong: float) -> None:
    product, _ = product_of("int4-g64", 20, 192, torch.bfloat16)
    x_TD = inputs_of(3, 192, torch.bfloat16)
    x_TD[1, 77] = wrong
    found = product(x_TD)
    assert not found[1].isfinite().any()
    assert found[[0, 2]].isfinite().all()
    assert not product(x_TD[1:2]).isfinite().any()
    other, _ = product_of("int4-g64", 20, 64, torch.bfloat16)  # nothing of it is left behind
    assert other(inputs_of(1, 64, torch.bfloat16)).isfinite().all()


def test_zeros_and_small_numbers() -> None:
    product, weight_OD = product_of("int4-g32", 16, 64, torch.bfloat16)
    x_TD = torch.zeros(2, 64, dtype=torch.bfloat16)
    x_TD[1, ::2] = 1e-20
    found = product(x_TD).double()
    assert (found[0] == 0).all()
    torch.testing.assert_close(
        found[1], (x_TD.double() @ weight_OD.t())[1], rtol=2.0**-8, atol=1e-24
    )
