"""Profiles of a model on several ranks: what they say to each other has rows, bytes and a verdict,
and the parts still add up. Once with ranks that are processes over gloo, else with threads.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engines import tiny
from test_gains import BF16, GPU, decode, situation
from test_model_profile import MATRIX, READ, hardware
from thread_ranks import ThreadedEngine

from ridgeline.cli import main
from ridgeline.engine import Sampling
from ridgeline.engine.execution.work import cost_base
from ridgeline.hardware.facts import Ceiling
from ridgeline.kernels.cost import OpCost
from ridgeline.models.shapes import describe_shape
from ridgeline.parallel.degrees import rank_config
from ridgeline.profiling.model_profile import StepProfile, profile_decode, profile_prefill
from ridgeline.profiling.placing import judge_step, place
from ridgeline.profiling.predicting.gains import predict
from ridgeline.profiling.predicting.next_steps import what_next
from ridgeline.profiling.predicting.prediction import Situation
from ridgeline.profiling.roofline import of_one_rank
from ridgeline.profiling.tracing.communication import link_bytes
from ridgeline.profiling.tracing.division import Division, OpTime
from ridgeline.profiling.tracing.stepping import EngineSteps
from ridgeline.recipe import Parallel

BETWEEN = {"all_reduce", "all_gather", "broadcast"}
GREEDY = Sampling(max_tokens=6, ignore_eos=True)


@pytest.mark.slow
def test_two_processes_are_profiled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    command = ["profile", "--shape", "tiny", "--device", "cpu", "--dtype", "fp32", "--batch", "2"]
    command += ["--context", "60", "--prefill", "2x40", "--steps", "6", "--tensor-parallel", "2"]
    files = ["--html", str(tmp_path / "page.html"), "--save", str(tmp_path), "--counters"]
    assert main([*command, *files, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_ranks"] == 2
    assert found["form"] == "fp32, 2 ranks"
    config = describe_shape("tiny").config
    sums = 1 + 2 * config.num_layers
    for step, tokens in zip(found["steps"], (80, 2), strict=True):
        assert sum(step["totals"].values()) == pytest.approx(step["step_s"], rel=0.03)
        rows = {row["op"]: row for row in step["rows"] if row["part"] == "communication"}
        assert set(rows) == BETWEEN
        assert all(row["verdict"] == "communication" for row in rows.values())
        assert step["totals"]["communication"] == sum(row["seconds"] for row in rows.values()) > 0
        waits = sum(step["totals"][name] for name in ("copies", "gaps", "host"))
        times = sum(row["seconds"] for row in step["rows"])
        assert times + waits == pytest.approx(step["step_s"], rel=0.03)
        calls = {name: row["calls"] for name, row in rows.items()}
        assert calls == {"all_reduce": sums, "all_gather": 1, "broadcast": 1}
        assert rows["all_reduce"]["bytes"] == sums * tokens * config.hidden_size * 4
        assert rows["all_gather"]["bytes"] == 2 * config.vocab_size // 2 * 4
        assert rows["broadcast"]["bytes"] > 0
    edits = [each["edit"] for each in found["next"]]
    assert not any({"copies", "parallel.tensor"} & set(edit) for edit in edits)
    notes = " ".join(found["notes"])
    for words in ("rank 0 of 2", "2 ranks share this device", "no counters on several ranks"):
        assert words in notes
    assert "all_reduce" in (tmp_path / "page.html").read_text()
    assert "profile-tiny-fp32-engine-tensor-2" in found["record"]


@pytest.mark.slow
def test_people_see_what_ranks_say(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["profile", "--shape", "tiny", "--device", "cpu", "--context", "40", "--steps", "3"]
    assert main([*command, "--tensor-parallel", "2"]) == 0
    out = capsys.readouterr().out
    assert "2 ranks" in out
    assert "all_reduce" in out
    assert "communication" in out
    assert main(command) == 0
    assert "communication" not in capsys.readouterr().out


def profiles(engine: Any) -> list[StepProfile]:
    subject = EngineSteps(engine)
    return [
        profile_decode(subject, hardware(), batch=3, context=60, num_steps=4),
        profile_prefill(subject, hardware(), batch=3, length=50, num_steps=2),
    ]


@pytest.mark.sweep(keep=2)
@pytest.mark.parametrize("name", ["llama-tied", "mixtral", "gemma2"])
@pytest.mark.parametrize("size", [1, 2])
def test_parts_add_up_on_ranks(name: str, size: int) -> None:
    """Work is a rank's own: of the head, too."""
    with ThreadedEngine(tiny(name), size=size) as ranks:
        decode, prefill = profiles(ranks.engine)
        config = ranks.engine.model.config
        for found in (decode, prefill):
            assert sum(found.division.parts.values()) == pytest.approx(found.step_s, rel=0.03)
            assert found.division.parts["communication"] > 0
        rows = {each.op.name: each for each in decode.placed}
        assert rows["all_reduce"].op.num_calls == 1 + 2 * config.num_layers
        whole = 3 * config.hidden_size * 4 * (1 + 2 * config.num_layers)
        assert rows["all_reduce"].cost is not None
        assert rows["all_reduce"].cost.bytes == (whole if size == 2 else 0)
        products = [each.cost for each in decode.placed if each.op.part == "matrices"]
        if name != "mixtral":  # which counts experts by another rule
            assert sum(cost.flops for cost in products if cost) == decode.cost.matrix_flops
        assert not ranks.engine.has_work


