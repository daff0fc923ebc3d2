"""Rungs of a GPU's kind, as far as a CPU can show them: the hardware is said to be a GPU, calls run
on the host, rates come from a fake clock. And vision models through the whole climb.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import vision_bench
from module_climbs import Rate, SharedWeight, hardware, look_briefly, optimized, set_rates, statuses
from test_module_profile import traced, work
from torch import Tensor, fx, nn
from torch.nn import functional
from vision_bench import SMALL
from vision_models import Branches, SmallConvNet

from ridgeline.errors import UnsupportedError
from ridgeline.ladder.modules import OptimizedModule
from ridgeline.ladder.modules.forms.branches import critical_share, stream_plan
from ridgeline.ladder.modules.forms.branches import traced as traced_by_fx
from ridgeline.ladder.modules.forms.building import Example, build
from ridgeline.ladder.modules.forms.padding import PaddedLayer, pad_layers, paddable
from ridgeline.ladder.modules.forms.streams import StreamedModule
from ridgeline.ladder.modules.rungs import Candidate, applies
from ridgeline.profiling.modules import profile
from ridgeline.profiling.modules.alignment import OddLayer, advice, odd_layers
from ridgeline.profiling.modules.call_work import CallWork
from ridgeline.profiling.modules.changes import CHANGES
from ridgeline.profiling.modules.form import ModuleForm
from ridgeline.profiling.modules.gains import predict
from ridgeline.records import Record

PLAIN = ModuleForm()
NOT_ON_A_HOST = ("compile", "autotune", "graphs", "int8", "int4", "fp16", "autocast-fp16")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    look_briefly(tmp_path, monkeypatch)


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> Callable[[Rate], None]:
    return partial(set_rates, monkeypatch)


def on_gpu(module: nn.Module, inputs: Any, **options: Any) -> OptimizedModule:
    device = hardware("cuda", matrix_tf32=2e11, matrix_fp16=4e11)
    return optimized(module, inputs, **{"hardware": device, "skip": NOT_ON_A_HOST, **options})


def reasons(result: OptimizedModule) -> dict[str, str]:
    return {rung.name: rung.reason for rung in result.rungs}


# cudnn.benchmark.


class Watching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.settings = nn.Conv2d(8, 8, 3), list[bool]()

    def forward(self, x: Tensor) -> Tensor:
        self.settings.append(torch.backends.cudnn.benchmark)
        return self.conv(x)


def test_convolutions_are_timed_for_their_shapes(rates: Callable[[Rate], None]) -> None:
    rates(lambda form: 200.0 if form.cudnn_benchmark else 100.0)
    module, x = Watching().eval(), torch.randn(1, 8, 6, 6)
    result = on_gpu(module, x)
    assert statuses(result)["cudnn-benchmark"] == "kept"
    assert result.form.cudnn_benchmark
    result.module.settings.clear()
    result(x)
    assert result.module.settings == [True]
    assert torch.backends.cudnn.benchmark is False  # put back after the call
    assert "1 convolutions" in applied("cudnn-benchmark", module).reason


def test_where_no_convolution_is_timed(
    rates: Callable[[Rate], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rates(lambda form: 100.0)
    conv = nn.Conv2d(8, 8, 3).eval()
    assert reasons(optimized(conv, torch.randn(1, 8, 4, 4)))["cudnn-benchmark"].startswith("cuDNN")
    assert applied("cudnn-benchmark", nn.Linear(8, 8)).reason == "no convolution"
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    assert "on already" in applied("cudnn-benchmark", conv).reason


@pytest.mark.parametrize("form", [ModuleForm(cudnn_benchmark=True), ModuleForm(tf32=True)])
def test_what_is_switched_for_a_call_is_put_back_when_it_raises(form: ModuleForm) -> None:
    before = torch.backends.cudnn.benchmark, torch.backends.cuda.matmul.fp32_precision
    built = build(nn.Conv2d(8, 8, 3), form, Example((torch.randn(1, 8, 6, 6),), {}))
    with pytest.raises(RuntimeError, match="channels"):
        built(torch.randn(1, 7, 6, 6))
    assert before == (torch.backends.cudnn.benchmark, torch.backends.cuda.matmul.fp32_precision)


def applied(name: str, module: nn.Module, form: ModuleForm = PLAIN, **facts: Any) -> Any:
    given = replace(work(traced(1e-3), kind="cuda"), **facts)
    x = torch.randn(1, 16, 8, 8)
    return applies(CHANGES[name], Candidate(module, form, given, Example((x,), {}), {}))


# Sizes that 8 does not divide.


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.deep = nn.Conv2d(3, 10, 3, padding=1), nn.Conv2d(10, 16, 3, 2, bias=False)
        self.body, self.head = nn.Linear(16, 30), nn.Linear(30, 13)

    def forward(self, x: Tensor) -> Tensor:
        x = self.deep(functional.relu(self.stem(x))).mean((2, 3))
        return self.head(functional.relu(self.body(x)))


def test_odd_sizes_are_named_with_the_padding_that_mends_them() -> None:
    layers = odd_layers(Odd().named_modules())
    assert {path: layer.padded for path, layer in layers.items()} == {
        "stem": (8, 16), "deep": (16, 16), "body": (16, 32), "head": (32, 16),
    }  # fmt: skip
    assert advice(layers).startswith("stem: 3 × 10 (pad to 8 × 16); deep: 10 × 16 (pad to 16 × 16)")
    alike = nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9), nn.Linear(8, 8))
    assert advice(odd_layers(alike.named_modules())) == "0 and 1 more: 9 × 9 (pad to 16 × 16)"


def test_a_profile_names_odd_sizes_on_a_gpu() -> None:
    x = torch.randn(1, 3, 8, 8)
    notes = profile(Odd(), x, hardware=hardware("cuda"), steps=1).notes
    assert any("head: 30 × 13 (pad to 32 × 16)" in note for note in notes)
    assert not any("pad to" in note for note in profile(Odd(), x, hardware=hardware()).notes)


def test_odd_layers_are_padded_in_half_precision(rates: Callable[[Rate], None]) -> None:
    rates(lambda form: 100.0 * (2 if form.dtype else 1) * (1.5 if form.pad else 1))
    module, x = Odd().eval(), torch.randn(2, 3, 9, 9)
    result = on_gpu(module, x, max_error=0.05)
    assert statuses(result)["bf16"] == statuses(result)["pad"] == "kept"
    assert isinstance(result.module.head, PaddedLayer)
    assert result.module.head.inner.weight.shape == (16, 32)
    assert type(module.head) is nn.Linear
    torch.testing.assert_close(result(x), module(x), rtol=0.05, atol=0.05)


def test_fp32_needs_no_padding_but_is_told_of_it(rates: Callable[[Rate], None]) -> None:
    rates(lambda form: 100.0)
    result = on_gpu(Odd().eval(), torch.randn(1, 3, 8, 8))
    assert "in half precision pad them: stem: 3 × 10" in reasons(result)["pad"]
    on_cpu = optimized(Odd().eval(), torch.randn(1, 3, 8, 8))
    assert "a CPU takes any sizes: stem: 3 × 10 (pad to 8 × 16)" in reasons(on_cpu)["pad"]
    assert reasons(on_gpu(nn.Linear(8, 8), torch.randn(1, 8)))["pad"] == "8 divides all sizes"


def test_padded_layers_give_the_same() -> None:
    torch.manual_seed(0)
    for module, shape in (
        (nn.Linear(13, 21), (2, 5, 13)),
        (nn.Linear(16, 21, bias=False), (16,)),
        (nn.Linear(13, 16), (0, 13)),
        (nn.Conv2d(3, 5, (3, 2), 2, 1, dilation=2), (2, 3, 17, 11)),
        (nn.Conv2d(3, 5, 3, padding="same"), (3, 9, 9)),
    ):
        x = torch.randn(shape, dtype=torch.float64)
        module.double()
        padded = pad_layers(nn.Sequential(module))
        torch.testing.assert_close(padded(x), module(x), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(build(module, ModuleForm(pad=True), Example((x,), {}))(x),
                                   module(x), rtol=1e-12, atol=1e-12)  # fmt: skip


def test_what_is_not_padded() -> None:
    assert not paddable(nn.Conv2d(6, 6, 3, groups=2))
    assert not paddable(nn.Conv2d(3, 5, 3, padding=1, padding_mode="reflect"))
    attention = nn.MultiheadAttention(12, 2)
    assert not paddable(attention)  # it reads its projections' weights itself
    layer = nn.TransformerEncoderLayer(12, 2, 20, batch_first=True).eval()
    x = torch.randn(2, 5, 12)
    padded = build(layer, ModuleForm(grad=False, pad=True), Example((x,), {}))
    with torch.no_grad():
        torch.testing.assert_close(padded(x).clone(), layer(x), rtol=1e-5, atol=1e-5)
    stack = nn.TransformerEncoder(layer, 2).eval()
    padded = build(stack, ModuleForm(grad=False, pad=True), Example((x,), {}))
    with torch.no_grad():
        torch.testing.assert_close(padded(x).clone(), stack(x), rtol=1e-5, atol=1e-5)
    hooked = nn.Linear(12, 12)
    hooked.register_forward_hook(lambda module, inputs, out: out + 1)
    assert not paddable(hooked)


def test_odd_sizes_slow_half_precision_down() -> None:
    """Padding mends that, for the price of more work and of a copy of the inputs."""
    product = traced(0.0125, flops=1e9, num_bytes=1000)
    even = work(product, kind="cuda")
    slightly, much = OddLayer((1001, 1001), (1008, 1008)), OddLayer((3, 64), (8, 64))
    half, padded = ModuleForm(dtype="bf16"), ModuleForm(dtype="bf16", pad=True)
    tf32 = ModuleForm(tf32=True)

    def gain(given: CallWork, form: ModuleForm) -> float:
        return predict(given, ModuleForm(), form, CHANGES["bf16"]).speedup

    odd = replace(even, odd={"x": slightly})
    assert gain(odd, half) < 0.7 * gain(even, half)
    assert gain(odd, padded) == pytest.approx(gain(even, half), rel=0.02)
    assert gain(odd, tf32) == pytest.approx(gain(even, tf32))
    stem = replace(even, odd={"x": much})  # 2.7 times the work is more than the slow kernel takes
    assert gain(stem, padded) < gain(stem, half)


def test_padding_gains_no_more_than_the_roofline_allows() -> None:
    """A product that was measured in half precision, near its limit."""
    layer = {"x": OddLayer((1001, 1001), (1008, 1008))}
    near, far = (
        replace(work(traced(seconds, flops=1e9, num_bytes=1000, dtype="bf16"), kind="cuda"),
                odd=layer)
        for seconds in (0.003, 0.03)
    )  # fmt: skip
    change = CHANGES["pad"]
    gains = [predict(each, PLAIN, change.of(PLAIN), change).speedup for each in (near, far)]
    assert gains[0] < 1.1
    assert 1.4 < gains[1] < 1.6


def test_convolutions_gain_by_their_layout_and_their_distance_from_the_limit() -> None:
    conv = {"name": "aten.convolution", "flops": 1e9, "num_bytes": 10**7}
    near, far = (work(traced(seconds, **conv), kind="cuda") for seconds in (0.0112, 0.05))
    for name in ("cudnn-benchmark", "channels-last"):
        change = CHANGES[name]
        gains = [predict(each, PLAIN, change.of(PLAIN), change).speedup for each in (near, far)]
        assert 1.0 <= gains[0] < 1.02
        assert 1.03 < gains[1] < 1.3


# Inputs from the host.


def test_pinned_copies_are_for_inputs_of_the_host(rates: Callable[[Rate], None]) -> None:
    rates(lambda form: 100.0)
    module = nn.Linear(16, 8)
    result = optimized(module, torch.randn(1, 16))
    assert reasons(result)["pinned-inputs"] == "inputs are on the module's device already"
    answer = applied("pinned-inputs", module, host_input_bytes=3 * 2**20)
    assert answer.applies
    assert "3 MiB of inputs come from the host" in answer.reason


def test_copies_hide_behind_the_call_before() -> None:
    """1 ms of a 2 ms call: alone it is waited for, behind each other it is not."""
    links = {"h2d_pageable": 10e9, "h2d_pinned": 50e9}
    given = replace(work(traced(1e-3), kind="cuda", **links), host_input_bytes=10**7)
    change = CHANGES["pinned-inputs"]
    alone, queued = (
        predict(replace(given, is_queued=each), PLAIN, change.of(PLAIN), change).speedup
        for each in (False, True)
    )
    assert 0.9 < alone < 1.1
    assert queued == pytest.approx(2.0, rel=0.05)


# Branches.


def test_branches_are_found_and_run_as_the_module_does(rates: Callable[[Rate], None]) -> None:
    rates(lambda form: 150.0 if form.streams else 100.0)
    module, x = Branches().eval(), torch.randn(1, 16, 8, 8)
    result = on_gpu(module, x, skip=set(CHANGES) - {"streams"})  # no other layout: the same bits
    assert statuses(result)["streams"] == "kept"
    assert applied("streams", module).reason == "3 branches are independent"
    assert torch.equal(result(x), module(x))
    mask = torch.rand(1, 1, 8, 8)
    assert torch.equal(result(x, mask), module(x, mask))  # not what was traced: as it is
    assert torch.equal(result(x=x), module(x))


def test_a_chain_has_no_branches() -> None:
    assert applied("streams", SmallConvNet().eval()).reason.startswith("no branches")
    compiled = applied("streams", Branches().eval(), ModuleForm(compile="default"))
    assert compiled.reason == "torch.compile puts all kernels on one stream"
    answer = applied("compile", Branches().eval(), ModuleForm(streams=True))
    assert answer.change.of(ModuleForm(streams=True)) == ModuleForm(compile="default")


class InPlace(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.b, self.kind = nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 1), kind
        self.relu, self.cell = nn.ReLU(inplace=True), nn.LSTM(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.a(x), self.b(x)
        if self.kind == "method":
            a.add_(b)
        elif self.kind == "module":
            a = self.relu(a)
        elif self.kind == "function":
            a = functional.relu(a, inplace=True)
        elif self.kind == "operator":
            a += b
        elif self.kind == "item":
            a[0] = b[0]
        elif self.kind == "state":
            a = self.cell(a[0])[0]
        elif self.kind == "flow" and a.sum() > 0:
            a = a + 1
        return a + b


@pytest.mark.parametrize(
    "kind", ["method", "module", "function", "operator", "item", "state", "flow"]
)
def test_what_cannot_be_shown_to_be_independent_is_refused(kind: str) -> None:
    answer = applied("streams", InPlace(kind).eval())
    assert not answer.applies
    assert answer.reason.startswith("branches cannot be shown to be independent: ")


@pytest.mark.parametrize("form", [PLAIN, ModuleForm(scheme="int8"), ModuleForm(pad=True)])
def test_branches_that_begin_with_a_small_change(form: ModuleForm) -> None:
    """And those of our own layers, which torch.fx need not look into."""
    module = SharedWeight(500 if form.pad else 512).eval()
    example = Example((torch.randn(4, 500 if form.pad else 512),), {})
    streamed = build(module, replace(form, streams=True), example)
    assert isinstance(streamed._inner, StreamedModule)
    assert streamed._inner.plan.num_branches == 2
    assert torch.equal(streamed(*example.args), build(module, form, example)(*example.args))


class Keeping(nn.Module):
    """Keeps something of a call, and makes constants."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.b, self.kind = nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 1), kind
        self.hidden: Any = None
        self.all: list[Any] = []
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "value":
            self.hidden = self.a(x)
        elif self.kind == "list":
            self.all.append(self.a(x))
        elif self.kind == "count":
            self.count += 1
        return self.a(x) + self.b(x) * torch.tensor([2.0])


