"""Graphs: what is captured is what runs, and a capture that fails does no harm."""

from __future__ import annotations

import gc

import pytest
import torch
from engines import engine_for, prompts_of, tiny

from ridgeline.bench.engine import run_workload
from ridgeline.capture import capture
from ridgeline.data.workload import Workload, WorkloadRequest
from ridgeline.engine import Sampling
from ridgeline.engine.execution.graphs import Graphs
from ridgeline.hardware import detect
from ridgeline.kernels.compile_times import CompileTimes
from ridgeline.kernels.launch import only_compiling
from ridgeline.lessons.vector_add.triton import vector_add
from ridgeline.recipe import Speculation


def test_a_replay_computes_from_what_the_inputs_hold_then() -> None:
    x = torch.zeros(1000, device="cuda")
    (x * 2 + 1).sum()  # whatever is made once
    graph, result = capture(lambda: x * 2 + 1)
    x.fill_(3.0)
    graph.replay()
    assert (result == 7.0).all()
    assert gc.isenabled()


def test_kernels_are_compiled_at_once_and_not_run() -> None:
    x, y = torch.arange(100.0, device="cuda"), torch.ones(100, device="cuda")
    torch.empty(100, device="cuda").fill_(-1.0)  # what the result will lie in
    with CompileTimes() as ahead, only_compiling():
        not_run = vector_add(x, y, step="strided")
        vector_add(x, y, step="wide")
    assert (not_run == -1.0).all()
    assert len(ahead.compiled) + len(ahead.found) == 2
    with CompileTimes() as then:
        found = vector_add(x, y, step="strided")
    assert (then.compiled, then.found) == ([], [])
    torch.testing.assert_close(found, x + 1)


@pytest.mark.parametrize("method", ["none", "prompt-lookup"])
def test_a_pass_that_only_compiles_leaves_no_trace(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = prompts_of([70, 9, 33])
    found = []
    for at_once in (True, False):
        monkeypatch.setattr(Graphs, "compiles_at_once", at_once)
        engine = engine_for(
            tiny("llama-tied", device="cuda"), graphs=True, speculation=Speculation(method=method)
        )
        assert engine.runner.graphs is not None
        outputs = engine.generate(prompts, Sampling(max_tokens=40, temperature=0.8, seed=3))
        assert engine.runner.graphs.captured
        found.append([output.tokens for output in outputs])
    assert found[0] == found[1]


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


def test_what_capturing_took_is_told_apart_from_the_steps() -> None:
    """The first run captures, the second replays."""
    engine = engine_for(tiny("llama-tied", device="cuda"), graphs=True)
    workload = Workload("short", (WorkloadRequest(9, 12), WorkloadRequest(5, 8)))
    first, second = (run_workload(engine, workload, detect("cuda:0")) for _ in range(2))
    assert 0.0 < first.setup_s < first.wall_s
    assert second.setup_s == 0.0
