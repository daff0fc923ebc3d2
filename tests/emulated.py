"""CUDA C++ sources built for tests/cuda_on_cpu.h: a kernel's own source, run thread for thread on
the CPU.
"""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.hipify import hipify_python

from ridgeline.kernels.extension import included_files, source

HEADERS = ("cuda_fp16.h", "cuda_runtime.h", "cuda_bf16.h", "cooperative_groups.h")
STAND_IN = Path(__file__).parent / "cuda_on_cpu.h"


def built(op: str, builds: Mapping[str, tuple[str, ...]], folder: Path) -> dict[str, ctypes.CDLL]:
    """An op's source once for each set of defines, all at once."""
    compiler = shutil.which("g++")
    if compiler is None or platform.machine() != "x86_64":
        pytest.skip("the source runs on a CPU through g++ on x86-64")
    for header in HEADERS:
        (folder / header).touch()
    shared = [compiler, "-std=c++17", "-O0", "-shared", "-fPIC", "-DRIDGELINE_ON_CPU", "-x", "c++"]
    shared += ["-include", str(STAND_IN), "-I", str(folder), str(source(op))]
    running = {
        name: subprocess.Popen(
            [*shared, *(f"-D{define}" for define in defines), "-o", str(folder / f"{name}.so")],
            stderr=subprocess.PIPE,
            text=True,
        )
        for name, defines in builds.items()
    }
    for process in running.values():
        _, errors = process.communicate()
        assert process.returncode == 0, errors
    return {name: ctypes.CDLL(str(folder / f"{name}.so")) for name in builds}


def translated(op: str, folder: Path) -> str:
    """An op's source as a ROCm build translates it, its headers first."""
    files = included_files(source(op))
    root = source(op).parents[1]
    for file in files:
        copy = folder / file.relative_to(root)
        copy.parent.mkdir(exist_ok=True)
        shutil.copy(file, copy)
    hipify_python.hipify(
        project_directory=str(folder),
        output_directory=str(folder),
        includes=[f"{folder}/*"],
        extra_files=[str(folder / op / "cuda.cu")],
        is_pytorch_extension=True,
    )
    headers = sorted(folder.rglob("*_hip.cuh"))
    assert len(headers) == len(files) - 1
    (kernel,) = folder.rglob("*.hip")
    return "".join(path.read_text() for path in (kernel, *headers))


def poison_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is allocated for results holds NaN until it is written."""
    empty = torch.empty

    def fresh(*shape: Any, **options: Any) -> Tensor:
        made = empty(*shape, **options)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", fresh)


@contextmanager
def still_written(library: ctypes.CDLL, places: Sequence[tuple[Tensor, Any]]) -> Iterator[None]:
    """The kernel before writes these places of tensors: until a block waits for it they hold NaN,
    or zero.
    """
    values = [tensor[place].clone() for tensor, place in places]

    @ctypes.CFUNCTYPE(None)
    def undo() -> None:
        for tensor, place in places:
            tensor[place] = float("nan") if tensor.is_floating_point() else 0

    @ctypes.CFUNCTYPE(None)
    def finish() -> None:
        for (tensor, place), value in zip(places, values, strict=True):
            tensor[place] = value

    library.play_kernel_before(undo, finish)
    try:
        yield
    finally:
        library.play_kernel_before(None, None)