@pytest.mark.parametrize("kind", ["value", "list", "count", "constant"])
def test_the_original_is_as_it_was_after_tracing(kind: str) -> None:
    module = Keeping(kind).eval()
    before = dict(vars(module))
    answer = applied("streams", module)
    assert vars(module) == before
    assert module.all == []
    assert answer.applies == (kind == "constant")
    if kind != "constant":
        assert "its forward sets the attribute" in answer.reason


def test_arguments_that_are_no_tensors_hold_for_their_values() -> None:
    class Scaled(Branches):
        def forward(self, x: Tensor, scale: int = 1, up: bool = False) -> Tensor:  # type: ignore[override]
            return super().forward(x) * (scale if up else 1)

    module, x = Scaled().eval(), torch.randn(1, 16, 8, 8)
    streamed = StreamedModule(module, (x, 3), {"up": True})
    for args, keywords in (((x, 3), {"up": True}), ((x, 2), {"up": True}), ((x,), {"scale": 3})):
        assert torch.equal(streamed(*args, **keywords), module(*args, **keywords))


def test_streams_leave_the_longest_path() -> None:
    graph = traced_by_fx(Branches().eval(), (torch.randn(1, 16, 8, 8),), {}).graph
    seconds = {"one": 1.0, "three": 2.0, "before": 1.0, "five": 3.0, "join": 1.0}
    assert critical_share(graph, seconds, 10.0) == pytest.approx((10 - 8 + 5) / 10)
    given = replace(
        work(*(traced(1e-3, path=path) for path in seconds), kind="cuda"), critical_share=0.6
    )
    change = CHANGES["streams"]
    gain = predict(given, PLAIN, change.of(PLAIN), change).speedup
    assert gain == pytest.approx(1.0)  # nothing says that these ops leave room on the device
    small = {"flops": 1e3, "num_bytes": 10**4}
    ops = (traced(1e-3, path=path, **small) for path in seconds)
    given = replace(work(*ops, kind="cuda"), critical_share=0.6)
    assert predict(given, PLAIN, change.of(PLAIN), change).speedup == pytest.approx(1 / 0.6)


