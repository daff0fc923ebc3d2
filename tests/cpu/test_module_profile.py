"""Profiles of modules outside our families: counted work, paths, parts that add up, predictions."""

from __future__ import annotations

import gzip
import json
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from module_climbs import hardware
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional

import ridgeline
from ridgeline.errors import HardwareError, UsageError
from ridgeline.profiling.modules import ModuleProfile, profile, run
from ridgeline.profiling.modules.call_work import CallWork
from ridgeline.profiling.modules.changes import CHANGES
from ridgeline.profiling.modules.counting import Counting, OpCall
from ridgeline.profiling.modules.form import ModuleForm
from ridgeline.profiling.modules.gains import has_plain_attention, predict, suggestions
from ridgeline.profiling.modules.paths import Numbered, PathFollower, names_of, parameters_of
from ridgeline.profiling.modules.rows import grouped
from ridgeline.profiling.modules.run import shorten
from ridgeline.profiling.modules.tracing import (
    TracedOp,
    WatchedCall,
    by_own_time,
    covered,
    joined,
    uncounted,
)
from ridgeline.profiling.tracing.scopes import ClockMarks, TraceMarks
from ridgeline.profiling.tracing.trace import DeviceEvent, Trace
from ridgeline.timing import Timing


@pytest.fixture(autouse=True)
def _briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "TARGET_S", 0.02)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = functional.relu(layer(x))
        return x


def counted(module: nn.Module, *inputs: Any, backward: bool = False) -> list[OpCall]:
    names = names_of(module)
    following = PathFollower(names)
    with following, Counting(following, parameters_of(names)) as counting:
        out = module(*inputs)
        if backward:
            out.sum().backward()
    return counting.ops


def found_mlp() -> ModuleProfile:
    torch.manual_seed(0)
    return profile(Mlp(), torch.randn(8, 32), hardware=hardware(), steps=3)


def test_a_module_is_told_op_by_op() -> None:
    result = found_mlp()
    products = [row for row in result.rows if row.op == "aten.addmm"]
    assert sorted(row.path for row in products) == [f"layers.{i}" for i in range(3)]
    for row in products:
        assert (row.flops, row.num_calls) == (2 * 8 * 32 * 32, 1)
        assert row.num_bytes == 4 * (32 + 8 * 32 + 32 * 32 + 8 * 32)  # bias, x, weight, y
        assert row.limit_s == pytest.approx(max(row.num_bytes / 1e10, row.flops / 1e11))
        assert row.seconds > 0
    assert {row.path for row in result.rows if row.op == "aten.relu"} == {"Mlp"}
    assert result.flops == 3 * 2 * 8 * 32 * 32


def test_parts_add_up_to_the_untraced_call() -> None:
    result = found_mlp()
    assert sum(result.division.values()) == pytest.approx(result.call.median_s, rel=0.03)
    rows = sum(row.seconds for row in result.rows)
    kernels = sum(result.division[key] for key in ("matrices", "attention", "other kernels"))
    assert rows == pytest.approx(kernels, rel=0.03)
    assert min(result.division.values()) >= 0


def test_layers_that_are_alike_share_a_line_of_the_table() -> None:
    result = found_mlp()
    row = next(row for row in grouped(result.rows) if row.op == "aten.addmm")
    assert (row.path, row.num_calls, row.flops) == ("layers.*", 3, result.flops)
    console = Console(width=200, file=StringIO())
    console.print(result.table())
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "layers.*" in shown
    assert "Where a call's time goes" in shown
    document = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert document["rows"][0]["seconds"] == result.rows[0].seconds
    assert "trace" not in document


def test_a_profile_prints_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = found_mlp()
    shown = str(result)
    assert result.verdict.sentence.split()[0] in shown
    assert "layers.*" in shown
    assert "addmm" in shown
    assert "\x1b" not in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert repr(result).startswith("<ModuleProfile of ")
    assert "\n" not in repr(result)


def test_a_trace_is_saved_as_it_is_or_compressed(tmp_path: Path) -> None:
    result = found_mlp()
    plain = json.loads(result.save_trace(tmp_path / "trace.json").read_text())
    packed = json.loads(gzip.decompress(result.save_trace(tmp_path / "trace.json.gz").read_bytes()))
    assert plain == packed
    names = {event.get("name") for event in plain["traceEvents"]}
    assert {"aten::addmm", "ridgeline.module layers.1"} <= names
    assert "PythonDispatchMode" not in names  # the call is not disturbed


