"""Why a workload is not at the hardware's limit, and what a climb leaves to do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from test_gains import BATCH_1, BF16, CPU, GPU, decode, situation

from ridgeline.ladder.climbing.remaining import remaining, rungs_of
from ridgeline.ladder.measuring.observation import Observation
from ridgeline.ladder.outcome import RungOutcome
from ridgeline.ladder.rungs import MOVES, STAGES, ClimbFacts
from ridgeline.profiling.predicting.gains import state_of
from ridgeline.profiling.predicting.gap import gap_parts
from ridgeline.profiling.predicting.next_steps import candidates
from ridgeline.profiling.predicting.prediction import Situation
from ridgeline.profiling.roofline import step_limit
from ridgeline.recipe import Recipe


@pytest.fixture(autouse=True)
def nothing_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))


def limit_of(given: Situation) -> float:
    limit = step_limit(state_of(given).cost(given.phases[0].work), given.hardware, "bf16")
    assert limit is not None
    return limit.seconds


def test_parts_and_the_limit_add_up() -> None:
    given = situation(BF16, BATCH_1)
    parts = {part.name: part for part in gap_parts(given)}
    assert sum(part.least_s for part in parts.values()) == pytest.approx(limit_of(given))
    gap = 1 - limit_of(given) / BATCH_1.step_s
    assert sum(part.share for part in parts.values()) == pytest.approx(gap)
    assert parts["gaps"].share == pytest.approx(0.15 / 3.94, rel=1e-3)  # no waiting is allowed
    assert parts["gaps"].least_s == 0.0
    assert 0 < parts["attention"].least_s < parts["attention"].step_s


def test_the_largest_part_comes_first_over_all_phases() -> None:
    """A part counts by the time of the whole workload, not by that of its step."""
    slow = decode(1, 300, 8e-3, matrices=3.6e-3, gaps=4.4e-3)
    once = replace(slow, phase="prefill", num_steps=1.0)
    parts = gap_parts(situation(BF16, once, slow))
    assert [(part.phase, part.name) for part in parts[:1]] == [("decode", "gaps")]
    gaps = {part.phase: part.share for part in parts if part.name == "gaps"}
    assert gaps["decode"] == pytest.approx(100 * gaps["prefill"])


def test_where_compute_bounds_flops_are_what_is_allowed() -> None:
    many = decode(4096, 300, 0.2, matrices=0.15, attention=0.05)
    given = situation(BF16, many)
    allowed = sum(part.least_s for part in gap_parts(given))
    assert allowed == pytest.approx(limit_of(given))


def test_a_part_below_its_ceiling_is_no_gap() -> None:
    """A limit that was measured too low takes nothing away from the other parts."""
    quick = decode(1, 300, 1.2e-3, matrices=1.0e-3, host=0.2e-3)
    parts = gap_parts(situation(BF16, quick))
    assert [part.name for part in parts] == ["host"]
    assert parts[0].share == pytest.approx(1 / 6)


def test_without_ceilings_nothing_is_said() -> None:
    bare = replace(CPU, ceilings={}, datasheet={})
    assert gap_parts(situation(Recipe(dtype="bf16"), decode(1, 9, 0.02), hardware=bare)) == []
    assert gap_parts(situation(BF16)) == []


def observed(given: Situation) -> Observation:
    weight, kv = given.bytes_per_weight, given.bytes_per_kv
    return Observation(given.recipe, 1, weight, kv, phases=given.phases)


def test_what_a_rung_has_tried_is_not_advised_again() -> None:
    given = situation(BF16, BATCH_1)
    facts = ClimbFacts(given.config, GPU, "latency", "setting")
    left = remaining(facts, observed(given), "engine", [])
    assert [part.name for part in left.gap][:2] == ["attention", "matrices"] or left.gap
    assert any("int4" in step.title for step in left.next_steps)
    assert all(step.predicted.speedup >= 1.02 for step in left.next_steps)
    rungs = [RungOutcome(rung.name, rung.area, rung.title, {}, "dropped", "") for rung in MOVES]
    later = remaining(facts, observed(given), "engine", rungs)
    assert [step.title for step in later.next_steps] == [
        "4 requests at once instead of 1 (tokens/s of all)"
    ]


def test_every_advice_has_the_name_of_its_rung() -> None:
    names = {rung.name for stage in STAGES for rung in stage}
    plain = Recipe(dtype="fp32", graphs=False, overlap=False)
    for given in (
        situation(plain, BATCH_1),
        situation(BF16, BATCH_1),
        situation(Recipe(dtype="fp32"), decode(1, 100, 0.03), hardware=CPU),
        situation(plain, BATCH_1, loop="naive"),
    ):
        for _, edit in candidates(given):
            assert rungs_of(edit) & names, edit
