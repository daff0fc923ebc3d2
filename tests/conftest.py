"""Threads = cores / processes, or torch's threads of two test processes wait for each other (18x
slower on two cores).

The limit is set for this process and, through the environment, for those that tests start.

What is there when all tests are collected stays: Python need not look at it each time it collects
garbage, which takes half a second then.
"""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

gc.disable()  # until all tests are collected
cases = Path(__file__).parent.glob("field_*.py")
pytest.register_assert_rewrite(*(path.stem for path in cases))  # what they find is told in full
workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
threads = max(1, len(os.sched_getaffinity(0)) // workers)
os.environ["OMP_NUM_THREADS"] = str(threads)
torch.set_num_threads(threads)
settings.register_profile("untimed", deadline=None)  # nothing asserts on the clock
settings.load_profile("untimed")


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # libraries look at their end for what is left of theirs


@pytest.fixture
def every_step_kept_its_drafts(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """For modules that draft: no step may fall back to running without its drafts."""
    from speculation import steps_without_drafts

    yield
    assert steps_without_drafts(caplog) == []