def test_a_trace_that_is_too_long_keeps_the_longest_events() -> None:
    events: list[dict[str, Any]] = [{"ph": "M", "name": "thread"}]
    events += [{"ph": "X", "ts": i, "dur": i % 10} for i in range(100)]
    document = {"traceEvents": events}
    assert shorten(document, 0.5) == 55
    kept = document["traceEvents"]
    assert len(kept) == 1 + 45
    assert {event["dur"] for event in kept[1:]} == {9, 8, 7, 6, 5}
    assert [event["ts"] for event in kept[1:]] == sorted(event["ts"] for event in kept[1:])


def test_backward_ops_belong_to_the_module_of_the_forward() -> None:
    ops = counted(Mlp(), torch.randn(8, 32), backward=True)
    backward = [op for op in ops if op.phase == "backward" and op.name == "aten.mm"]
    assert sorted({op.path for op in backward}) == [f"layers.{i}" for i in range(3)]
    assert len([op for op in backward if op.path == "layers.2"]) == 2  # of x and of the weight
    assert len([op for op in backward if op.path == "layers.0"]) == 1


def test_ops_without_a_gradient_do_not_take_the_one_before_away() -> None:
    class Detached(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            scale = x.detach() * 2.0  # has no node of its own in autograd's graph
            return x * scale

    ops = counted(nn.Sequential(nn.Linear(8, 8), Detached()), torch.ones(2, 8), backward=True)
    products = [op for op in ops if op.phase == "backward" and op.name == "aten.mm"]
    assert [op.path for op in products] == ["0"]


def test_the_untraced_call_is_divided_as_the_watched_one_was() -> None:
    ops = (traced(4e-3, flops=1.0), traced(2e-3, kind="pointwise", num_bytes=1))
    timing = Timing(10e-3, 10e-3, 10e-3, 10e-3, 5)
    known = run.ModuleFacts("x", hardware("cuda", eager_launch=5e-6), False, frozenset())
    watched = WatchedCall(ops, 3e-3, 1e-3, 100, None, {})  # kernels overlap: busy for half of it
    given, division = run.divide(timing, watched, known)
    assert division == pytest.approx(
        {
            "matrices": 2e-3, "attention": 0.0, "other kernels": 1e-3, "copies": 1e-3,
            "gaps": 0.5e-3, "host": 5.5e-3,
        }
    )  # fmt: skip
    assert given.host_s == pytest.approx(6e-3)
    longer = WatchedCall(ops, 15e-3, 1e-3, 100, None, {})  # than the call without watching
    assert sum(run.divide(timing, longer, known)[1].values()) == pytest.approx(10e-3)


def test_a_training_step_is_a_callable_like_any_other() -> None:
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    result = profile(step, torch.randn(8, 32), hardware=hardware(), steps=2)
    assert "model.layers.1" in {row.path for row in result.rows if row.phase == "backward"}
    assert result.name == "step"
    assert not {"inference mode, without autograd", "int8 weights in linear layers"} & {
        each.title for each in result.next
    }


def test_ranges_in_a_trace_are_no_ops() -> None:
    """As on a GPU, where each module and op opens one: they go through torch's dispatcher too."""
    model, x, seen = Mlp(), torch.randn(8, 32), []
    for marks in (ClockMarks(), TraceMarks()):
        scopes = Numbered(marks)
        following = PathFollower(names_of(model), scopes)
        with following, Counting(following, model.parameters(), scopes) as counting:
            model(x).square().mean().backward()
        model.zero_grad()
        seen.append([(op.name, op.path, op.phase) for op in counting.ops])
        assert [scopes.paths[n] for n in counting.numbers[:2]] == [
            op.path for op in counting.ops[:2]
        ]
    assert seen[0] == seen[1]
    assert any(phase == "backward" for _, _, phase in seen[0])


def test_the_fused_encoder_layer_counts_what_its_parts_do() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True).eval()
    x = torch.randn(2, 7, 32)
    with torch.no_grad():
        fused = counted(layer, x)
    parts = counted(layer, x)  # gradients are kept: op by op
    assert [op.name for op in fused if op.flops] == ["aten._transformer_encoder_layer_fwd"]
    assert len([op for op in parts if op.flops]) == 5
    assert sum(op.flops for op in fused) == sum(op.flops for op in parts)


def test_inference_mode_counts_the_same() -> None:
    module, x = nn.Sequential(nn.Linear(16, 24), nn.LayerNorm(24)), torch.randn(3, 16)
    plain = counted(module, x)
    with torch.inference_mode():
        inference = counted(module, x)
    assert sum(op.flops for op in inference) == sum(op.flops for op in plain) == 2 * 3 * 16 * 24
    assert sum(op.num_bytes for op in inference) == sum(op.num_bytes for op in plain)


