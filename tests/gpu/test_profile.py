"""Profiles on a GPU: every kernel has its op, inside graphs too, and the parts add up."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import engine_for
from test_gpu_tensor_parallel import engine_of_one, needs_two

from ridgeline.cli import main
from ridgeline.engine import Sampling
from ridgeline.hardware import Hardware, detect, measure
from ridgeline.models import Transformer, build_model, fill_random
from ridgeline.models.shapes import describe_shape
from ridgeline.profiling.model_profile import StepProfile, profile_decode, profile_prefill
from ridgeline.profiling.predicting.next_steps import what_next
from ridgeline.profiling.predicting.situation import situation_of
from ridgeline.profiling.tracing.division import UNKNOWN, KernelTime
from ridgeline.profiling.tracing.plain_stepping import NaiveSteps
from ridgeline.profiling.tracing.stepping import EngineSteps
from ridgeline.recipe import Parallel, Recipe, with_auto

LAYERS = 4


@pytest.fixture(scope="module")
def hardware() -> Hardware:
    """By its datasheet where that is known: ceilings that were measured while other processes used
    the GPU would be passed by whoever has it alone.
    """
    found = detect("cuda")
    return found if found.datasheet else measure(found, {"read_bandwidth", "matrix_bf16"})


def model() -> Transformer:
    config = describe_shape("llama-3.2-1b", num_layers=LAYERS).config
    return fill_random(build_model(config, torch.bfloat16, "cuda"))


def engine(**recipe: Any) -> Any:
    about: dict[str, Any] = {"budget": 2048, "max_batch": 32, "num_pages": 600, "page_size": 64}
    return engine_for(model(), **about, **recipe)


def assert_divided(found: StepProfile) -> None:
    assert sum(found.division.parts.values()) == pytest.approx(found.step_s, rel=0.03)
    assert min(found.division.parts.values()) >= 0.0
    unknown = [kernel for kernel in kernels_of(found, UNKNOWN) if kernel.count >= 1]
    assert len(unknown) <= 4, [kernel.name for kernel in unknown]  # rows gathered, tokens kept
    named = {op.name: op for op in found.division.ops}
    for name in ("qkv", "out"):
        assert named[f"layers.*.attn.{name}"].num_calls == LAYERS
    assert named["layers.*.mlp.down"].num_kernels >= LAYERS
    assert found.division.parts["attention"] > 0
    assert "head" in named
    assert "sampling" in named


def kernels_of(found: StepProfile, name: str) -> list[KernelTime]:
    return [kernel for op in found.division.ops if op.name == name for kernel in op.kernels]


def unknown_share(found: StepProfile) -> float:
    return sum(kernel.seconds for kernel in kernels_of(found, UNKNOWN)) / found.step_s


@pytest.mark.parametrize("batch", [1, 5, 32])
@pytest.mark.parametrize("graphs", [True, False])
def test_decode(hardware: Hardware, graphs: bool, batch: int, alone: Callable[[], bool]) -> None:
    found = profile_decode(
        EngineSteps(engine(graphs=graphs)), hardware, batch=batch, context=512, num_steps=20
    )
    assert_divided(found)
    assert found.share_of_limit is not None
    assert 0.0 < found.share_of_limit <= 1.05
    in_graphs = not any("launch by launch" in note for note in found.division.notes)
    assert in_graphs, found.division.notes
    if alone():
        assert found.share_of_limit > 0.05
        assert unknown_share(found) <= 0.03
        if graphs:
            assert found.division.parts["gaps"] < 0.5 * found.step_s


def test_graphs_take_gaps_away(hardware: Hardware, alone: Callable[[], bool]) -> None:
    both = [
        profile_decode(EngineSteps(engine(graphs=graphs)), hardware, context=256, num_steps=20)
        for graphs in (True, False)
    ]
    for found in both:
        assert_divided(found)
    if alone():
        waits = [found.division.gaps_s + found.division.host_s for found in both]
        assert waits[0] < waits[1]
        busy = [found.division.busy_s for found in both]
        assert busy[0] == pytest.approx(busy[1], rel=0.3)


def test_steps_that_wait_for_the_host(hardware: Hardware, alone: Callable[[], bool]) -> None:
    """Graphs whose next one is launched when the last one's tokens are there, and before that."""
    shares, advised = [], []
    for overlap in (False, True):
        used = engine(graphs=True, overlap=overlap)
        found = profile_decode(EngineSteps(used), hardware, context=256, num_steps=20)
        assert_divided(found)
        shares.append(found.division.host_s / found.step_s)
        situation = situation_of(used, hardware, [found.phase_time(100)])
        advised.append("--overlap" in [advice.flags for advice in what_next(situation)])
    if alone():
        assert shares[1] < shares[0]
        assert shares[0] > 0.05
        assert advised == [True, False]


