"""How an op is held against its reference: the same for the interpreter and for a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ridgeline.kernels.agreement import compare
from ridgeline.kernels.op import Case, Function, Op, outputs
from ridgeline.kernels.quantized_linear import many_rows
from ridgeline.kernels.quantized_linear.op import define, split_operands
from ridgeline.kernels.tolerance import check


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


def check_forward(op: Op, case: Case, device: torch.device, launch: Function | None = None) -> None:
    with poisoned_memory():
        found = (launch or op.launch)(**make_inputs(case, device))
    compare(found, op.reference(**make_inputs(case, device)), case)


def check_gradients(op: Op, case: Case, device: torch.device) -> None:
    assert op.differentiable is not None
    found = gradients(op.differentiable, case, device)
    expected = gradients(op.reference, case, device)
    for name in case.gradients:
        rows = max(1, make_inputs(case, device)[name].numel())
        check(found[name], expected[name], case.dtype, case.reduction + rows, case.roundings)


def gradients(function: Any, case: Case, device: torch.device) -> dict[str, Tensor]:
    inputs = make_inputs(case, device)
    for name in case.gradients:
        inputs[name] = inputs[name].detach().requires_grad_()
    outs = [out for out in outputs(function(**inputs)) if out.requires_grad]
    generator = torch.Generator(device=device).manual_seed(1)
    drawn = [torch.randn(out.shape, device=device, generator=generator) for out in outs]
    torch.autograd.backward(
        outs, [grad.to(out.dtype) for grad, out in zip(drawn, outs, strict=True)]
    )
    return {name: inputs[name].grad for name in case.gradients}


def check_packed_linear(case: Case, device: torch.device) -> None:
    """A product of packed weights with many rows, beside the reference's."""
    inputs = make_inputs(case, device)
    with poisoned_memory():
        given, fused, _ = split_operands(inputs)
        result = many_rows.packed_linear(given, fused)
    # The norm's result, the weights, the product and the activation are each rounded.
    compare(result, define(**inputs), replace(case, roundings=6))
