"""The start of a step: its kernel changes no bit of what torch's own lookups give."""

from __future__ import annotations

import pytest
import torch
from kernel_checks import make_inputs, poisoned_memory

from ridgeline.kernels.op import Case
from ridgeline.kernels.step_start.op import OP

CPU = torch.device("cpu")
SCALED = [case for case in OP.small_cases if "scale" in case.label]


@pytest.mark.parametrize("case", SCALED, ids=lambda case: case.label)
def test_scaled_embeddings_are_rounded_as_torch_does(case: Case) -> None:
    assert len(SCALED) == 3
    with poisoned_memory():
        found = OP.launch(**make_inputs(case, CPU))
    for out, expected in zip(found, OP.reference(**make_inputs(case, CPU)), strict=True):
        assert torch.equal(out, expected)