@pytest.mark.parametrize(("batch", "length"), [(1, 100), (2, 1024), (3, 1500)])
def test_prefill(hardware: Hardware, batch: int, length: int, alone: Callable[[], bool]) -> None:
    """In a graph, in one step without, and in several, the last of them in a graph."""
    found = profile_prefill(
        EngineSteps(engine()), hardware, batch=batch, length=length, num_steps=4
    )
    assert sum(found.division.parts.values()) == pytest.approx(found.step_s, rel=0.03)
    named = {op.name: op for op in found.division.ops}
    num_steps = -(-batch * length // 2048)
    assert named["layers.*.mlp.down"].num_calls == num_steps * LAYERS
    if alone():
        assert found.division.parts["matrices"] > 0.2 * found.division.busy_s


@pytest.mark.parametrize("scheme", ["int8", "fp8", "int4-g128"])
def test_schemes(hardware: Hardware, scheme: str, alone: Callable[[], bool]) -> None:
    found = profile_decode(
        EngineSteps(engine(scheme=scheme)), hardware, batch=4, context=300, num_steps=10
    )
    assert_divided(found)
    product = next(p for p in found.placed if p.op.name == "layers.*.mlp.gate_up")
    assert product.cost is not None
    assert product.memory_share is not None
    config = describe_shape("llama-3.2-1b").config
    weights = LAYERS * 2 * config.hidden_size * config.mlp_size
    bytes_per_weight = 0.5 if scheme == "int4-g128" else 1.0
    assert 1.0 <= product.cost.bytes / (weights * bytes_per_weight) < 1.1  # scales, rows
    if alone():
        assert product.memory_share < 1.1


def test_the_plain_loop(hardware: Hardware) -> None:
    plain = model()
    recipe = with_auto(Recipe(kernels="reference"), plain.config, torch.bfloat16, "cuda:0")
    found = profile_decode(NaiveSteps(plain, recipe), hardware, context=300, num_steps=10)
    assert sum(found.division.parts.values()) == pytest.approx(found.step_s, rel=0.03)
    assert found.division.parts["attention"] > 0
    assert found.division.num_kernels > 10 * LAYERS


@pytest.mark.parametrize("graphs", [True, False])
def test_a_rank_alone(hardware: Hardware, graphs: bool) -> None:
    """Its calls go through NCCL, in graphs too; there is nobody to talk to."""
    about: dict[str, Any] = {"budget": 2048, "num_pages": 600, "page_size": 64, "graphs": graphs}
    with engine_of_one(model(), **about) as used:
        found = profile_decode(EngineSteps(used), hardware, batch=4, context=512, num_steps=20)
        assert sum(found.division.parts.values()) == pytest.approx(found.step_s, rel=0.03)
        assert {"head", "layers.*.attn.qkv"} <= {op.name for op in found.division.ops}


@needs_two
@pytest.mark.parametrize("graphs", [True, False])
def test_two_ranks(hardware: Hardware, graphs: bool) -> None:
    with engine(graphs=graphs, parallel=Parallel(tensor=2)) as used:
        found = profile_decode(EngineSteps(used), hardware, batch=4, context=512, num_steps=20)
    assert_divided(found)
    rows = {each.op.name: each for each in found.placed if each.op.part == "communication"}
    assert rows["all_reduce"].op.num_calls == 1 + 2 * LAYERS
    assert rows["all_reduce"].verdict == "communication"
    assert any("nccl" in kernel.name.lower() for kernel in rows["all_reduce"].op.kernels)


def test_answers_are_the_same_afterwards(hardware: Hardware) -> None:
    used = engine()
    prompt, sampling = [[7, 8, 9] * 8], Sampling(max_tokens=6, ignore_eos=True)
    before = used.generate(prompt, sampling)[0].tokens
    profile_decode(EngineSteps(used), hardware, batch=8, context=100, num_steps=5)
    assert used.generate(prompt, sampling)[0].tokens == before
    assert not used.runner.graphs.by_hand


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.json"
    command = ["profile", "--shape", "smollm2-135m", "--context", "200", "--prefill", "300"]
    command += ["--max-batch", "8", "--memory-share", "0.05", "--steps", "10", "--json"]
    assert main([*command, "--trace", str(trace), "--save", str(tmp_path), "--counters"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert trace.stat().st_size <= 50_000_000
    record = json.loads(Path(found["record"]).read_text())
    if record["clocks"] is not None:
        assert record["clocks"]["num_samples"] >= 1
    assert found["counters"] is not None or any("counters" in note for note in found["notes"])
