"""Traces of a GPU that was never there: what is read from them is what was put in."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ridgeline.engine.execution.graphs import Graphs
from ridgeline.engine.execution.step_pass import PassKind, SamplingKind
from ridgeline.engine.steps.batch import StepShape
from ridgeline.engine.steps.notes import END, Note
from ridgeline.models.transformer import Linear
from ridgeline.profiling.tracing import watching
from ridgeline.profiling.tracing.device_division import (
    KernelLabel,
    by_events,
    divide_device,
    labelled,
    owners,
)
from ridgeline.profiling.tracing.division import UNKNOWN, Division
from ridgeline.profiling.tracing.scopes import PREFIX, ScopeCall
from ridgeline.profiling.tracing.trace import STEP, DeviceEvent, read_trace

MICRO = 1e-6
LINEAR = Linear(4, 4, bias=False)
CALLS = [
    ScopeCall(0, "", "module", (), None, nn.Identity()),
    ScopeCall(1, "layers.0.attn.qkv", "module", (1, 4), None, LINEAR),
    ScopeCall(2, "decode_attention", "op", (1, 4, 4)),
    ScopeCall(3, "layers.1.attn.qkv", "module", (1, 4), None, LINEAR),
    ScopeCall(4, "sampling", "op", (1, 10)),
]
# Of one step: which call launches, the kernel, how long it runs (µs).
KERNELS = [(1, "product", 40.0), (2, "attend", 20.0), (3, "product", 40.0), (4, "choose", 5.0)]


def row(category: str, name: str, begin: float, duration: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": duration, "args": args}


class Fake:
    """Writes traces as torch.profiler does. Times in µs."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 0}]
        self.now = self.device = 1000.0
        self.number = 0

    def kernel(self, name: str, duration: float, gap: float, correlation: int) -> None:
        begin = max(self.device + gap, self.now)
        self.rows.append(
            row("kernel", name, begin, duration, correlation=correlation,
                **{"est. achieved occupancy %": 50})
        )  # fmt: skip
        self.device = begin + duration

    def copy(self, duration: float, gap: float) -> None:
        correlation = self.launch("cudaMemcpyAsync")
        begin = max(self.device + gap, self.now)
        self.rows.append(row("gpu_memcpy", "Memcpy HtoD", begin, duration, correlation=correlation))
        self.device = begin + duration

    def launch(self, name: str = "cudaLaunchKernel") -> int:
        self.number += 1
        category = "cuda_driver" if name.startswith("cu") and name[2].isupper() else "cuda_runtime"
        self.rows.append(row(category, name, self.now, 2.0, correlation=self.number))
        self.now += 3.0
        return self.number

    def eager_step(self, gap: float = 2.0, lead: float = 10.0) -> None:
        """Launched one by one under scopes; each product by Triton's driver call."""
        begin = self.now
        scopes = []
        self.copy(3.0, lead)
        for call, name, duration in KERNELS:
            start = self.now
            self.kernel(name, duration, gap, self.launch("cuLaunchKernelEx"))
            scopes.append(row("user_annotation", f"{PREFIX}{call}", start, self.now - start))
        self.rows += scopes
        self.rows.append(row("user_annotation", STEP, begin, self.now - begin))
        self.now += 50.0

    def graph_step(self, gap: float = 1.0, lead: float = 10.0, extra: str | None = None) -> None:
        begin = self.now
        self.copy(3.0, lead)
        forward = self.launch("cudaGraphLaunch")
        for _, name, duration in KERNELS[:3]:
            self.kernel(name, duration, gap, forward)
        if extra is not None:
            self.kernel(extra, 7.0, gap, forward)
        self.kernel("choose", 5.0, gap, self.launch("cudaGraphLaunch"))
        self.rows.append(row("user_annotation", STEP, begin, self.now - begin))

    def document(self) -> dict[str, Any]:
        return {"traceEvents": self.rows}


def by_hand() -> list[KernelLabel]:
    fake = Fake()
    fake.eager_step()
    fake.eager_step()
    return labelled(read_trace(fake.document()))


