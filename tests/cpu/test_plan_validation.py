"""Plans beside published runs: errors may not get worse, intervals hold what they say they hold,
and rows that say too little are refused with the reason. The figures are facts of the sources that
each row names.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from train_runs import Capture

from ridgeline.cli.main import main
from ridgeline.planning.training.constants import load_fitted
from ridgeline.planning.validating.judging import (
    JudgedRow,
    by_source,
    judge_steps,
    rank_correlation,
    sweep_of,
    worst,
)
from ridgeline.planning.validating.memory_points import FITTED_TO as MEMORY_FITTED_TO
from ridgeline.planning.validating.memory_points import JUDGED_ON as MEMORY_JUDGED_ON
from ridgeline.planning.validating.memory_points import judge_memory, read_memory_points
from ridgeline.planning.validating.points import point_of, read_points, read_rows
from ridgeline.planning.validating.source_facts import completed, day_slowness

POINTS = Path(__file__).parent / "plan_points"
# Medians of the sizes as they are now (2026-11-19), and room for rounding.
MEDIANS = {"megatron2021": 0.07, "korthikanti2022": 0.08, "mcore_h100": 0.07, "torchtitan": 0.12,
           "mcore_goldens": 0.1, "bloom_layouts": 0.07}  # fmt: skip


@pytest.fixture(scope="module")
def rows() -> list[JudgedRow]:
    return judge_steps(read_points(POINTS / "train.csv"), load_fitted())


def test_errors_do_not_get_worse(rows: list[JudgedRow]) -> None:
    fitted = load_fitted()
    sources = by_source(rows, {(source, "step") for source in fitted.fitted_to})
    assert {each.source for each in sources} == set(MEDIANS)
    for each in sources:
        assert each.median <= MEDIANS[each.source], each
        assert each.is_fitted == (each.source in fitted.fitted_to)
    assert all(not row.refused for row in rows)


def test_intervals_hold_what_they_are_to_hold(rows: list[JudgedRow]) -> None:
    """Of sources that nothing was fitted to."""
    fitted = load_fitted()
    judged = [row for row in rows if row.source not in fitted.fitted_to and row.error is not None]
    held = 0
    for row in judged:
        error = fitted.errors.get(row.family, fitted.errors["other"])
        assert row.predicted is not None
        assert row.measured is not None
        held += row.predicted / (1 + error) <= row.measured <= row.predicted * (1 + error)
    assert held / len(judged) >= 0.75
    assert not set(fitted.fitted_to) & set(fitted.judged_on)


def test_memory_stays_within_what_is_said() -> None:
    """Four of five peaks of other software, within the interval that a plan's memory has."""
    judged = judge_memory(read_memory_points(POINTS / "memory.csv"))
    error = load_fitted().memory_error
    held = [
        row.predicted / (1 + error) <= row.measured <= row.predicted * (1 + error)
        for row in judged
        if row.kind == "peak" and row.predicted is not None and row.measured is not None
    ]
    assert len(held) >= 10
    assert sum(held) / len(held) >= 0.8, held


def test_memory_intervals_hold_on_sources_that_nothing_was_fitted_to() -> None:
    """At least four of five, and of each source at least half."""
    error = load_fitted().memory_error
    held: dict[str, list[bool]] = {}
    for row in judge_memory(read_memory_points(POINTS / "memory.csv")):
        if row.source in MEMORY_JUDGED_ON and row.kind == "peak" and row.measured:
            assert row.predicted is not None
            inside = row.predicted / (1 + error) <= row.measured <= row.predicted * (1 + error)
            held.setdefault(row.source, []).append(inside)
    every = [inside for own in held.values() for inside in own]
    assert set(held) == set(MEMORY_JUDGED_ON)
    assert not set(MEMORY_JUDGED_ON) & set(MEMORY_FITTED_TO)
    assert len(every) >= 15
    assert sum(every) / len(every) >= 0.8, held
    assert all(sum(own) / len(own) >= 0.5 for own in held.values()), held


def test_of_bloom_s_layouts_the_fast_ones_are_predicted_fast(rows: list[JudgedRow]) -> None:
    """Every fourth of its sweep, in the source's order."""
    own = [row for row in rows if row.source == "bloom_layouts"]
    assert len(own) >= 30
    sweep = sweep_of(own)
    assert sweep.num >= 30
    assert sweep.rank_correlation >= 0.75
    assert sweep.regret <= 0.05


def test_a_source_completes_its_own_rows() -> None:
    """BLOOM's prequel says beside its tables what their columns leave open."""
    base = {"group": "bloom_layouts", "note": "x; 02-20; y", "hidden": "", "layers": "80",
            "heads": "", "num_gpus": "384", "gbs": "2048"}  # fmt: skip
    first = completed(base)
    assert (first["hidden"], first["layers"], first["heads"]) == ("14400", "", "96")
    given = completed(base | {"hidden": "13824"})
    assert (given["hidden"], given["layers"]) == ("13824", "80")
    one_node = completed(base | {"note": "x; 02-21; y", "num_gpus": "8", "layers": ""})
    assert (one_node["gbs"], one_node["layers"], one_node["hidden"]) == ("512", "10", "14336")
    assert completed(base | {"group": "bloom"})["hidden"] == ""
    assert [day_slowness(base | {"note": f"; {day};"}) > 1 for day in ("02-24", "02-25")] == [
        True, False
    ]  # fmt: skip


def test_faster_ones_are_predicted_faster(rows: list[JudgedRow]) -> None:
    assert rank_correlation([row for row in rows if row.error is not None]) > 0.9
    assert len(worst(rows, 3)) == 3


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"seq": ""}, "seq is not given"),
        ({"layers": "", "model": "GPT"}, "layers is not given"),
        ({"tp": "3"}, "does not divide"),
        ({"gpu": "TPU v4"}, "is not known"),
        ({"group": "elsewhere"}, "the software"),
        ({"model": "DeepSeekV3"}, "no model's of ours"),
        ({"step_s": "", "tflops_gpu": "", "tok_s_gpu": ""}, "neither"),
    ],
)
def test_rows_that_say_too_little_are_refused(changes: dict[str, str], reason: str) -> None:
    row = dict(read_rows(POINTS / "train.csv", ())[10]) | changes
    assert reason in point_of(row).refused


def test_the_command_prints_errors_by_source(capsys: Capture, tmp_path: Path) -> None:
    assert main(["plan", "--validate", "--points", str(POINTS), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["num_predicted"] == document["num"]
    assert len(document["worst"]) == 10
    errors = [abs(row["error"]) for row in document["worst"]]
    assert errors == sorted(errors, reverse=True)
    (tmp_path / "train.csv").write_text("id,group\n1,x\n")
    assert main(["plan", "--validate", "--points", str(tmp_path)]) == 2
    assert "lacks the columns" in capsys.readouterr().err