def test_a_look_up_moves_what_it_takes_and_a_view_nothing() -> None:
    class Looking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10_000, 8)

        def forward(self, ids: Tensor) -> Tensor:
            return self.table(ids).view(-1).expand(4, -1) + 1.0

    ops = {op.name: op for op in counted(Looking(), torch.tensor([1, 2, 3]))}
    assert ops["aten.embedding"].num_bytes == 2 * 3 * 8 * 4 + 3 * 8
    assert ops["aten.view"].num_bytes == ops["aten.expand"].num_bytes == 0
    assert ops["aten.add"].num_bytes == 24 * 4 + 4 * 24 * 4  # of the expanded, what is there


def test_hooks_go_away_when_the_module_raises() -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        profile(nn.Sequential(nn.Linear(4, 4), Broken()), torch.ones(1, 4), hardware=hardware())
    following = PathFollower({})
    with pytest.raises(ValueError, match="on purpose"), following:
        Broken()(torch.ones(1))
    assert following.path == ""
    assert not torch.nn.modules.module._global_forward_pre_hooks
    assert not torch.nn.modules.module._global_forward_hooks


def test_a_compiled_function_is_still_compiled_afterwards() -> None:
    calls = []

    def backend(graph: Any, example: Any) -> Any:
        def run(*inputs: Any) -> Any:
            calls.append(1)
            return graph.forward(*inputs)

        return run

    module = torch.compile(Mlp(), backend=backend)
    x = torch.randn(8, 32)
    result = profile(module, x, hardware=hardware(), steps=2)
    assert result.name == "Mlp"
    assert any("compiled: told by kernels" in note for note in result.notes)
    assert sum(result.division.values()) == pytest.approx(result.call.median_s, rel=0.03)
    before = len(calls)
    module(x)
    assert len(calls) == before + 1


def test_kernels_go_to_the_op_or_the_module_that_launched_them() -> None:
    def event(name: str, begin: float, scope: int | None, is_copy: bool = False) -> DeviceEvent:
        return DeviceEvent(name, begin, begin + 1.0, is_copy, 0, scope, False)

    # Scopes: 0 a module, 1 its op, 2 a module that launches a kernel of its own.
    events = (
        event("gemm", 0.0, 1), event("bias", 1.0, 1), event("own", 2.5, 2), event("own", 3.0, 2),
        event("late", 4.0, None), event("Memcpy HtoD", 5.0, 0, is_copy=True),
    )  # fmt: skip
    op = OpCall("aten.addmm", "a.b", "forward", "matrix", 1.0, 1, 1, "bf16")
    result = joined([op], [1], ["a", "a.b", "a.c"], Trace(events, 1))
    assert result[0] == TracedOp(op, 2.0, 2, ("gemm", "bias"))
    assert [(each.op.path, each.op.name, each.seconds) for each in result[1:]] == [
        ("a.c", "own", 2.0),
        ("(outside modules)", "late", 1.0),
    ]
    assert covered(events) == pytest.approx(5.5)  # of what overlaps, once


def test_compiled_code_is_told_by_what_is_not_inside_of_something_else() -> None:
    def row(name: str, begin: float, end: float, kind: str = "cpu_op") -> dict[str, Any]:
        return {"ph": "X", "cat": kind, "name": name, "ts": begin, "dur": end - begin, "tid": 1}

    document = {
        "traceEvents": [
            row("ridgeline:step", 0, 100, "user_annotation"),
            row("ridgeline.module m", 10, 90, "user_annotation"),
            row("## Call CompiledFxGraph abc ##", 20, 80),
            row("aten::addmm", 30, 50),
        ]
    }
    result = {each.op.name: each for each in by_own_time(document)}
    assert result.keys() == {"compiled graph", "aten::addmm"}
    assert result["compiled graph"].seconds == pytest.approx(40e-6)
    assert result["aten::addmm"].seconds == pytest.approx(20e-6)
    assert result["aten::addmm"].op.path == "m"


def test_wrong_uses_say_what_to_do() -> None:
    with pytest.raises(UsageError, match="steps is 0; give at least 1"):
        profile(Mlp(), torch.ones(1, 32), steps=0)
    with pytest.raises(UsageError, match="Tensor is not callable"):
        profile(torch.ones(1))  # type: ignore[arg-type]
    if not torch.cuda.is_available():
        with pytest.raises(HardwareError, match="no GPU"):
            profile(Mlp(), torch.ones(1, 32), device="cuda")


def test_names_are_lazy() -> None:
    assert ridgeline.profile is profile


# Predictions, from calls put together by hand.


