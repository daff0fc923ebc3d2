"""Schemes: names, grids, codes and back."""

from __future__ import annotations

import pytest
import torch

from ridgeline.errors import UsageError
from ridgeline.quantization.scheme import decode, encode, find_grid, in_parts, parse_scheme

NAMES = ["int8", "int4-g32", "int4-g64", "int4-g128", "int4-g64-asym", "w8a8-int8"]
NAMES += ["fp8", "fp8-tensor", "fp8-block"]


def weight(outputs: int = 256, depth: int = 384) -> torch.Tensor:
    return torch.randn(outputs, depth, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", NAMES)
def test_codes_are_the_nearest(name: str) -> None:
    """No value is further from its weight than half a step of its grid, the clipped ones apart."""
    scheme, weight_OD = parse_scheme(name), weight()
    grid = find_grid(weight_OD, scheme)
    codes = encode(weight_OD, grid, scheme)
    error = (decode(codes, scheme) - weight_OD).abs()
    if scheme.weight == "fp8":
        allowed = (weight_OD.abs() / 16).clamp(min=1e-6) + grid.scale.max() * 2**-9
    else:
        allowed = in_parts(torch.ones_like(weight_OD), scheme) * grid.scale[:, None, :, None] / 2
        allowed = allowed.reshape(weight_OD.shape)
    assert (error <= allowed * 1.0001).all()
    assert error.square().mean() > 0


@pytest.mark.parametrize("name", NAMES)
def test_what_is_on_the_grid_stays(name: str) -> None:
    scheme = parse_scheme(name)
    codes = encode(weight(), find_grid(weight(), scheme), scheme)
    again = encode(decode(codes, scheme), codes.grid, scheme)
    assert torch.equal(again.values.float(), codes.values.float())


def test_shapes_of_scales() -> None:
    sizes = {name: tuple(find_grid(weight(), parse_scheme(name)).scale.shape) for name in NAMES}
    assert sizes["int8"] == sizes["w8a8-int8"] == sizes["fp8"] == (256, 1)
    assert sizes["fp8-tensor"] == (1, 1)
    assert sizes["fp8-block"] == (2, 3)
    assert sizes["int4-g64"] == sizes["int4-g64-asym"] == (256, 6)


def test_rows_of_zeros_and_of_one_sign() -> None:
    for name in NAMES:
        scheme = parse_scheme(name)
        flat = torch.zeros(128, 128)
        assert not decode(encode(flat, find_grid(flat, scheme), scheme), scheme).any()
    scheme, ones = parse_scheme("int4-g32-asym"), torch.full((1, 32), 3.0)
    assert decode(encode(ones, find_grid(ones, scheme), scheme), scheme).allclose(ones)


def test_what_is_refused() -> None:
    for name in ("int4-g16", "int3", "fp4", "INT8", "int8-g128"):
        with pytest.raises(UsageError):
            parse_scheme(name)
    with pytest.raises(UsageError, match="does not divide into parts"):
        find_grid(weight(4, 100), parse_scheme("int4-g64"))
    assert not parse_scheme("int4-g128").fits(4, 576)
    assert parse_scheme("int4-g64").fits(4, 576)
    assert not parse_scheme("fp8-block").fits(100, 128)
