"""A pass in which kernels are compiled and none is run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ridgeline.kernels.launch import is_only_compiling, launch, only_compiling


class Kernel:
    """Notes what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any, tuple[Any, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **more: self.asked.append(("run", grid, args, more))

    def warmup(self, *args: Any, grid: tuple[int, ...], **more: Any) -> None:
        self.asked.append(("compile", grid, args, more))


def test_the_same_kernel_is_compiled_that_would_be_run() -> None:
    kernel, x = Kernel(), torch.zeros(3)
    with only_compiling():
        assert is_only_compiling()
        launch(kernel, (4,), (x, 3), num_warps=8, options={"launch_pdl": True}, BLOCK=64)
    assert not is_only_compiling()
    launch(kernel, (4,), (x, 3), num_warps=8, options={"launch_pdl": True}, BLOCK=64)
    (first, *compiled), (second, *run) = kernel.asked
    assert (first, second) == ("compile", "run")
    assert compiled == run
    assert compiled[2]["BLOCK"] == 64
    assert compiled[2]["launch_pdl"]


def test_an_error_ends_it() -> None:
    with pytest.raises(ValueError, match="on purpose"), only_compiling():
        raise ValueError("on purpose")
    assert not is_only_compiling()
