"""The one way a Triton kernel is started, so that the same launcher can also be asked what it would
start.

Inside `recording(target)` nothing runs: each call is noted with its types and constants as it would
be for that target. Compiling for a machine that is not there (targets.py) then sees exactly what
the launchers use, and no second list of kernels and configurations exists.

    with recording(TARGETS["gfx942"]) as calls:
        op.launch(**inputs)          # CPU or meta tensors will do

Inside `only_compiling()` nothing runs either, and what would be started is compiled for this GPU,
all kernels at once: one by one, the first step of a process takes as long as all of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from ridgeline.kernels.targets import TARGETS, Target

MAX_COMPILERS = 16  # threads; the compiler lets others run beside it but for its first tenth


@dataclass(frozen=True)
class KernelCall:
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
    calls: list[KernelCall] = field(default_factory=list)


_recorder: ContextVar[Recorder | None] = ContextVar("recorder", default=None)
_only_compiling: ContextVar[bool] = ContextVar("only_compiling", default=False)


@contextmanager
def recording(target: Target) -> Iterator[list[KernelCall]]:
    recorder = Recorder(target)
    token = _recorder.set(recorder)
    try:
        yield recorder.calls
    finally:
        _recorder.reset(token)


@contextmanager
def only_compiling() -> Iterator[None]:
    """What a kernel would have written is not there: nothing that hangs on it may be done with it
    but to hand it to the next. One that does not compile says so when it is started in earnest.
    """
    from triton import AsyncCompileMode

    token = _only_compiling.set(True)
    try:
        workers = min(MAX_COMPILERS, os.cpu_count() or 1)
        with _Compilers(workers) as pool, AsyncCompileMode(pool, ignore_errors=True):
            yield
    finally:
        _only_compiling.reset(token)


class _Compilers(ThreadPoolExecutor):
    """Also of what starts a kernel: Triton 3.6 makes a library in C for each list of arguments."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **more: Any) -> Future[Any]:
        def compiled() -> Any:
            kernel = fn(*args, **more)
            with suppress(Exception):  # it is made, or fails, when the kernel is first started
                from triton.runtime import driver

                driver.active.launcher_cls(kernel.src, kernel.metadata)
            return kernel

        return super().submit(compiled)


def is_only_compiling() -> bool:
    """Whether kernels that are compiled already, as those in CUDA C++, are not to be started."""
    return _only_compiling.get()


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
            KernelCall(kernel, tuple(args), constants, num_warps, num_stages, dict(options or {}))
        )
        return
    settings = compiler_options(num_warps, num_stages, options)
    if _only_compiling.get():
        kernel.warmup(*args, grid=grid, **constants, **settings)
        return
    kernel[grid](*args, **constants, **settings)


def compiler_options(
    num_warps: int, num_stages: int, options: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The compiler's settings. Multiply-add fusion is always given: Triton 3.10 changes its
    default.
    """
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