def test_kernels_launched_one_by_one_belong_to_the_scope_of_their_launch() -> None:
    trace = read_trace(_eager().document())
    assert trace.num_steps == 4
    kernels = [event for event in trace.events if not event.is_copy]
    assert [event.scope for event in kernels[:4]] == [1, 2, 3, 4]
    assert [event.step for event in trace.events[:5]] == [0] * 5
    assert kernels[0].occupancy == 0.5
    assert not any(event.in_graph for event in trace.events)


def _eager(**about: float) -> Fake:
    fake = Fake()
    for _ in range(4):
        fake.eager_step(**about)
    return fake


def test_the_innermost_scope_counts_while_it_is_open() -> None:
    """0 around 1 and 2: what is launched between those is 0's, and nobody's behind it."""
    spans = {0: (100.0, 200.0), 1: (110.0, 130.0), 2: (150.0, 170.0)}
    rows = [row("user_annotation", f"{PREFIX}{n}", a, b - a) for n, (a, b) in spans.items()]
    moments = (105.0, 120.0, 140.0, 160.0, 180.0, 210.0)
    for number, moment in enumerate(moments):
        rows.append(row("cuda_runtime", "cudaLaunchKernel", moment, 1.0, correlation=number))
        rows.append(row("kernel", "k", 300.0 + number, 0.5, correlation=number))
    events = read_trace({"traceEvents": rows}).events
    assert [event.scope for event in events] == [0, 1, 0, 2, 0, None]


def test_a_step_without_graphs_adds_up() -> None:
    step_s = 140 * MICRO
    division = divide_device(read_trace(_eager().document()), [], CALLS, step_s)
    assert division.total_s == pytest.approx(step_s, rel=0.03)
    assert division.parts["matrices"] == pytest.approx(80 * MICRO)
    assert division.parts["attention"] == pytest.approx(20 * MICRO)
    assert division.parts["other kernels"] == pytest.approx(5 * MICRO)
    assert division.copies_s == pytest.approx(3 * MICRO)
    # 108 µs of work in 140: the other 32 were waited, 4 gaps of 2 to a lead of 10 in the trace.
    assert division.gaps_s == pytest.approx(32 * MICRO * 8 / 18)
    assert division.host_s == pytest.approx(32 * MICRO * 10 / 18)
    assert division.busy_s == pytest.approx(108 * MICRO)
    names = {op.name: op for op in division.ops}
    assert names["layers.*.attn.qkv"].num_calls == 2
    assert names["layers.*.attn.qkv"].kernels[0].count == 2
    assert division.num_kernels == 4
    assert division.notes == ()


def test_kernels_of_graphs_are_told_apart_by_their_order() -> None:
    fake = Fake()
    for _ in range(4):
        fake.graph_step()
    trace = read_trace(fake.document())
    assert all(event.in_graph for event in trace.events if not event.is_copy)
    step_s = 125 * MICRO
    division = divide_device(trace, by_hand(), CALLS, step_s)
    seconds = {op.name: op.seconds / MICRO for op in division.ops}
    assert seconds == pytest.approx(
        {"layers.*.attn.qkv": 80.0, "decode_attention": 20.0, "sampling": 5.0}
    )
    assert division.gaps_s == pytest.approx(4 * MICRO)  # as the trace had them
    assert division.host_s == pytest.approx(step_s - 112 * MICRO)
    assert division.total_s == pytest.approx(step_s, rel=0.03)
    assert division.notes == ()


def test_a_kernel_that_nobody_knows_is_told_of() -> None:
    fake = Fake()
    for _ in range(3):
        fake.graph_step(extra="mystery")
    division = divide_device(read_trace(fake.document()), by_hand(), CALLS, 150 * MICRO)
    seconds = {op.name: op.seconds / MICRO for op in division.ops}
    assert seconds["layers.*.attn.qkv"] == pytest.approx(87.0)  # the op before it
    assert "1 kernels of a graph" in division.notes[0]
    assert division.total_s == pytest.approx(150 * MICRO)
    without = divide_device(read_trace(fake.document()), [], CALLS, 150 * MICRO)
    assert [op.name for op in without.ops] == [UNKNOWN]


