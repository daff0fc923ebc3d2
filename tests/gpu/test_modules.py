"""Profiles and the ladder of foreign modules on a GPU: kernels found by their ops, graphs, tf32,
16-bit weights and codes. Small modules; how much faster they get is for the benchmark.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from module_climbs import SharedWeight
from torch import Tensor, nn
from vision_bench import GIVEN, LARGE, OURS, lines_of, timed_beside
from vision_models import Branches, SmallConvNet

from ridgeline.hardware import Hardware
from ridgeline.ladder.modules import optimize
from ridgeline.ladder.modules.forms.building import Example, build
from ridgeline.profiling.modules import profile
from ridgeline.profiling.modules.changes import CHANGES
from ridgeline.profiling.modules.form import ModuleForm
from ridgeline.profiling.modules.run import measured


@pytest.fixture(scope="module")
def here() -> Hardware:
    return measured(torch.device("cuda:0"))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: Hardware) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.down = (
            nn.LayerNorm(512),
            nn.Linear(512, 2048),
            nn.Linear(2048, 512),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def block() -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(4))).eval().to("cuda")


def test_kernels_are_found_by_their_ops(here: Hardware) -> None:
    x = torch.randn(256, 512, device="cuda")
    result = profile(block(), x, hardware=here)
    products = [row for row in result.rows if row.op == "aten.addmm"]
    assert len(products) == 8
    assert all(row.kernels and row.seconds > 0 and row.share_of_limit for row in products)
    assert result.flops == 4 * 2 * 2 * 256 * 512 * 2048
    assert result.num_kernels >= 4 * 5
    assert sum(result.division.values()) == pytest.approx(result.call.median_s, rel=0.03)
    known = sum(row.seconds for row in result.rows if row.path != "(outside modules)")
    kernels = sum(result.division[key] for key in ("matrices", "attention", "other kernels"))
    assert known == pytest.approx(kernels, rel=0.03)
    assert result.division["matrices"] > 0
    assert result.peak_bytes is not None


def test_backward_kernels_belong_to_their_modules(here: Hardware) -> None:
    model, x = block(), torch.randn(64, 512, device="cuda")

    def step() -> None:
        model(x).square().mean().backward()

    result = profile(step, hardware=here, device="cuda")
    rows = [row for row in result.rows if row.phase == "backward" and row.op == "aten.mm"]
    assert {row.path for row in rows} >= {f"model.{i}.up" for i in range(4)}
    assert all(row.kernels for row in rows)


def test_a_graph_gives_what_the_module_gives() -> None:
    module, x = block(), torch.randn(8, 512, device="cuda")
    example = Example((x,), {})
    built = build(module, ModuleForm(grad=False, graphs=True), example)
    other = torch.randn_like(x)
    first, second = built(x), built(other)
    with torch.no_grad():
        torch.testing.assert_close(first, module(x))  # not overwritten by the second call
        torch.testing.assert_close(second, module(other))
        longer = torch.randn(9, 512, device="cuda")
        torch.testing.assert_close(built(longer), module(longer))  # without the graph


def test_what_is_replayed_is_told_by_its_kernels(here: Hardware) -> None:
    module, x = block(), torch.randn(8, 512, device="cuda")
    built = build(module, ModuleForm(grad=False, graphs=True), Example((x,), {}))
    result = profile(built, x, hardware=here)
    assert any("replayed from a graph" in note for note in result.notes)
    assert sum(row.seconds for row in result.rows) > 0


@pytest.mark.parametrize("for_", ["latency", "throughput"])
def test_a_climb(here: Hardware, for_: Any, tmp_path: Path, alone: Callable[[], bool]) -> None:
    module, x = block(), torch.randn(1, 512, device="cuda")
    with torch.no_grad():
        expected = module(x)
    precision = torch.backends.cuda.matmul.fp32_precision
    result = optimize(
        module, x, for_=for_, max_error=0.02, skip=("compile", "autotune"), hardware=here,
        round_s=0.05,
    )  # fmt: skip
    statuses = {rung.name: rung.status for rung in result.rungs}
    assert "failed" not in statuses.values(), [(r.name, r.reason) for r in result.rungs]
    assert statuses["graphs"] in ("kept", "dropped")
    if alone():
        assert statuses["graphs"] == "kept"  # 20 launches of a few microseconds each
        assert result.speedup is not None
        assert result.speedup.low > 1.0
    assert result.form.graphs == (statuses["graphs"] == "kept")
    error = (result(x) - expected).norm() / expected.norm()
    assert error < 0.02
    assert torch.backends.cuda.matmul.fp32_precision == precision
    assert next(module.parameters()).dtype == torch.float32
    assert result.report(tmp_path / "report.html").stat().st_size > 0


def test_a_climb_with_the_compiler(here: Hardware) -> None:
    """What is kept is compiled again in every form that is tried, so only few are."""
    module, x = block(), torch.randn(64, 512, device="cuda")
    skip = set(CHANGES) - {"inference", "compile", "bf16", "graphs"}
    result = optimize(module, x, skip=skip, hardware=here, round_s=0.05)
    statuses = {rung.name: rung.status for rung in result.rungs}
    assert statuses["compile"] in ("kept", "dropped"), [(r.name, r.reason) for r in result.rungs]
    with torch.no_grad():
        torch.testing.assert_close(result(x), module(x), rtol=0.05, atol=0.05)


def test_a_convolution_with_channels_last(here: Hardware) -> None:
    module = nn.Sequential(nn.Conv2d(8, 32, 3), nn.BatchNorm2d(32), nn.ReLU()).eval().to("cuda")
    x = torch.randn(4, 8, 32, 32, device="cuda")
    built = build(module, ModuleForm(grad=False, layout="channels_last", dtype="fp16"),
    Example((x,), {}),
                  torch.float32)  # fmt: skip
    with torch.no_grad():
        torch.testing.assert_close(built(x), module(x), rtol=0.02, atol=0.02, check_stride=False)
    assert module[0].weight.is_contiguous()


def test_branches_on_streams_give_what_the_module_gives() -> None:
    module = Branches().eval().to("cuda")
    inputs = [torch.randn(2, 16, 64, 64, device="cuda") for _ in range(20)]
    example = Example((inputs[0],), {})
    with torch.no_grad():
        expected = [module(x) for x in inputs]
    for form in (
        ModuleForm(grad=False, streams=True),
        ModuleForm(grad=False, streams=True, graphs=True),
    ):
        built = build(module, form, example)
        for _ in range(5):  # memory is used again from call to call
            outputs = [built(x) for x in inputs]
            for given, wanted in zip(outputs, expected, strict=True):
                torch.testing.assert_close(given.clone(), wanted, rtol=1e-4, atol=1e-4)


def test_branches_share_weights_under_autocast() -> None:
    module, x = SharedWeight().eval().cuda(), torch.randn(64, 512, device="cuda")
    plain, streamed = (
        build(module, ModuleForm(autocast="bf16", streams=streams), Example((x,), {}))
        for streams in (False, True)
    )
    wanted = plain(x)
    for _ in range(50):
        torch.testing.assert_close(streamed(x), wanted, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("graphs", [False, True])
def test_convolutions_timed_by_cudnn(graphs: bool) -> None:
    """Timed while the graph is prepared, never while it is captured; the setting is put back."""
    module, x = SmallConvNet().eval().cuda(), torch.randn(2, 3, 64, 64, device="cuda")
    before = torch.backends.cudnn.benchmark
    form = ModuleForm(grad=False, cudnn_benchmark=True, layout="channels_last", graphs=graphs)
    built = build(module, form, Example((x,), {}))
    for given in (x, torch.randn_like(x), torch.randn(1, 3, 32, 32, device="cuda")):
        with torch.no_grad():
            # fp32 convolutions are in tf32 by default, by other kernels than without timing.
            torch.testing.assert_close(built(given).clone(), module(given), rtol=0.02, atol=0.02)
    assert torch.backends.cudnn.benchmark is before


def test_inputs_of_the_host_come_by_pinned_memory(here: Hardware) -> None:
    """Written again by the caller as soon as the call returns, with the device far behind."""
    module = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024)).eval().cuda()
    x = torch.randn(512, 1024)
    for form in (
        ModuleForm(grad=False, inputs="pinned"),
        ModuleForm(grad=False, inputs="pinned", graphs=True),
    ):
        built = build(module, form, Example((x,), {}))
        given = x.clone()
        outputs, kept = [], []
        for _ in range(30):
            given.normal_()
            kept.append(given.clone())
            outputs.append(built(given))
            given.zero_()
        with torch.no_grad():
            for out, host in zip(outputs, kept, strict=True):
                torch.testing.assert_close(out.clone(), module(host.cuda()), rtol=1e-3, atol=1e-3)
    skip = set(CHANGES) - {"inference", "pinned-inputs"}
    result = optimize(module, x, for_="throughput", skip=skip, hardware=here, round_s=0.05)
    statuses = {rung.name: rung.status for rung in result.rungs}
    assert statuses["pinned-inputs"] in ("kept", "dropped"), statuses


def test_padded_layers_in_half_precision() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(333, 1001), nn.ReLU(), nn.Linear(1001, 77)).eval().cuda()
    x = torch.randn(64, 333, device="cuda")
    plain, padded = (
        build(module, ModuleForm(grad=False, dtype="bf16", pad=pad), Example((x,), {}))
        for pad in (False, True)
    )
    torch.testing.assert_close(padded(x).clone(), plain(x).clone(), rtol=0.02, atol=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_vision_models_beside_the_compiler(
    name: str, here: Hardware, capsys: pytest.CaptureFixture[str], alone: Callable[[], bool]
) -> None:
    """Figures are printed beside those of torch.compile(mode="max-autotune") in the same run, which
    beside others has less time: its figures mean nothing then.
    """
    part_s = 120.0 if alone() else 30.0
    times = timed_beside(LARGE[name], torch.device("cuda:0"), here, part_s=part_s)
    assert times.errors[OURS] < 0.02
    with capsys.disabled():
        print("", *lines_of(name, times), sep="\n")
    if alone():
        assert times.speedup(OURS, over=GIVEN).high >= 1.0
