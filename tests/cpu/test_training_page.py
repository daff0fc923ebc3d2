"""The page of a training run: every curve, long runs in few points, names that could break it."""

from __future__ import annotations

from typing import Any

import pytest

from ridgeline.profiling.drawing import Series, timeline
from ridgeline.profiling.drawing.timeline import MOST_MARKS, MOST_POINTS, grouped
from ridgeline.profiling.training_page import training_page


def step(number: int, **more: Any) -> dict[str, Any]:
    usual = {"loss": 3.0, "lr": 1e-4, "gradient_norm": 1.0, "tokens": 64 * number}
    return {"step": number, **usual, "tokens_per_s": 1000.0, **more}


def test_long_runs_are_drawn_by_groups() -> None:
    points = [(float(x), float(x % 2)) for x in range(1, 5001)]
    few = grouped(points, MOST_POINTS)
    assert len(few) <= MOST_POINTS
    assert few[-1][0] == 5000
    assert {round(y, 1) for _, y in few} == {0.5}
    figure = timeline([Series("loss", points)], "Loss", "step", "nats")
    assert figure.count("data-tip") == MOST_MARKS
    assert figure.count('class="line s0"') == len(few)  # and the one of the legend


def test_what_is_known_is_drawn() -> None:
    plain = training_page([step(1), step(2)], "demo")
    assert "Loss went from 3.0000 to 3.0000 in 2 steps, 128 tokens." in plain
    assert "MFU" not in plain
    assert "Memory" not in plain
    more = training_page([step(1, mfu=0.5, memory_bytes=2**31), step(2, mfu=0.5)], "demo")
    assert "of the datasheet&#39;s peak, step 2: 50%" in more
    assert "memory, step 1: 2" in more


@pytest.mark.parametrize("rows", [[], [{"step": 0, "held_out_loss": 4.0}], [step(1, loss=None)]])
def test_a_run_that_hardly_began(rows: list[dict[str, Any]]) -> None:
    assert "</html>" in training_page(rows, "demo")


def test_steps_that_looked_wrong_and_their_documents() -> None:
    bad = step(2, loss=None, gradient_norm=None, skipped=True, cause="data", problem="no <numbers>")
    page = training_page([step(1), bad | {"documents": ["a<b>.jsonl line 4"]}], "<demo>")
    assert "no &lt;numbers&gt;: data, left out" in page
    assert "a&lt;b&gt;.jsonl line 4" in page
    assert "<demo>" not in page
