"""Whether a kernel's outputs are its reference's: one definition, for tests and `kernels check`.

Floats are held to the tolerance table, integers must be equal, and 8-bit codes may differ where a
value lies on the edge between two.

    compare(op.launch(**inputs), op.reference(**same_inputs), case)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.formats.scaling import LARGEST
from ridgeline.kernels.op import Case, outputs
from ridgeline.kernels.tolerance import bound, check, pieces


def compare(result: Any, reference: Any, case: Case) -> None:
    """Raise AssertionError, with the figures, where they do not agree."""
    results, expected = outputs(result), outputs(reference)
    assert len(results) == len(expected), f"{len(results)} outputs, not {len(expected)}"
    quantized = any(ref.dtype in LARGEST for ref in expected)
    for out, ref in zip(results, expected, strict=True):
        if ref.dtype in LARGEST:
            compare_codes(out, ref, case)
        elif not out.is_floating_point():
            assert torch.equal(out, ref.to(out.device)), "integers differ"
        else:  # beside codes, what is fp32 is their scales
            scales = quantized and ref.dtype == torch.float32
            dtype = torch.float32 if scales else case.dtype
            check(out, ref, dtype, case.reduction, case.roundings)


def compare_codes(out: Tensor, ref: Tensor, case: Case) -> None:
    """8-bit codes may differ where a value lies on the edge of two: rarely, and by one step."""
    assert out.dtype == ref.dtype, f"dtype {out.dtype}, not {ref.dtype}"
    assert out.shape == ref.shape, f"shape {tuple(out.shape)}, not {tuple(ref.shape)}"
    num_different = 0
    for results, expected in pieces(out, ref):
        step = expected.abs() / 8 if out.dtype != torch.int8 else torch.ones_like(expected)
        far = ~((results - expected).abs() <= step.clamp(min=2.0**-9) + 1e-9)
        assert not far.any(), far_codes(results, expected, far)
        num_different += int((results != expected).sum())
    # The edge is as wide as the error of the value: a code's step is 1/127 or 1/16 of it.
    allowed = 0.002 + 256 * bound(torch.float32, case.reduction)
    share = num_different / max(out.numel(), 1)
    assert share <= allowed, f"{share:.4f} of the codes differ"


def far_codes(results: Tensor, expected: Tensor, far: Tensor) -> str:
    """How many codes are more than a step off, and where the first of them is."""
    row, column = far.nonzero()[0].tolist()
    return (
        f"{int(far.sum())} of {far.numel()} codes are more than a step off: row {row} column "
        f"{column} has {results[row, column]:g}, not {expected[row, column]:g}"
    )
