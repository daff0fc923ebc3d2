"""Profiles on a CPU: parts add up, work is counted once, scopes leave nothing behind."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import engine_for, tiny

from ridgeline.engine import Sampling
from ridgeline.engine.execution.step_watch import StepWatch, WatchedStep
from ridgeline.errors import ContextLengthError, OutOfMemoryError, OutputError, UsageError
from ridgeline.hardware import Hardware, detect
from ridgeline.hardware.facts import Ceiling
from ridgeline.models.cost import Chunk, step_cost
from ridgeline.profiling import model_profile
from ridgeline.profiling.dividing import divided
from ridgeline.profiling.model_profile import (
    StepProfile,
    profile_decode,
    profile_prefill,
)
from ridgeline.profiling.predicting.situation import phases_of
from ridgeline.profiling.tracing.host_division import divide_host
from ridgeline.profiling.tracing.plain_stepping import NaiveSteps
from ridgeline.profiling.tracing.scopes import ClockMarks, ScopeCall, Scopes, ScopeSpan
from ridgeline.profiling.tracing.stepping import EngineSteps, _of_one_graph
from ridgeline.profiling.tracing.trace import STEP
from ridgeline.profiling.tracing.tracing import save_trace
from ridgeline.recipe import Recipe, with_auto
from ridgeline.timing import Timing, time_loop

READ, MATRIX = 1e10, 1e11


def hardware() -> Hardware:
    ceilings = {
        "read_bandwidth": Ceiling(READ, "B/s", "measured"),
        "matrix_fp32": Ceiling(MATRIX, "FLOP/s", "measured"),
    }
    return replace(detect("cpu"), ceilings=ceilings)


def plain(name: str = "llama-tied") -> NaiveSteps:
    model = tiny(name)
    recipe = with_auto(Recipe(kernels="reference"), model.config, torch.float32, "cpu")
    return NaiveSteps(model, recipe)


def assert_adds_up(found: StepProfile) -> None:
    parts = found.division.parts
    assert sum(parts.values()) == pytest.approx(found.step_s, rel=0.03)
    assert min(parts.values()) >= 0.0
    assert all(parts[name] > 0 for name in ("matrices", "attention", "other kernels", "host"))
    assert parts["gaps"] > 0
    assert parts["copies"] == 0.0
    shares = sum(each.share_of_step for each in found.placed)
    waits = (found.division.gaps_s + found.division.host_s) / found.step_s
    assert shares + waits == pytest.approx(1.0, rel=0.03)


@pytest.mark.parametrize("kernels", ["reference", "fused"])
def test_parts_of_the_engines_steps_add_up(kernels: Any) -> None:
    engine = engine_for(tiny("llama-tied"), kernels=kernels)
    subject = EngineSteps(engine)
    decode = profile_decode(subject, hardware(), batch=3, context=60, num_steps=8)
    assert_adds_up(decode)
    assert decode.timing.num_samples == 8
    expected = step_cost(engine.model.config, [Chunk(1, 59)] * 3, weight_bytes=4, kv_bytes=4)
    assert decode.cost == expected
    calls = {each.op.name: each.op.num_calls for each in decode.placed}
    assert calls["layers.*.attn.qkv"] == calls["layers.*.mlp.down"] == 3
    assert calls["head"] == calls["norm"] == calls["sampling"] == 1
    prefill = profile_prefill(subject, hardware(), batch=3, length=50, num_steps=3)
    assert_adds_up(prefill)
    assert prefill.label == "prefill, 3 x 50 tokens in 3 steps"
    assert prefill.num_tokens == 150
    assert prefill.division.parts["matrices"] > 0
    assert not engine.has_work
    assert engine.stats.num_pages_used == 0


def test_parts_of_the_plain_loop_add_up() -> None:
    decode = profile_decode(plain(), hardware(), context=60, num_steps=8)
    assert_adds_up(decode)
    assert "attention" in {each.op.name for each in decode.placed}
    prefill = profile_prefill(plain(), hardware(), length=40, num_steps=3)
    assert_adds_up(prefill)


@pytest.mark.sweep(keep=1)
@pytest.mark.parametrize("name", ["mixtral", "gemma3", "qwen3", "mistral-sliding"])
def test_other_families_are_divided_too(name: str) -> None:
    engine = engine_for(tiny(name), kernels="reference")
    found = profile_decode(EngineSteps(engine), hardware(), batch=2, context=30, num_steps=3)
    assert sum(found.division.parts.values()) == pytest.approx(found.step_s, rel=0.03)
    if name == "mixtral":
        assert any(each.op.name == "layers.*.mlp" and each.cost for each in found.placed)


def test_counted_work_is_the_models() -> None:
    """Products of all groups together are what models/cost.py says of the whole step."""
    engine = engine_for(tiny("llama-tied"), kernels="reference")
    found = profile_decode(EngineSteps(engine), hardware(), batch=4, context=40, num_steps=3)
    products = [p for p in found.placed if p.op.part == "matrices"]
    assert sum(p.cost.flops for p in products if p.cost) == found.cost.matrix_flops
    attention = next(p for p in found.placed if p.op.part == "attention")
    assert attention.cost is not None
    assert attention.cost.flops == found.cost.attention_flops
    assert attention.cost.bytes > found.cost.kv_read_bytes
    costs = {p.op.name: p.cost for p in found.placed}
    config, dim = engine.model.config, 4  # bytes of an element
    assert costs["sampling"] is not None
    assert costs["sampling"].read_bytes == 4 * config.vocab_size * dim
    assert costs["rotary_pages"] is not None
    assert costs["rotary_pages"].written_bytes == 3 * 4 * (config.q_size + 2 * config.kv_size) * dim
    for placed in products:
        assert placed.memory_share == pytest.approx(placed.cost.bytes / placed.op.seconds / READ)  # type: ignore[union-attr]
        assert placed.share_of_ceiling == max(placed.memory_share, placed.matrix_share)  # type: ignore[type-var]


def test_quantized_weights_are_counted_as_codes() -> None:
    plain_engine = engine_for(tiny("llama-tied"), kernels="reference")
    engine = engine_for(tiny("llama-tied"), kernels="reference", scheme="int8")
    both = [
        profile_decode(EngineSteps(each), hardware(), context=30, num_steps=2)
        for each in (plain_engine, engine)
    ]
    full, codes = (
        next(p.cost.bytes for p in found.placed if p.op.name == "layers.*.mlp.gate_up" and p.cost)
        for found in both
    )
    assert 0.25 < codes / full < 0.35


def test_a_workloads_phases_are_divided() -> None:
    engine = engine_for(tiny("llama-tied"), num_pages=16)
    engine.runner.watch = watch = StepWatch(engine.runner.device)
    engine.generate([[5] * 20, [6] * 12], Sampling(max_tokens=6, ignore_eos=True))
    engine.runner.watch = None
    phases = phases_of(watch.steps)
    found = divided(EngineSteps(engine), phases).phases
    for before, after in zip(phases, found, strict=True):
        assert (before.step_s, before.work) == (after.step_s, after.work)
        assert sum(after.division.values()) == pytest.approx(after.step_s, rel=0.03)
        assert after.num_kernels
    too_many = replace(phases[1], work=replace(phases[1].work, rows=8.0, keys=800.0))
    assert divided(EngineSteps(engine), [too_many]).phases == (too_many,)


def test_the_context_is_the_one_asked_for() -> None:
    engine = engine_for(tiny("llama-tied"))
    seen = []
    with EngineSteps(engine).decoding(2, 60, 20) as step:
        time_loop(step, 20)
        seen = [len(engine.scheduler.known_tokens((("profile", row), 0))) for row in range(2)]
    assert all(60 < length < 75 for length in seen)
    assert not engine.has_work


@pytest.mark.parametrize(
    ("first", "context", "expected"),
    [(100, 130, 100), (988, 1024, 954), (1000, 1030, 1024), (1024, 1060, 1024), (5000, 5040, 5000)],
)
def test_steps_stay_with_one_graph(first: int, context: int, expected: int) -> None:
    """Decode graphs are made for lengths up to 1024, 4096, …"""
    found = _of_one_graph(first, context, 70)
    assert found == expected
    key = [
        next(b for b in (1024, 4096, 16384) if length <= b)
        for length in range(found + 1, found + 71)
    ]
    assert len(set(key)) == 1


def test_sequences_that_are_taken_up_one_after_the_other_all_decode() -> None:
    """The first ones make tokens while the last ones' prompts are planned, a few of them a step."""
    engine = engine_for(tiny("llama-mqa-bias"), budget=16)
    with EngineSteps(engine).decoding(batch=8, context=40, num_steps=3) as step:
        assert engine.scheduler.num_decoding == 8
        for _ in range(3):
            step()
        assert engine.scheduler.num_decoding == 8