def test_a_trace_that_is_slower_than_the_step_is_scaled() -> None:
    division = divide_device(read_trace(_eager().document()), [], CALLS, 54 * MICRO)
    assert division.total_s == pytest.approx(54 * MICRO)
    assert division.parts["matrices"] == pytest.approx(40 * MICRO)
    assert (division.gaps_s, division.host_s) == (0.0, 0.0)
    assert "100% longer in the trace" in division.notes[0]


def test_what_overlaps_counts_once() -> None:
    fake = Fake()
    for _ in range(3):
        fake.eager_step()
    attended = [each for each in fake.rows if each["name"] == "attend"]
    for each in attended:
        begin, correlation = each["ts"] + 1.0, each["args"]["correlation"]
        fake.rows.append(row("gpu_memcpy", "Memcpy", begin, 30.0, correlation=correlation))
    division = divide_device(read_trace(fake.document()), [], CALLS, 200 * MICRO)
    # It runs 11 µs beyond `attend`, and into the product behind that, which has less then.
    assert division.copies_s == pytest.approx((3 + 11) * MICRO)
    assert division.parts["matrices"] == pytest.approx((80 - 9) * MICRO)
    assert division.total_s == pytest.approx(200 * MICRO)


def test_owners_survive_kernels_that_are_missing() -> None:
    labels = by_hand()
    events = [
        DeviceEvent(name, number, number + 1, False, 0, None, True)
        for number, name in enumerate(("product", "product", "choose"))
    ]
    found, missed = owners(events, labels)
    assert missed == 0
    assert found[-1] == 4
    assert set(found[:2]) == {1, 3}


def test_kernels_beside_a_graph_have_owners_too() -> None:
    """A prompt in several steps: large ones launch by launch, the last a graph. No scope is open in
    the trace of it, as it runs; the labels are of all its kernels.
    """
    labels = by_hand() + by_hand() + [KernelLabel("nobody's", None)]
    names = [label.kernel for label in labels]
    events = [
        DeviceEvent(name, number, number + 1, False, 0, None, number >= len(KERNELS))
        for number, name in enumerate(names)
    ]
    found, missed = owners(events, labels)
    assert found == [1, 2, 3, 4, 1, 2, 3, 4, None]
    assert missed == 0
    beside = [DeviceEvent("unseen", -1, 0, False, 0, None, False), *events]
    found, missed = owners(beside, labels)
    assert (found[0], found[1:9], missed) == (None, [1, 2, 3, 4, 1, 2, 3, 4], 0)


def test_a_trace_without_steps_or_kernels_is_empty() -> None:
    assert read_trace({}).events == ()
    fake = Fake()
    fake.kernel("alone", 5.0, 1.0, correlation=99)  # launched by nobody that was seen
    assert read_trace(fake.document()).events[0].step is None
    division = divide_device(read_trace(fake.document()), [], CALLS, 1e-3)
    assert division.total_s == pytest.approx(1e-3)
    assert division.ops == ()


def test_events_around_steps_say_what_is_the_hosts() -> None:
    fake = Fake()
    fake.graph_step()
    fake.graph_step()
    traced = divide_device(read_trace(fake.document()), by_hand(), CALLS, 200 * MICRO)
    found = by_events(traced, 200 * MICRO, 110 * MICRO)
    assert found.busy_s == pytest.approx(traced.busy_s)
    assert found.host_s == pytest.approx(90 * MICRO)
    assert found.gaps_s == pytest.approx(110 * MICRO - traced.busy_s)
    assert found.notes == traced.notes
    short = by_events(traced, 200 * MICRO, traced.busy_s / 2)  # drawn out by the trace
    assert short.ops[0].seconds == pytest.approx(traced.ops[0].seconds / 2)
    assert (short.gaps_s, short.total_s) == pytest.approx((0.0, 200 * MICRO))
    assert "100% longer in the trace" in short.notes[-1]
    longer = by_events(replace(traced, gaps_s=0.1 * traced.busy_s), 500 * MICRO, 300 * MICRO)
    assert longer.busy_s == pytest.approx(300 * MICRO / 1.1)  # it does not wait for launches
    assert (longer.gaps_s, longer.host_s) == pytest.approx((30 * MICRO / 1.1, 200 * MICRO))
    waits = by_events(replace(traced, gaps_s=0.3 * traced.busy_s), 500 * MICRO, 300 * MICRO)
    assert waits.busy_s == pytest.approx(traced.busy_s)
    nothing = by_events(Division(1e-3, (), 0.0, 0.0, 0.0, 0), 1e-3, 4e-4)  # no kernel was seen
    assert (nothing.gaps_s, nothing.host_s) == pytest.approx((4e-4, 6e-4))
    whole = by_events(traced, 200 * MICRO, 230 * MICRO)  # steps that overlap
    assert (whole.host_s, whole.total_s) == pytest.approx((0.0, 200 * MICRO))


