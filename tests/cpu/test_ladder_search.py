"""What a climb decides, with scripted speeds: order, keeping and dropping, failures, budget, going
on after a stop. Nothing is run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from scripted_search import (
    BAD,
    BF16,
    CLOSE,
    ENGINE,
    FINE,
    INT4,
    INT8,
    PAGES,
    FakeBench,
    by_label,
    climb,
    rung,
    statuses,
)

from ridgeline.errors import UsageError
from ridgeline.ladder.measuring.observation import Observation
from ridgeline.ladder.measuring.process import WorkerError
from ridgeline.ladder.outcome import Quality
from ridgeline.ladder.rungs import Offer, Rung, RungContext
from ridgeline.ladder.searching.progress import Options
from ridgeline.ladder.searching.search import FEWEST_ROUNDS
from ridgeline.ladder.state import ClimbState
from ridgeline.recipe import Recipe


def test_what_is_faster_is_kept_and_the_next_is_held_against_it() -> None:
    bench = FakeBench(by_label)
    found = climb(bench, BF16, INT8)
    assert statuses(found) == {"engine": "kept", "bf16": "kept", "int8": "kept"}
    gains = [o.achieved.value for o in found.outcomes if o.achieved]
    assert gains == pytest.approx([2.0, 1.5, 1.5], rel=0.02)
    assert found.best.recipe.scheme == "int8"
    assert found.best.recipe.dtype == "bf16"


def test_a_slower_rung_is_dropped_after_few_rounds_and_leaves_no_trace() -> None:
    bench = FakeBench(lambda state: 5.0 if state.recipe.dtype == "bf16" else by_label(state))
    found = climb(bench, BF16, INT8)
    dropped = found.outcomes[1]
    assert dropped.status == "dropped"
    assert "slower" in dropped.reason
    assert dropped.achieved is not None
    assert len(dropped.achieved.before) == FEWEST_ROUNDS
    assert "judge bf16" not in bench.asked
    assert found.best.recipe.dtype == "fp32"


def test_what_is_within_noise_gets_more_rounds_and_is_dropped() -> None:
    bench = FakeBench(by_label, noise=0.2)
    found = climb(bench, PAGES)
    outcome = found.outcomes[1]
    assert outcome.status == "dropped"
    assert "beyond noise" in outcome.reason
    assert outcome.achieved is not None
    assert len(outcome.achieved.before) == 12


def test_outside_the_quality_bound_is_dropped_with_the_numbers() -> None:
    bench = FakeBench(by_label, quality=lambda state: BAD)
    found = climb(bench, INT8)
    assert found.outcomes[1].status == "dropped"
    assert "0.5" in found.outcomes[1].reason
    assert found.outcomes[1].quality == BAD
    assert found.best.recipe.scheme is None


def test_int4_outside_the_bound_is_calibrated_and_measured_again() -> None:
    bench = FakeBench(by_label, quality=lambda state: FINE if state.folder else CLOSE)
    found = climb(bench, INT4)
    assert found.outcomes[1].status == "kept"
    assert found.best.folder == "folder"
    assert found.best.recipe.scheme is None
    assert "compare folder" in bench.asked


@pytest.mark.parametrize(("quality", "budget_s"), [(BAD, None), (CLOSE, 200.0)])
def test_codes_are_not_looked_for_in_vain(quality: Quality, budget_s: float | None) -> None:
    """Where rounding is far outside the bound, or there is no time."""
    bench = FakeBench(by_label, quality=lambda state: quality)
    found = climb(bench, INT4, budget_s=budget_s)
    assert found.outcomes[1].status == "dropped"
    assert "codes on data" in found.outcomes[1].reason
    assert not any(word.startswith("calibrate") for word in bench.asked)


def test_calibrated_codes_outside_the_bound_are_dropped_with_their_numbers() -> None:
    bench = FakeBench(by_label, quality=lambda state: CLOSE)
    found = climb(bench, INT4)
    assert found.outcomes[1].status == "dropped"
    assert "with codes found on data" in found.outcomes[1].reason
    assert found.best.folder is None


def test_quality_off_is_said_and_nothing_is_judged() -> None:
    bench = FakeBench(by_label, quality=lambda state: BAD)
    found = climb(bench, INT8, quality=False)
    assert found.outcomes[1].status == "kept"
    assert "not measured" in found.outcomes[1].reason
    assert not any(word.startswith("judge") for word in bench.asked)


@pytest.mark.parametrize("kind", ["died", "hung", "memory", "failed"])
def test_a_rung_whose_process_fails_is_recorded_and_the_climb_goes_on(kind: Any) -> None:
    bench = FakeBench(by_label, failing={"bf16": WorkerError(kind, "ended by SIGKILL")})
    found = climb(bench, BF16, INT8)
    assert statuses(found) == {"engine": "kept", "bf16": "failed", "int8": "kept"}
    assert "SIGKILL" in found.outcomes[1].reason
    assert "drop bf16" in bench.asked


def test_where_the_engine_cannot_be_run_nothing_else_applies() -> None:
    bench = FakeBench(by_label, failing={"fp32": WorkerError("failed", "does not compile")})
    found = climb(bench, BF16)
    assert statuses(found) == {"engine": "failed", "bf16": "not applicable"}
    assert found.best == found.start


def test_an_engine_that_is_not_faster_alone_may_be_with_another_rung() -> None:
    bench = FakeBench(lambda state: 30.0 if state.recipe.dtype == "bf16" else 10.0)
    found = climb(bench, BF16)
    assert statuses(found) == {"engine": "dropped", "bf16": "kept"}
    assert found.best.loop == "engine"
    assert found.outcomes[1].edit == {"loop": "engine", "dtype": "bf16"}


def test_in_a_stage_the_largest_predicted_gain_comes_first() -> None:
    bench = FakeBench(by_label)
    gains = {"int8": 1.5, "int4-g64": 2.5}
    found = climb(bench, stages=((ENGINE,), (INT8, INT4)), gains=gains)
    assert [outcome.name for outcome in found.outcomes] == ["engine", "int4-g64", "int8"]
    assert statuses(found)["int8"] == "dropped"  # held against int4


@pytest.mark.parametrize(
    ("int4", "quality", "first"),
    [(2.0, True, "int8"), (2.4, True, "int4-g64"), (1.9, False, "int4-g64")],
)
def test_what_quality_may_refuse_comes_later(int4: float, quality: bool, first: str) -> None:
    """Half of 1.0 is less than 0.6, half of 1.4 is more; without a bound nothing is refused."""
    stages = ((ENGINE,), (replace(INT4, chance=0.5), INT8))
    gains = {"int8": 1.6, "int4-g64": int4}
    found = climb(FakeBench(by_label), stages=stages, gains=gains, quality=quality)
    assert found.outcomes[1].name == first


def test_a_model_that_does_not_fit_starts_from_what_does_and_says_so() -> None:
    bench = FakeBench(by_label, too_large=lambda state: state.recipe.scheme is None)
    found = climb(bench)
    assert found.start.recipe.scheme == "int8"
    assert "40 GiB" in found.notes[0]
    with pytest.raises(WorkerError, match="40 GiB"):
        climb(FakeBench(by_label, too_large=lambda state: True))


def test_a_model_that_is_not_deterministic_is_told() -> None:
    found = climb(FakeBench(by_label, is_deterministic=False))
    assert any("not deterministic" in note for note in found.notes)


def test_a_near_miss_is_tried_again_when_what_it_hangs_on_was_kept() -> None:
    tuned = rung("tuned", {"tuned": False})  # any edit
    scheme = rung("int8", {"scheme": "int8"}, again_after=("tuned",))

    def speed(state: ClimbState) -> float:
        if state.loop == "naive":
            return 10.0
        if state.recipe.tuned:
            return 20.0 if state.recipe.scheme is None else 19.8
        return 21.0 if state.recipe.scheme is None else 30.0

    found = climb(FakeBench(speed, noise=0.005), scheme, tuned)
    names = [(outcome.name, outcome.status) for outcome in found.outcomes]
    assert names == [("engine", "kept"), ("int8", "dropped"), ("tuned", "kept"), ("int8", "kept")]
    assert "again" in found.outcomes[-1].title


def test_a_rung_that_comes_to_apply_is_tried_when_it_does() -> None:
    """As codes on a GPU, which need 16-bit work: it was kept only after graphs."""

    def codes(place: RungContext) -> Offer | str:
        if place.state.recipe.dtype != "bf16":
            return "it needs 16 bits"
        return Offer({"scheme": "int8"}, "they are there")

    int8 = Rung("int8", "quantize", "int8", codes, True)
    found = climb(FakeBench(by_label), int8, BF16)
    assert [(o.name, o.status) for o in found.outcomes] == [
        ("engine", "kept"),
        ("bf16", "kept"),
        ("int8", "kept"),
    ]


def test_what_launches_hid_is_seen_once_graphs_are_kept() -> None:
    half = rung("bf16", {"dtype": "bf16"}, again_after=("graphs",), near=0.5)
    graphs = rung("graphs", {"kv.page_size": 128})  # any edit

    def speed(state: ClimbState) -> float:
        if state.loop == "naive":
            return 10.0
        if state.recipe.kv.page_size != 128:
            return 12.0 if state.recipe.dtype == "fp32" else 9.0
        return 20.0 if state.recipe.dtype == "fp32" else 40.0

    found = climb(FakeBench(speed, noise=0.005), half, graphs, INT8, gains={"int8": 1.5})
    names = [(outcome.name, outcome.status) for outcome in found.outcomes]
    assert names[:4] == [
        ("engine", "kept"),
        ("bf16", "dropped"),
        ("graphs", "kept"),
        ("bf16", "kept"),
    ]


def test_what_is_predicted_to_be_slower_is_not_measured() -> None:
    bench = FakeBench(by_label)
    gains = {"int4-g64": 2.5, "int8": 0.7}
    found = climb(bench, stages=((ENGINE,), (INT4, INT8)), gains=gains)
    assert statuses(found) == {"engine": "kept", "int4-g64": "kept", "int8": "not applicable"}
    assert "predicted to be slower" in found.outcomes[2].reason
    assert found.outcomes[2].predicted is not None
    assert "compare int8" not in bench.asked
    found = climb(FakeBench(by_label), stages=((ENGINE,), (INT4, INT8)), gains={"int8": 0.8})
    assert statuses(found)["int8"] == "dropped"  # its interval reaches above 1


def test_a_busy_machine_is_told() -> None:
    found = climb(FakeBench(by_label, noise=0.6), PAGES)
    assert any("noisy machine" in note for note in found.notes)
    assert not any("noisy machine" in note for note in climb(FakeBench(by_label), PAGES).notes)


def test_too_few_rounds_are_refused() -> None:
    with pytest.raises(UsageError, match="--rounds is 4"):
        Options(rounds=4)


def test_the_seen_survives_its_file() -> None:
    seen = Observation(Recipe(dtype="bf16"), 7, 2.0, 1.0, plain_shapes=((4, 5),), remarks=("slow",))
    assert Observation.from_json(seen.to_json()) == seen
