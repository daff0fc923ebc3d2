"""Tests that need a GPU; without one every test of this folder is skipped."""

from collections.abc import Iterator

import pytest
import torch

from ridgeline.kernels.extension import build, find_nvcc, sources


@pytest.fixture(scope="session", autouse=True)
def _needs_a_gpu() -> None:
    """With a compiler here the kernels in CUDA C++ are built first, and their portable form too."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    if find_nvcc() is not None or torch.version.hip is not None:
        for op in sources():
            build(op)
            build(op, ("RIDGELINE_PORTABLE",))


@pytest.fixture(autouse=True)
def _free_memory() -> Iterator[None]:
    """What one test's large tensors took is there for the next, and for other test processes."""
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
