"""Tests that need a GPU; without one every test of this folder is skipped.

Several processes may run parts of this folder at once on one GPU. Then times mean nothing: kernels
wait for those of others. What a test asserts of speed it asks `alone` for first; what is computed,
found and named is asserted always.
"""

import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import IO

import pytest
import torch

from ridgeline.kernels.extension import build, find_nvcc, sources

LARGE_AT_ONCE = 2  # tests with tensors beyond 2**31 elements, of up to 42 GiB each


@pytest.fixture(scope="session", autouse=True)
def _needs_a_gpu() -> None:
    """With a compiler here the kernels in CUDA C++ are built first, and their portable form too."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    if find_nvcc() is not None or torch.version.hip is not None:
        forms: list[tuple[str, ...]] = [(), ("RIDGELINE_PORTABLE",)]
        with ThreadPoolExecutor() as pool:  # nvcc takes a core for each
            list(pool.map(lambda each: build(*each), product(sources(), forms)))


@pytest.fixture(autouse=True)
def _free_memory() -> Iterator[None]:
    """What one test's large tensors took is there for the next, and for other test processes."""
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _lock_path(name: str) -> Path:
    return Path(tempfile.gettempdir()) / f"ridgeline-gpu-tests-{os.getuid()}-{name}.lock"


@pytest.fixture(scope="session")
def _lock() -> Iterator[IO[bytes]]:
    """Held together by all processes that run these tests, from their first test to their last."""
    with open(_lock_path("all"), "ab") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield file


@pytest.fixture(autouse=True)
def _present(_lock: IO[bytes]) -> None:
    """Others see that somebody is here."""


@pytest.fixture
def one_of_few() -> Iterator[Callable[[], None]]:
    """Called by a test with tensors of many gigabytes: so many of them run at once as fit on a GPU
    together.
    """
    with ExitStack() as held:

        def wait() -> None:
            places = [
                held.enter_context(open(_lock_path(f"large-{number}"), "ab"))
                for number in range(LARGE_AT_ONCE)
            ]
            while not any(_is_taken(place) for place in places):
                time.sleep(0.02)

        yield wait


def _is_taken(place: IO[bytes]) -> bool:
    """By this process, just now."""
    try:
        fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_alone(lock: IO[bytes]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        fcntl.flock(lock, fcntl.LOCK_SH)
    return True


@pytest.fixture
def alone(_lock: IO[bytes]) -> Callable[[], bool]:
    """Whether no other process ran these tests when this one began, nor does now."""
    before = _is_alone(_lock)
    return lambda: before and _is_alone(_lock)
