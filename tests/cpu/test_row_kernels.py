"""What kernels that work row by row share: cheap activations and roundings, ways to hold rows."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl
from torch.nn import functional

from ridgeline.formats.scaling import quantize_rows
from ridgeline.kernels.gated_activation import tune_space as gated
from ridgeline.kernels.gated_activation.activations import activate, gate_shares, gate_slope
from ridgeline.kernels.rms_norm import tune_space as norm
from ridgeline.kernels.rows import to_codes
from ridgeline.kernels.targets import TARGETS

KINDS = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}
SIZE = 4096


@triton.jit
def activate_kernel(x_ptr, out_ptr, slope_ptr, KIND: tl.constexpr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.arange(0, SIZE)
    x = tl.load(x_ptr + place)
    tl.store(out_ptr + place, activate(x, KIND))
    share, rest = gate_shares(x, KIND)
    tl.store(slope_ptr + place, gate_slope(x, share, rest, KIND))


@triton.jit
def codes_kernel(x_ptr, out_ptr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.arange(0, SIZE)
    tl.store(out_ptr + place, to_codes(tl.load(x_ptr + place), tl.int8))


def run_activation(x: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    out, slope = torch.empty_like(x), torch.empty_like(x)
    activate_kernel[(1,)](x, out, slope, kind, SIZE)
    return out, slope


@pytest.mark.parametrize("kind", KINDS)
def test_activations_are_as_exact_as_fp32_allows(kind: str) -> None:
    x = torch.cat([torch.linspace(-12, 12, SIZE - 128), torch.logspace(-8, 4, 128)])
    out, slope = run_activation(x, kind)
    exact = x.double().requires_grad_()
    expected = KINDS[kind](exact)
    (gradient,) = torch.autograd.grad(expected.sum(), exact)
    size = x.abs().double().clamp(min=1e-30)
    assert ((out - expected).abs() / size).max() < 3e-7
    assert (slope - gradient).abs().max() < 4e-7


@pytest.mark.parametrize("kind", KINDS)
def test_activations_keep_what_is_not_a_number(kind: str) -> None:
    x = torch.zeros(SIZE)
    x[:3] = torch.tensor([math.nan, math.inf, 3e38])
    out, _ = run_activation(x, kind)
    assert out[0].isnan()
    assert out[1:3].tolist() == x[1:3].tolist()
    assert out[3:].eq(0).all()


def test_halves_go_up_as_formats_has_it() -> None:
    halves = torch.arange(-254, 255) / 2
    near = torch.cat([halves - 2.0**-10, halves + 2.0**-10])
    x = torch.zeros(SIZE)
    x[: 3 * len(halves)] = torch.cat([halves, near]).clamp(-127, 127)
    out = torch.empty(SIZE, dtype=torch.int8)
    codes_kernel[(1,)](x, out, SIZE)
    expected, scale = quantize_rows(x[None], torch.int8)
    assert scale.item() == 1.0
    assert torch.equal(out, expected[0])


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
@pytest.mark.parametrize("columns", [4096, 5120, 8192, 14336, 28672])
def test_ways_to_hold_rows_fit_the_chip(columns: int, target: str) -> None:
    chip = TARGETS[target]
    for config in gated.search_space(columns, 2, chip):
        covered = gated.num_pieces(config, columns) * config.width
        assert columns <= covered <= 1.5 * columns
        assert covered // (config.num_warps * chip.warp_size) <= 64
        programs = max(config.per_unit, 1)
        assert programs * gated.fetched_bytes(config, columns, 2) <= chip.shared_bytes
    ways = norm.search_space(columns, 2, chip)
    assert len(ways) == len(set(ways)) > 0
    assert all(1 <= way.num_warps <= 16 for way in ways)


def test_choices_are_measured_for_many_rows_only() -> None:
    assert norm.tune_key(16, 4096, torch.bfloat16, True, None) is None
    assert norm.tune_key(8192, 4096, torch.bfloat16, True, torch.int8) == (
        "bf16 4096 residual to int8"
    )
    assert gated.tune_key(16, 14336, torch.bfloat16, "silu", torch.int8) is None
    key = gated.tune_key(8192, 14336, torch.bfloat16, "silu", torch.int8)
    assert key == "bf16 14336 silu to int8"


@pytest.mark.parametrize("columns", [1, 63, 2048, 2049, 14336, 32768])
def test_the_heuristic_covers_every_row(columns: int) -> None:
    for chip in TARGETS.values():
        config = gated.heuristic(columns, 4, chip)
        assert gated.num_pieces(config, columns) <= gated.MAX_PIECES
        assert config.num_stages == 1 or config.per_unit > 0