def test_engines_answer_as_before_a_profile() -> None:
    """Pages with random numbers are nobody's afterwards."""
    engine = engine_for(tiny("llama-tied"), kernels="fused")
    prompt, sampling = [[7, 8, 9] * 8], Sampling(max_tokens=6, ignore_eos=True)
    before = engine.generate(prompt, sampling)[0].tokens
    profile_decode(EngineSteps(engine), hardware(), batch=8, context=60, num_steps=3)
    assert engine.generate(prompt, sampling)[0].tokens == before
    assert engine.runner.notes is None


def test_what_does_not_fit_is_refused() -> None:
    subject = EngineSteps(engine_for(tiny("llama-tied"), num_pages=8))
    with pytest.raises(OutOfMemoryError, match=r"--batch of at most 1"):
        profile_decode(subject, hardware(), batch=3, context=100, num_steps=2)
    with pytest.raises(ContextLengthError, match="at most 128"):
        profile_decode(subject, hardware(), context=500, num_steps=2)
    with pytest.raises(UsageError, match="max_batch is 8"):
        profile_decode(subject, hardware(), batch=9, context=10, num_steps=2)
    with pytest.raises(ContextLengthError, match="steps do not fit"):
        profile_decode(subject, hardware(), context=100, num_steps=300)
    with pytest.raises(ContextLengthError, match="129 tokens"):
        profile_prefill(subject, hardware(), length=128)
    with pytest.raises(UsageError, match="one sequence"):
        profile_decode(plain(), hardware(), batch=2, context=30)
    with pytest.raises(ContextLengthError, match="reaches 128"):
        profile_prefill(plain(), hardware(), length=128)