def test_training_and_loose_arguments_are_refused() -> None:
    class Loose(nn.Module):
        def forward(self, *inputs: Tensor) -> Tensor:
            return inputs[0]

    x = torch.randn(1, 16, 8, 8)
    one_training = Branches().eval()
    one_training.three.train()
    for module, args, words in (
        (Branches().train(), (x,), "training mode"),
        (one_training, (x,), "training mode"),
        (Loose().eval(), (x,), "any number of arguments"),
        (Branches().eval(), (x, [x]), "the argument mask is a list"),
    ):
        with pytest.raises(UnsupportedError, match=words):
            traced_by_fx(module, args, {})


def random_graph(seed: int) -> fx.GraphModule:
    """Products and sums of earlier values, at random."""
    choose = random.Random(seed)
    root, graph = nn.Module(), fx.Graph()
    values = [graph.placeholder("x")]
    for number in range(choose.randint(1, 25)):
        inputs = [choose.choice(values) for _ in range(choose.randint(1, 3))]
        if choose.random() < 0.5:
            root.add_module(f"l{number}", nn.Linear(4, 4))
            values.append(graph.call_module(f"l{number}", (inputs[0],)))
        elif len(inputs) > 1:
            values.append(graph.call_function(torch.add, (inputs[0], inputs[1])))
        else:
            values.append(graph.call_method("relu", (inputs[0],)))
    graph.output(tuple(values[-3:]))
    return fx.GraphModule(root, graph).eval()


