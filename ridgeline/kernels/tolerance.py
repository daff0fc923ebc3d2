"""How far a kernel may be from its reference: one table, by output dtype and length of the
reduction.

An output is rounded once to its dtype, and each of the n partial sums before it to fp32; the error
of a sum of n rounded terms grows like sqrt(n). `check` holds the relative error of the whole (the
norm) to that, and each element to a few times it, so that a single wrong element is seen.
"""

from __future__ import annotations

import math

import torch

# Half a unit in the last place, relative: what one rounding may cost.
ROUNDING = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.bfloat16: 2.0**-9,
    torch.float16: 2.0**-12,
    torch.float8_e4m3fn: 2.0**-4,
    torch.float8_e4m3fnuz: 2.0**-4,
    torch.float8_e5m2: 2.0**-3,
    torch.int8: 2.0**-7,
}
PER_ELEMENT = 8.0  # a single element may be off by this many times the norm's bound


def bound(dtype: torch.dtype, reduction: int) -> float:
    """Allowed ‖out − ref‖ / ‖ref‖."""
    accumulated = 4 * ROUNDING[torch.float32] * math.sqrt(max(reduction, 1))
    return 1.5 * ROUNDING[dtype] + accumulated


def check(out: torch.Tensor, reference: torch.Tensor, dtype: torch.dtype, reduction: int) -> None:
    """Raise AssertionError, with the figures, where `out` is not `reference` within the table."""
    assert out.shape == reference.shape, f"shape {tuple(out.shape)}, not {tuple(reference.shape)}"
    assert out.dtype == reference.dtype, f"dtype {out.dtype}, not {reference.dtype}"
    found, expected = out.double().cpu(), reference.double().cpu()
    assert torch.equal(found.isnan(), expected.isnan()), "NaN where none should be, or the reverse"
    infinite = expected.isinf()
    assert torch.equal(found[infinite], expected[infinite]), "infinities differ"
    keep = ~(expected.isnan() | infinite)
    found, expected = found[keep], expected[keep]
    if not expected.numel():
        return
    allowed = bound(dtype, reduction)
    error = (found - expected).abs()
    scale = expected.square().mean().sqrt()
    relative = (error.square().mean().sqrt() / scale.clamp(min=1e-30)).item()
    assert relative <= allowed, f"relative error {relative:.2e}, allowed {allowed:.2e}"
    worst = (error / (expected.abs() + scale).clamp(min=1e-30)).max().item()
    limit = PER_ELEMENT * allowed
    assert worst <= limit, f"an element is off by {worst:.2e} of its size, allowed {limit:.2e}"
