"""Which schemes a device can run, with an error that says which schemes it can run instead."""

from __future__ import annotations

import torch

from ridgeline.errors import UnsupportedError
from ridgeline.kernels.launch import target_of
from ridgeline.kernels.targets import Target
from ridgeline.quantization.scheme import FP8, Scheme


def check_runs(scheme: Scheme, dtype: str, device: str) -> None:
    """A CPU runs all of them, in any dtype. `dtype` is the model's."""
    if torch.device(device).type == "cpu":
        return
    if scheme.weight == "blocks":
        raise UnsupportedError(f"{scheme.name} blocks are multiplied as they are on a CPU alone")
    if dtype == "fp32":
        raise UnsupportedError(
            f"scheme {scheme.name} on a GPU computes in 16 bits, but the dtype is fp32; "
            "use --dtype bf16 or fp16"
        )
    check_target(scheme, target_of(torch.empty(0, device=device)))


def check_target(scheme: Scheme, target: Target) -> None:
    if scheme.weight == "fp8" and target.fp8 != FP8:
        own = "has no fp8" if target.fp8 is None else "has another kind of fp8 (e4m3fnuz)"
        raise UnsupportedError(
            f"scheme {scheme.name} needs e4m3fn matrix units (NVIDIA from sm_89 on, AMD gfx950), "
            f"and {target.name} {own}; use int8, int4-g128 or w8a8-int8"
        )
