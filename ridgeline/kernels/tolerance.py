"""How far a kernel may be from its reference: one table, by output dtype and length of the
reduction.

An output is rounded once to its dtype, and each of the n partial sums before it to fp32; the error
of a sum of n rounded terms grows like sqrt(n). `check` holds the relative error of the whole (the
norm) to that, and each element to a few times it, so that a single wrong element is seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

# Half a unit in the last place, relative: what one rounding costs at most (about half of it in the
# mean over many).
ROUNDING = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
    torch.float8_e4m3fn: 2.0**-4,
    torch.float8_e4m3fnuz: 2.0**-4,
    torch.float8_e5m2: 2.0**-3,
    torch.int8: 2.0**-7,
}
PIECE = 1 << 26  # elements compared at a time
PER_ELEMENT = 8.0  # a single element may be off by this many times the norm's bound


def bound(dtype: torch.dtype, reduction: int, roundings: int = 1) -> float:
    """Allowed ‖out − ref‖ / ‖ref‖; independent roundings to `dtype` add up like their root."""
    accumulated = 4 * ROUNDING[torch.float32] * math.sqrt(max(reduction, 1))
    return 0.75 * ROUNDING[dtype] * math.sqrt(roundings) + accumulated


def check(
    out: torch.Tensor,
    reference: torch.Tensor,
    dtype: torch.dtype,
    reduction: int,
    roundings: int = 1,
) -> None:
    """Raise AssertionError, with the figures, where `out` is not `reference` within the table."""
    assert out.shape == reference.shape, f"shape {tuple(out.shape)}, not {tuple(reference.shape)}"
    assert out.dtype == reference.dtype, f"dtype {out.dtype}, not {reference.dtype}"
    allowed = bound(dtype, reduction, roundings)
    limit = PER_ELEMENT * allowed
    error_square = reference_square = worst = 0.0
    for actual, expected in pieces(out, reference):
        assert torch.equal(actual.isnan(), expected.isnan()), "NaN where none should be, or not"
        infinite = expected.isinf()
        assert torch.equal(actual[infinite], expected[infinite]), "infinities differ"
        keep = ~(expected.isnan() | infinite)
        actual, expected = actual.where(keep, 0.0), expected.where(keep, 0.0)
        error = (actual - expected).abs()
        error_square += error.square().sum().item()
        reference_square += expected.square().sum().item()
        # An element's size is its own or its row's: a small one is a sum of larger terms.
        row_size = expected.square().mean(-1, keepdim=True).sqrt()
        sizes = (expected.abs() + row_size).clamp(min=1e-30)
        worst = max(worst, (error / sizes).max().item())
    relative = math.sqrt(error_square / max(reference_square, 1e-60))
    assert relative <= allowed, f"relative error {relative:.2e}, allowed {allowed:.2e}"
    assert worst <= limit, f"an element is off by {worst:.2e} of its size, allowed {limit:.2e}"


def pieces(
    out: torch.Tensor, reference: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Both as fp64 rows, a piece at a time: fp64 copies of two billion elements fit nowhere."""
    columns = out.shape[-1] if out.dim() > 1 else min(out.numel(), PIECE)
    if not out.numel():
        return
    whole = out.numel() // columns * columns
    flat, flat_reference = out.reshape(-1), reference.reshape(-1)
    rows, reference_rows = (x[:whole].view(-1, columns) for x in (flat, flat_reference))
    step = max(1, PIECE // columns)
    for start in range(0, rows.shape[0], step):
        place = slice(start, start + step)
        yield rows[place].double(), reference_rows[place].double().to(out.device)
    if whole < out.numel():
        yield flat[None, whole:].double(), flat_reference[None, whole:].double().to(out.device)