def traced(seconds: float, **facts: Any) -> TracedOp:
    usual: dict[str, Any] = {
        "name": "aten.addmm", "path": "x", "phase": "forward", "kind": "matrix", "flops": 0.0,
        "num_bytes": 0, "weight_bytes": 0, "dtype": "fp32",
    }  # fmt: skip
    return TracedOp(OpCall(**usual | facts), seconds, 1, ())


def work(*ops: TracedOp, host_s: float = 0.0, kind: str = "cpu", **ceilings: float) -> CallWork:
    call_s = sum(op.seconds for op in ops) + host_s
    return CallWork(ops, call_s, host_s, len(ops), hardware(kind, **ceilings), True, frozenset("x"))


def gain(given: CallWork, name: str) -> float:
    change = CHANGES[name]
    return predict(given, ModuleForm(), change.of(ModuleForm()), change).speedup


def test_products_gain_what_the_matrix_units_do() -> None:
    # 1e9 FLOPs take 10 ms of fp32 at 1e11: 4 times the rate is at most 4 times as fast.
    given = work(traced(0.0125, flops=1e9, num_bytes=1000), kind="cuda")
    assert 3.5 < gain(given, "bf16") <= 4.1
    assert gain(given, "int8") == pytest.approx(1.0, abs=0.1)  # bytes are not what bounds it


def test_a_cpu_multiplies_one_row_of_bf16_slower_than_many() -> None:
    def product(rows: int) -> TracedOp:
        return traced(0.01, flops=2.0 * rows * 2.5e7, num_bytes=10**8, weight_bytes=10**8)

    assert gain(work(product(1)), "bf16") < 1.0
    assert gain(work(product(8)), "bf16") == pytest.approx(2.0, rel=0.1)


def test_weights_in_int8_gain_by_bytes() -> None:
    given = work(traced(0.01, flops=2e6, num_bytes=10**8, weight_bytes=10**8), kind="cuda")
    assert 3.5 < gain(given, "int8") < 5.0  # a quarter, read faster than cuBLAS reads fp32
    assert gain(given, "int4") > gain(given, "int8")
    product = traced(0.01, flops=5e10, num_bytes=10**8, weight_bytes=10**8)  # of 1000 rows
    assert gain(work(product, kind="cuda", matrix_fp32=1e14), "int8") < 0.6  # expanded each time


def test_a_graph_takes_the_waiting_away() -> None:
    ops = [traced(10e-6, num_bytes=10_000, flops=1e4) for _ in range(10)]
    given = work(*ops, host_s=300e-6, kind="cuda", graph_step=1e-6)
    assert gain(given, "graphs") == pytest.approx(4.0, rel=0.01)
    assert suggestions(given)[0].title == CHANGES["graphs"].title


def test_neighbours_that_fuse_move_their_data_once() -> None:
    ops = [traced(1e-3, num_bytes=10**7, kind="pointwise", name="aten.add") for _ in range(4)]
    assert gain(work(*ops), "compile") == pytest.approx(4.0, rel=0.01)
    product = traced(1e-3, num_bytes=10**7, flops=1e6)
    assert gain(work(ops[0], product, ops[1]), "compile") == pytest.approx(1.0, rel=0.01)


def test_plain_attention_is_seen_and_its_scores_are_spared() -> None:
    ops = [
        traced(1e-3, name="aten.bmm", num_bytes=11 * 10**6, flops=1e6),
        traced(2e-3, name="aten._softmax", kind="reduction", num_bytes=20 * 10**6),
        traced(1e-3, name="aten.bmm", num_bytes=11 * 10**6, flops=1e6),
    ]
    assert has_plain_attention(work(*ops))
    assert gain(work(*ops), "sdpa") > 3
    assert not has_plain_attention(work(ops[0], ops[2]))
    assert not has_plain_attention(work(*ops[:2]))


def test_what_is_not_counted_is_not_predicted_away() -> None:
    given = work(uncounted("x", "a_kernel", [1000.0]), kind="cuda")
    assert gain(given, "bf16") == pytest.approx(1.0)
    assert gain(given, "int8") == pytest.approx(1.0)


def test_modules_are_found_where_a_callable_holds_them() -> None:
    class Holder:
        def __init__(self) -> None:
            self.model = Mlp()

        def __call__(self, x: Tensor) -> Tensor:
            return self.model(x)

        def step(self, x: Tensor) -> Tensor:
            return self.model(x)

    holder = Holder()
    for work in (holder, holder.step, partial(holder.step, None)):
        assert names_of(work)[holder.model.layers[1]] == "model.layers.1"
    bare = partial(lambda model, x: model(x), holder.model)
    assert names_of(bare)[holder.model.layers[1]] == "0.layers.1"
    assert names_of(torch.relu) == {}
