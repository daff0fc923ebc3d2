"""Graphs: what is captured is what runs, and a capture that fails does no harm."""

from __future__ import annotations

import gc

import pytest
import torch

from ridgeline.capture import capture


def test_a_replay_computes_from_what_the_inputs_hold_then() -> None:
    x = torch.zeros(1000, device="cuda")
    (x * 2 + 1).sum()  # whatever is made once
    graph, result = capture(lambda: x * 2 + 1)
    x.fill_(3.0)
    graph.replay()
    assert (result == 7.0).all()
    assert gc.isenabled()


def test_graphs_share_a_pool() -> None:
    pool = torch.cuda.graph_pool_handle()
    x = torch.randn(1 << 24, device="cuda")  # 64 MiB, well over the 20 that are taken at a time
    before = torch.cuda.memory_reserved()
    made = [capture(lambda: ((x + 1) * 2).sum(), pool) for _ in range(8)]
    assert torch.cuda.memory_reserved() - before <= 3 * x.nbytes  # not eight times its own
    for graph, result in made:
        graph.replay()
        torch.testing.assert_close(result, ((x + 1) * 2).sum())


def test_a_failure_is_told_and_nothing_is_lost() -> None:
    def broken() -> None:
        torch.ones(3, device="cuda").add_(1)
        raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        capture(broken)
    assert torch.ones(3, device="cuda").sum().item() == 3.0
    graph, result = capture(lambda: torch.ones(3, device="cuda") * 2)
    graph.replay()
    assert result.tolist() == [2.0] * 3
