"""Tests that need a GPU; without one every test of this folder is skipped."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _needs_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
