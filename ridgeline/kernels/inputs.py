"""Building blocks for an op's cases: random tensors, and views of them that are not contiguous."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.formats.dtypes import dtype_name
from ridgeline.formats.scaling import LARGEST
from ridgeline.kernels.op import Case, OpInputs
from ridgeline.kernels.targets import Target


def normal(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
    scale: float = 1.0,
) -> Tensor:
    """Random normal values; drawn in fp32, since that is what every dtype can be made from."""
    drawn = torch.randn(shape, device=device, generator=generator)
    return (drawn * scale).to(dtype)


def strided_rows(x: Tensor, gap: int = 16) -> Tensor:
    """The same values as rows of a wider matrix: the last dim contiguous, the rows apart."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + gap), float("nan"), device=x.device)
    wide = wide.to(x.dtype)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def given(**values: Any) -> OpInputs:
    """Those that are not None: where nothing is given, the op's own defaults serve."""
    return {name: value for name, value in values.items() if value is not None}


def input_bytes(inputs: OpInputs) -> int:
    """Of all tensors among an op's inputs."""
    return sum(value.nbytes for value in inputs.values() if isinstance(value, Tensor))


def label(*parts: object) -> str:
    """`4096x8192 bf16 residual`: dtypes by their short names, shapes with an x, empty parts left
    out.
    """
    texts = []
    for part in parts:
        if isinstance(part, torch.dtype):
            texts.append(dtype_name(part))
        elif isinstance(part, tuple):
            texts.append("x".join(map(str, part)))
        elif part:
            texts.append(str(part))
    return " ".join(texts)


def has_floats_of(target: Target, case: Case) -> bool:
    """Every 8-bit float that a case's label names is the target's own: an op's `supports`."""
    named = [dtype for dtype in LARGEST if dtype_name(dtype) in case.label.split()]
    own = {torch.int8, target.fp8}
    if target.fp8 == torch.float8_e4m3fn:
        own.add(torch.float8_e5m2)  # comes with it
    return own.issuperset(named)
