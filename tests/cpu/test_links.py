"""What a link between processes leaves behind when it is closed (parallel/inference/links.py)."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import distributed

from ridgeline.errors import HardwareError
from ridgeline.parallel.inference.links import ProcessLink, join, nobody_knows


class GlooGroup:
    """One whose calls come back, or do not."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def broadcast(self, *_: Any) -> None:
        if self.error is not None:
            raise self.error


def test_a_link_that_is_closed_lets_its_group_end() -> None:
    group = GlooGroup()
    link, left = ProcessLink(group, 0, 2, nobody_knows), weakref.ref(group)
    link.broadcast(torch.zeros(1))
    del group
    link.close()
    assert left() is None


@pytest.mark.parametrize("error", [RuntimeError("closed by peer"), KeyboardInterrupt()])
def test_a_call_that_was_left_is_not_waited_for(error: Exception) -> None:
    """The group's end would: it stays until the process ends."""
    group = GlooGroup(error)
    link, left = ProcessLink(group, 0, 2, nobody_knows), weakref.ref(group)
    with pytest.raises((HardwareError, KeyboardInterrupt)):
        link.broadcast(torch.zeros(1))
    del group, error
    link.close()
    assert left() is not None


def test_no_thread_of_a_closed_link_is_left() -> None:
    """They are gloo's own, which Python does not count."""
    store = distributed.HashStore()
    group = join(store, 0, 1, "cpu", local=True)
    group.control.broadcast(torch.zeros(4))
    held = num_threads()
    group.close()
    assert num_threads() < held


def num_threads() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Threads:"))
