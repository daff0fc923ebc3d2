"""How an op is held against its reference: the same for the interpreter and for a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ridgeline.formats.scaling import LARGEST
from ridgeline.kernels.op import Case, Op, outputs
from ridgeline.kernels.tolerance import bound, check


def make_inputs(case: Case, device: torch.device) -> dict[str, Any]:
    return case.make(device, torch.Generator(device=device).manual_seed(0))


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fresh memory holds NaN (or the largest integer), so that what is never written is seen."""

    def poison(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            return tensor.fill_(float("nan"))
        return tensor.fill_(1 if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max)

    def wrap(make: Any) -> Any:
        return lambda *args, **kwargs: poison(make(*args, **kwargs))

    with (
        mock.patch.object(torch, "empty", wrap(torch.empty)),
        mock.patch.object(torch, "empty_like", wrap(torch.empty_like)),
    ):
        yield


def check_forward(op: Op, case: Case, device: torch.device) -> None:
    with poisoned_memory():
        found = outputs(op.launch(**make_inputs(case, device)))
    expected = outputs(op.reference(**make_inputs(case, device)))
    assert len(found) == len(expected)
    quantized = any(ref.dtype in LARGEST for ref in expected)
    for out, ref in zip(found, expected, strict=True):
        if ref.dtype in LARGEST:
            check_codes(out, ref, case)
        elif not out.is_floating_point():
            assert torch.equal(out.cpu(), ref.cpu())
        else:  # beside codes, what is fp32 is their scales
            scales = quantized and ref.dtype == torch.float32
            dtype = torch.float32 if scales else case.dtype
            check(out, ref, dtype, case.reduction, case.roundings)


def check_codes(out: Tensor, ref: Tensor, case: Case) -> None:
    """8-bit codes may differ where a value lies on the edge of two: rarely, and by one step."""
    assert out.dtype == ref.dtype
    found, expected = out.double().cpu(), ref.double().cpu()
    differ = found != expected
    step = expected.abs() / 8 if out.dtype != torch.int8 else torch.ones_like(expected)
    assert ((found - expected).abs() <= step.clamp(min=2.0**-9) + 1e-9).all()
    # The edge is as wide as the error of the value: a code's step is 1/127 or 1/16 of it.
    allowed = 0.002 + 256 * bound(torch.float32, case.reduction)
    assert differ.double().mean() <= allowed, f"{differ.double().mean():.4f} of the codes differ"


def check_gradients(op: Op, case: Case, device: torch.device) -> None:
    assert op.differentiable is not None
    found = gradients(op.differentiable, case, device)
    expected = gradients(op.reference, case, device)
    for name in case.gradients:
        rows = max(1, make_inputs(case, device)[name].numel())
        check(found[name], expected[name], case.dtype, case.reduction + rows)


def gradients(function: Any, case: Case, device: torch.device) -> dict[str, Tensor]:
    inputs = make_inputs(case, device)
    for name in case.gradients:
        inputs[name] = inputs[name].detach().requires_grad_()
    out = outputs(function(**inputs))[0]
    generator = torch.Generator(device=device).manual_seed(1)
    out.backward(torch.randn(out.shape, device=device, generator=generator).to(out.dtype))
    return {name: inputs[name].grad for name in case.gradients}