@pytest.mark.parametrize("seed", range(40))
def test_every_value_is_waited_for_by_who_reads_it_elsewhere(seed: int) -> None:
    graph = random_graph(seed)
    plan = stream_plan(graph)
    streams = plan.streams
    ended: set[fx.Node] = set()
    for step in plan.steps:
        assert set(step.node.all_input_nodes) <= ended  # in an order that is possible
        elsewhere = {n for n in step.node.all_input_nodes if streams[n] != step.stream}
        assert set(step.waits_for) == elsewhere
        assert step.is_awaited == any(streams[user] != step.stream for user in step.node.users)
        ended.add(step.node)
    assert streams[plan.steps[-1].node] == 0  # the caller's stream has the result
    assert plan.num_streams <= 4
    x = torch.randn(3, 4)
    for given, expected in zip(StreamedModule(graph, (x,), {})(x), graph(x), strict=True):
        assert torch.equal(given, expected)


# Vision models.


@pytest.mark.parametrize("name", ["vit", "conv", "windowed"])
def test_vision_models_climb(name: str, rates: Callable[[Rate], None]) -> None:
    rates(lambda form: 100.0 + 20 * len(form.edit_from(ModuleForm())))
    case = SMALL[name]
    module, x = case.make().eval(), torch.randn(case.shape)
    expected = module(x).detach()
    for result in (
        optimized(module, x, max_error=0.05),
        on_gpu(module, x, max_error=0.05),
    ):
        assert "failed" not in statuses(result).values(), reasons(result)
        assert {"inference", "bf16"} <= {r.name for r in result.rungs if r.status == "kept"}
        assert statuses(result)["channels-last"] == "kept"
        assert (result(x) - expected).norm() / expected.norm() < 0.05
    assert result.form.cudnn_benchmark


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, case in SMALL.items() if case.has_peers])
def test_vision_models_beside_the_compiler(
    name: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """The benchmark for real, in small; figures are printed, the outputs and the record checked."""
    monkeypatch.undo()
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    options = "--small --mode default --limit 60 --rounds 5 --save"
    monkeypatch.setattr("sys.argv", ["vision_bench", name, *options.split(), str(tmp_path)])
    vision_bench.main()
    out = capsys.readouterr().out
    assert "what came of rungs for vision models" in out
    with capsys.disabled():
        print(f"\n{out}")
    path = next(tmp_path.glob(f"bench-modules-{name}-*.json"))
    record = Record.from_json(json.loads(path.read_text()))
    assert record.command[:3] == ("python", "-m", "vision_bench")
    left_out = "default: left out" in out  # as on a busy machine: it was not compiled in time
    for side in ("as given", "optimize") if left_out else ("as given", "default", "optimize"):
        assert record.values[f"{side}: a call"].value > 0
    assert record.values["optimize: error"].value < 0.02
    assert left_out or record.values["optimize over default"].unit == "x"
