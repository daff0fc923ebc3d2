"""Tests that need a GPU; without one every test of this folder is skipped."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _needs_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")


@pytest.fixture(autouse=True)
def _free_memory() -> Iterator[None]:
    """What one test's large tensors took is there for the next, and for other test processes."""
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
