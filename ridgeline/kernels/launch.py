"""The one way a Triton kernel is started, so that the same launcher can also be asked what it would
start.

Inside `recording(target)` nothing runs: each call is noted with its types and constants as it would
be for that target. Compiling for a machine that is not there (targets.py) then sees exactly what
the launchers use, and no second list of kernels and configurations exists.

    with recording(TARGETS["gfx942"]) as calls:
        op.launch(**inputs)          # CPU or meta tensors will do
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from ridgeline.kernels.targets import TARGETS, Target


@dataclass(frozen=True)
class Call:
    """One kernel launch as it would have happened."""

    kernel: Any  # a triton.jit function
    args: tuple[Any, ...]
    constants: Mapping[str, Any]
    num_warps: int
    num_stages: int
    options: Mapping[str, Any]


@dataclass
class Recorder:
    target: Target
    calls: list[Call] = field(default_factory=list)


_recorder: ContextVar[Recorder | None] = ContextVar("recorder", default=None)


@contextmanager
def recording(target: Target) -> Iterator[list[Call]]:
    recorder = Recorder(target)
    token = _recorder.set(recorder)
    try:
        yield recorder.calls
    finally:
        _recorder.reset(token)


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    args: Sequence[Any],
    *,
    num_warps: int = 4,
    num_stages: int = 2,
    options: Mapping[str, Any] | None = None,
    **constants: Any,
) -> None:
    """Start `kernel` over `grid`. `constants` are its constexpr arguments; `options` go to the
    compiler (`launch_pdl` for programmatic dependent launch).
    """
    recorder = _recorder.get()
    if recorder is not None:
        recorder.calls.append(
            Call(kernel, tuple(args), constants, num_warps, num_stages, dict(options or {}))
        )
        return
    kernel[grid](*args, **constants, **compiler_options(num_warps, num_stages, options))


def compiler_options(
    num_warps: int, num_stages: int, options: Mapping[str, Any] | None
) -> dict[str, Any]:
    """What the compiler is told. Multiply-add fusion is always named: 3.10 changes its default."""
    fixed = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}
    return fixed | dict(options or {})


def target_of(tensor: torch.Tensor) -> Target:
    """What a launcher should choose for: the device of `tensor`, or the target being recorded."""
    recorder = _recorder.get()
    if recorder is not None:
        return recorder.target
    if tensor.device.type == "cpu":
        return TARGETS["interpreter"]
    return _device_target(tensor.device.index or 0)


@lru_cache
def _device_target(index: int) -> Target:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        name = properties.gcnArchName.split(":")[0]
    else:
        name = f"sm_{properties.major}{properties.minor}"
    return TARGETS.get(name) or Target.like(name)
