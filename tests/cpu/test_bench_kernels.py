"""What the kernel benchmark makes of its timings; the timing itself needs a GPU (tests/gpu)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ridgeline.bench.kernels import ops as bench
from ridgeline.bench.kernels.tune import tune_case
from ridgeline.cli import main
from ridgeline.cli.bench.kernels import cells, row_json
from ridgeline.hardware import Ceiling, detect
from ridgeline.kernels.cost import OpCost
from ridgeline.kernels.op import Case, ConfigSearch, Op
from ridgeline.kernels.skinny_linear.tune_space import SkinnyConfig
from ridgeline.timing import Timing

CEILINGS = {
    "copy_bandwidth": Ceiling(4e12, "B/s", "measured"),
    "read_bandwidth": Ceiling(5e12, "B/s", "measured"),
    "matrix_bf16": Ceiling(800e12, "FLOP/s", "measured"),
}
HARDWARE = replace(detect("cpu"), ceilings=CEILINGS, datasheet={})


def row(cost: OpCost, seconds: float) -> bench.KernelResult:
    share, bound = bench.share_of_ceiling(cost, seconds, HARDWARE)
    timing = Timing.from_samples([seconds])
    rates = (cost.bytes / seconds, cost.flops / seconds)
    return bench.KernelResult(
        "op", "case", timing, cost, *rates, share, bound, {"eager": 3e-5, "compile": 2e-5}, {}
    )


def test_the_ceiling_that_bounds_an_op_is_the_one_it_is_held_to() -> None:
    copies = row(OpCost(2e7, 2e7), 1e-5)
    assert (copies.bound, copies.share) == ("memory", pytest.approx(1.0))
    reads = row(OpCost(4e7, 1e3), 1e-5)  # next to nothing written: the read bandwidth counts
    assert reads.share == pytest.approx(0.8, rel=1e-3)
    computes = row(OpCost(1e6, 1e6, 4e9, "bf16"), 1e-5)
    assert (computes.bound, computes.share) == ("compute", pytest.approx(0.5))


def test_an_unknown_ceiling_gives_no_share() -> None:
    bare = replace(HARDWARE, ceilings={})
    assert bench.share_of_ceiling(OpCost(1.0, 1.0), 1.0, bare) == (None, "memory")


def test_the_best_baseline_is_the_one_compared_with() -> None:
    document = row_json(row(OpCost(2e7, 2e7), 1e-5))
    assert document["best_baseline"] == "compile"
    assert document["speedup"] == pytest.approx(2.0)
    assert cells(document)[1:] == ["10.0", "4.00 TB/s", "100.0%", "20.0 compile", "2.00x"]


def test_a_record_holds_ours_and_the_baselines() -> None:
    values = bench.as_record([row(OpCost(2e7, 2e7), 1e-5)], HARDWARE).values
    assert values["op case"].share_of_ceiling == pytest.approx(1.0)
    assert values["op case / compile"].value == 2e-5


def test_inputs_are_enough_sets_to_leave_the_cache() -> None:
    case = Case("x", lambda device, generator: {"x": torch.zeros(1 << 20)}, torch.float32)
    op = small_op(case)
    sets = bench.input_sets(case, op, replace(HARDWARE, l2_bytes=8 << 20))
    assert sum(inputs["x"].nbytes for inputs in sets) >= bench.COLD_FACTOR * (8 << 20) - (4 << 20)


def test_tuning_remembers_the_fastest(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path_factory.mktemp("cache")))
    case = Case("x", lambda device, generator: {"x": torch.zeros(1 << 20)}, torch.float32)
    ways = [SkinnyConfig("dot", 16, outputs, 64) for outputs in (16, 32, 64)]
    tried: list[int] = []

    def launch(x: torch.Tensor, config: SkinnyConfig | None = None) -> torch.Tensor:
        assert config is not None
        tried.append(config.block_o)
        return x

    def time_calls(
        function: object, sets: list[dict[str, object]], hardware: object, target_s: float
    ) -> Timing:
        function(**sets[0])  # type: ignore[operator]
        return Timing.from_samples([1e-5 * abs(tried[-1] - 33)])

    monkeypatch.setattr("ridgeline.bench.kernels.tune.time_calls", time_calls)
    op = replace(small_op(case), launch=launch, search=lambda x: ConfigSearch("op", "key", ways))
    tuned = tune_case(op, case, replace(HARDWARE, l2_bytes=1 << 20))
    assert tuned is not None
    assert tried == [16, 32, 64, 32]  # the fastest again, for this case's own time
    assert '"block_o": 32' in tuned.best
    tune_case(op, case, replace(HARDWARE, l2_bytes=1 << 20))
    assert tried == [16, 32, 64, 32, 32]  # the others are not timed again


def test_without_a_gpu_one_line_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    verbs = ["bench kernels", "bench sequences", "kernels tune", "kernels check"]
    for arguments in (verb.split() for verb in verbs):
        assert main(arguments) == 8
        shown = capsys.readouterr()
        assert shown.out == ""
        assert "GPU" in shown.err


def small_op(case: Case) -> Op:
    return Op(
        name="op",
        summary="",
        reference=lambda x: x,
        launch=lambda x: x,
        cost=lambda x: OpCost(x.nbytes, 0.0),
        small_cases=[case],
        cases=[case],
        bench_cases=[case],
        compile_cases=[case],
    )