def test_scopes_close_in_their_order() -> None:
    ticks = iter(range(100))
    marks = ClockMarks(clock=lambda: float(next(ticks)))
    model = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Identity())
    scopes = Scopes(model, marks)
    with scopes.watching():
        model(torch.ones(2))
    assert [(call.name, call.kind) for call in scopes.calls] == [
        ("", "module"), ("0", "module"), ("1", "module"),
    ]  # fmt: skip
    spans = {span.call: (span.parent, span.begin, span.end) for span in marks.spans}
    assert spans == {0: (None, 0, 5), 1: (0, 1, 2), 2: (0, 3, 4)}
    model(torch.ones(2))
    assert len(scopes.calls) == 3


def test_a_hosts_step_is_divided_by_its_clock() -> None:
    """4 s of a step: 1 outside the model, 3 in it, of which 2 in its op."""
    calls = [
        ScopeCall(0, "", "module", (), None, torch.nn.Sequential(torch.nn.Identity())),
        ScopeCall(1, "prefill_attention", "op", (1,)),
    ]
    spans = [ScopeSpan(1, 0, 1.5, 3.5), ScopeSpan(0, None, 1.0, 4.0)]
    found = divide_host(spans, calls, [(0.0, 4.0)], step_s=2.0)
    assert found.parts["attention"] == pytest.approx(1.0)
    assert found.gaps_s == pytest.approx(0.5)
    assert found.host_s == pytest.approx(0.5)
    assert found.total_s == pytest.approx(2.0)
    assert found.notes == ("steps took +100% when they were watched; all parts are scaled",)


def _steps(count: int, padding: str) -> dict[str, Any]:
    rows: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 1}]
    for number in range(count):
        begin = 100.0 * number
        about = {"ph": "X", "ts": begin, "dur": 90.0}
        rows.append({**about, "name": STEP, "cat": "user_annotation"})
        rows.append({**about, "ts": begin + 1, "name": padding, "cat": "cpu_op"})
    return {"traceEvents": rows}


def test_a_trace_too_large_loses_whole_steps(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    assert save_trace([_steps(3, "x")], path) is None
    whole = path.stat().st_size
    note = save_trace([_steps(3, "x" * 1000)], path, max_bytes=2 * 1000 + whole)
    assert note is not None
    assert "1 of 3 traced steps are left out" in note
    kept = json.loads(path.read_text())["traceEvents"]
    assert sum(each["name"] == STEP for each in kept) == 2
    assert sum(each["name"] == "x" * 1000 for each in kept) == 2
    assert kept[0]["ph"] == "M"
    assert path.stat().st_size <= 2 * 1000 + whole
    with pytest.raises(OutputError, match="one step's trace"):
        save_trace([_steps(3, "x" * 1000)], path, max_bytes=500)


@pytest.mark.parametrize("can_be_watched", [True, False])
def test_a_gpu_is_at_all_pieces_of_a_step(
    can_be_watched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt in two steps, three times; once the device was slow."""

    class Gpu:
        device = torch.device("cuda", 0)
        watch: Any = None

        def watched_by(self, watch: Any) -> bool:
            self.watch = watch
            return can_be_watched

    subject: Any = Gpu()
    own_s = iter([1.0, 2.0, 10.0, 3.0, 1.5, 2.5])

    def run() -> None:
        for began in (0.0, 100.0):
            subject.watch.steps.append(WatchedStep(None, began, began + next(own_s)))  # type: ignore[arg-type]

    def timed(step: Any, num_steps: int, device: torch.device) -> Timing:
        for _ in range(num_steps):
            step()
        return Timing(5.0, 5.0, 5.0, 5.0, num_steps)

    monkeypatch.setattr(model_profile, "time_loop", timed)
    timing, device_s = model_profile._timed(subject, run, 3, 2)
    assert timing.median_s == 5.0
    assert device_s == (4.0 if can_be_watched else None)
    assert subject.watch is None