def test_the_context_is_the_one_asked_for_on_ranks() -> None:
    """Prompts are computed, with a budget that takes them several steps."""
    with ThreadedEngine(tiny("llama-tied"), budget=24) as ranks:
        engine = ranks.engine
        with EngineSteps(engine).decoding(4, 60, 20) as step:
            for _ in range(10):
                step()
            keys = [(("profile", row), 0) for row in range(4)]
            lengths = [len(engine.scheduler.known_tokens(key)) for key in keys]
            assert all(45 <= length <= 64 for length in lengths), lengths
            for _ in range(10):
                step()
            assert engine.scheduler.num_decoding == 4  # none has ended before its time
        assert not engine.has_work


@pytest.mark.slow
def test_answers_are_the_same_afterwards() -> None:
    with ThreadedEngine(tiny("llama-tied")) as ranks:
        before = ranks.engine.generate([[7, 8, 9] * 8], GREEDY)[0].tokens
        link = ranks.groups[0].data
        profiles(ranks.engine)
        assert ranks.groups[0].data is link
        assert ranks.engine.runner.notes is None
        assert ranks.engine.generate([[7, 8, 9] * 8], GREEDY)[0].tokens == before


def test_a_rank_is_costed_by_what_it_holds() -> None:
    model = tiny("llama-tied")
    with ThreadedEngine(model) as ranks:
        engine = ranks.engine
        base = cost_base(engine.model, engine.recipe, hardware())
        assert base.config == rank_config(model.config, 2)
        assert engine.model.config.vocab_size == model.config.vocab_size


def test_bytes_on_the_link() -> None:
    assert link_bytes("all_reduce", 100.0, 2) == 100.0
    assert link_bytes("all_reduce", 100.0, 4) == 150.0
    assert link_bytes("all_gather", 100.0, 4) == 300.0
    assert link_bytes("broadcast", 100.0, 4) == 100.0
    assert {link_bytes(name, 100.0, 1) for name in BETWEEN} == {0.0}


def test_ranks_share_a_devices_rates() -> None:
    half = of_one_rank(hardware(), 2)
    assert half.ceilings["read_bandwidth"].value == READ / 2
    assert half.ceilings["matrix_fp32"].value == MATRIX / 2
    assert of_one_rank(GPU, 1) is GPU
    assert of_one_rank(GPU, 2).ceilings["eager_launch"] == GPU.ceilings["eager_launch"]


def test_communication_is_placed_under_the_link() -> None:
    op = OpTime("all_reduce", "communication", 1e-4, 65.0)
    sheet = {"link_bandwidth": Ceiling(9e11, "B/s", "datasheet")}
    found = place(op, OpCost(0.0, 9e6), 1e-3, replace(GPU, datasheet=sheet))
    assert (found.verdict, found.bytes_per_s) == ("communication", pytest.approx(9e10))
    assert found.share_of_ceiling == pytest.approx(0.2)  # of one way
    unknown = place(op, OpCost(0.0, 9e6), 1e-3, GPU)
    assert (unknown.verdict, unknown.share_of_ceiling) == ("communication", None)


def test_a_step_is_bound_by_its_ranks() -> None:
    ops = OpTime("x", "matrices", 0.5, 1.0), OpTime("all_reduce", "communication", 0.3, 1.0)
    verdict = judge_step("decode", Division(1.0, ops, 0.0, 0.1, 0.1, 2.0), 0.9, 0.1)
    assert verdict.kind == "communication"
    assert "30% of the time in communication" in verdict.sentence


def on_ranks(rows: int, communication_s: float, num_ranks: int = 2) -> Situation:
    """Of an 8B shape."""
    parts = {"matrices": 2e-3, "attention": 2e-4, "gaps": 1e-4, "communication": communication_s}
    phase = decode(rows, 1000, sum(parts.values()), **parts)
    found = situation(replace(BF16, parallel=Parallel(num_ranks)), phase, concurrency=float(rows))
    return replace(found, config=rank_config(found.config, num_ranks))


def test_predictions_know_of_communication() -> None:
    """It stays as it was where the same is sent, and what is won elsewhere counts for less."""
    quiet, talking = (predict(on_ranks(1, s), {"kv.dtype": "fp8"}).speedup for s in (0.0, 2e-3))
    assert 1.0 < talking < quiet
    changed = predict(on_ranks(64, 2e-2), {"dtype": "fp32"})
    assert "communication" in changed.why  # twice the bytes
    added = predict(on_ranks(1, 0.0, num_ranks=1), {"parallel.tensor": 2})
    assert 1.0 < added.speedup < 2.0


def test_short_sums_do_not_grow_with_the_batch() -> None:
    """Their time is that of a call, until they are long."""

    def grown(rows: int) -> float:
        given = replace(on_ranks(rows, 4e-3), concurrency=4.0 * rows)
        limits = replace(given.recipe.limits, max_batch=rows)
        given = replace(given, recipe=replace(given.recipe, limits=limits))
        return predict(given, {"limits.max_batch": 4 * rows}).speedup

    assert grown(1) > 2.0 > grown(512) > 1.0


def test_what_cannot_be_run_on_ranks_is_not_advised() -> None:
    def titles(given: Situation) -> str:
        return " ".join(advice.title for advice in what_next(given))

    assert "weights in int8" in titles(on_ranks(1, 0.0, num_ranks=1))
    assert "drafted" in titles(on_ranks(1, 0.0, num_ranks=1))
    assert "4 requests at once" in titles(on_ranks(1, 1e-3))
    assert "drafted" in titles(on_ranks(1, 1e-3))
    assert "weights in int4-g128" in titles(on_ranks(1, 1e-3))
    coded = on_ranks(1, 1e-3)
    coded = replace(coded, recipe=replace(coded.recipe, scheme="int8", copies=False))
    assert "in 16 bits too" not in titles(coded)
