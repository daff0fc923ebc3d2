"""Intervals of serving figures hold what they say of other engines' published points: of each
source at most three points calibrate, and the others are judged. The figures are facts of the
sources that each row names.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from ridgeline.planning.serving.tunings import sureness
from ridgeline.planning.validating.judging import JudgedRow
from ridgeline.planning.validating.serve_judging import CALIBRATING, judge_serving
from ridgeline.planning.validating.serve_points import read_serve_points

POINTS = Path(__file__).parent / "plan_points_serving" / "serve.csv"
LEAST_ROWS = {"TPOT": 45, "TTFT": 45, "tokens/s": 30}


def is_inside(row: JudgedRow, error: float) -> bool:
    assert row.predicted is not None
    assert row.measured is not None
    return row.predicted / (1 + error) <= row.measured <= row.predicted * (1 + error)


@pytest.mark.slow
def test_intervals_hold_four_of_five_points_of_other_engines() -> None:
    sure = sureness("H100 SXM", 2)
    errors = {"TPOT": sure.tpot, "TTFT": sure.ttft, "tokens/s": sure.throughput}
    rows = judge_serving(read_serve_points(POINTS))
    assert not [row.id for row in rows if row.refused]
    held: dict[str, list[bool]] = defaultdict(list)
    for row in rows:
        if not row.source.endswith(CALIBRATING):
            held[row.kind].append(is_inside(row, errors[row.kind]))
    for kind, least in LEAST_ROWS.items():
        assert len(held[kind]) >= least, kind
        assert sum(held[kind]) / len(held[kind]) >= 0.8, kind


def test_what_is_outside_on_either_side() -> None:
    row = JudgedRow("1", "x", "TPOT", 1.0, 1.3)
    assert not is_inside(row, 0.25)
    assert is_inside(row, 0.31)
    assert not is_inside(JudgedRow("1", "x", "TPOT", 1.3, 1.0), 0.25)