class Subject:
    """Steps of a GPU that is not here: what is asked of them is written down."""

    loop = "engine"
    device = torch.device("cuda")

    def __init__(self, monkeypatch: pytest.MonkeyPatch, replays: bool, in_graph: bool) -> None:
        self.model = nn.Identity()
        self.replays, self.in_graph, self.asked = replays, in_graph, []  # type: ignore[var-annotated]
        self.notes: Any = None
        self.is_by_hand = False
        monkeypatch.setattr(watching, "traced", self.traced)

    def noting(self, notes: Any) -> None:
        self.notes = notes

    def by_hand(self, yes: bool) -> bool:
        self.is_by_hand = yes
        return self.replays

    def step(self) -> None:
        """Calls as CALLS has them, by their names and numbers."""
        if self.notes is not None:
            for call in CALLS:
                self.notes.append(Note(call.name or "model", call.shape))
            self.notes.append(END)

    def traced(self, step: Any, num_steps: int, device: torch.device) -> dict[str, Any]:
        self.asked.append(("by hand" if self.is_by_hand else "as it runs", self.notes is not None))
        fake = Fake()
        for _ in range(num_steps):
            step()
            if self.in_graph and not self.is_by_hand:
                fake.graph_step()
            else:
                fake.eager_step()
        return fake.document()


@pytest.mark.parametrize(
    ("replays", "in_graph", "asked"),
    [
        (True, True, [("as it runs", False), ("by hand", True)]),
        (True, False, [("as it runs", False), ("as it runs", True)]),  # graphs, not of this step
        (False, False, [("as it runs", True)]),
    ],
)
def test_steps_on_a_gpu_are_watched_as_they_run(
    monkeypatch: pytest.MonkeyPatch, replays: bool, in_graph: bool, asked: list[tuple[str, bool]]
) -> None:
    subject: Any = Subject(monkeypatch, replays, in_graph)
    division, calls, documents = watching.watched(subject, subject.step, 140 * MICRO)
    assert subject.asked == asked
    assert (subject.notes, subject.is_by_hand) == (None, False)
    assert [call.name for call in calls] == ["model", *(call.name for call in CALLS[1:])]
    named = {op.name: op.seconds / MICRO for op in division.ops}
    assert named["decode_attention"] == pytest.approx(20.0)
    assert named["layers.*.attn.qkv"] == pytest.approx(80.0)
    assert division.total_s == pytest.approx(140 * MICRO, rel=0.03)
    assert division.notes == ()
    names = {each["name"] for document in documents for each in document["traceEvents"]}
    assert "decode_attention" in names


def test_a_captured_step_can_be_run_launch_by_launch() -> None:
    """Not replayed, with the notes that the runner was given."""
    key, choice = PassKind(StepShape(1, 1, 0, 1), 1024), SamplingKind(filtered=False, keeps=True)
    graphs: Any = object.__new__(Graphs)
    replayed: list[str] = []
    graph = SimpleNamespace(replay=lambda: replayed.append("graph"))
    graphs.captured = {key: SimpleNamespace(forward=graph, samplers={choice: (graph, "tokens")})}
    graphs.work = SimpleNamespace(notes=["noted"], choose=lambda *given: ("chosen", *given[2:]))
    graphs.logits_RV = torch.zeros(4, 2)
    graphs.compute = lambda key, inputs, notes: ("logits", notes)
    graphs.by_hand = True
    assert graphs.replay(key, None, choice) == (("logits", ["noted"]), ("chosen", choice))
    assert not replayed
    graphs.by_hand = False
    assert graphs.replay(key, None, choice)[1] == "tokens"
    assert replayed == ["graph", "graph"]
