"""Guessing ahead is kept where it brings more tokens a second, and costs next to nothing where it
does not.
"""

from __future__ import annotations

import random

import pytest

from ridgeline.engine.pace import ENOUGH, SPAN, Pace


def simulated(speedup: float, steps: int, noise: float = 0.3, seed: int = 0) -> float:
    """Tokens a second over those of plain steps, where a step with drafts brings two tokens."""
    pace, generator = Pace(), random.Random(seed)
    num_tokens, seconds = 0, 0.0
    for _ in range(steps):
        drafts = pace.allows(1)
        tokens = 2 if drafts else 1
        mean = tokens / (speedup if drafts else 1.0)
        took = mean * generator.lognormvariate(-noise * noise / 2, noise)
        pace.note(1, drafts, tokens, took)
        num_tokens, seconds = num_tokens + tokens, seconds + took
    return num_tokens / seconds


@pytest.mark.parametrize("speedup", [0.5, 0.7, 0.8, 0.9, 0.95, 0.98])
def test_drafts_that_lose_cost_less_than_two_percent(speedup: float) -> None:
    assert simulated(speedup, 20_000) >= 0.98


@pytest.mark.parametrize("speedup", [1.1, 1.3, 2.0])
def test_drafts_that_win_are_kept(speedup: float) -> None:
    assert simulated(speedup, 20_000) >= 1 + 0.85 * (speedup - 1)


def test_guessing_is_tried_first_and_then_the_plain_way() -> None:
    pace = Pace()
    asked = []
    for _ in range(2 * ENOUGH):
        asked.append(pace.allows(1))
        for _ in range(SPAN):
            pace.note(1, asked[-1], 1, 1.0)
    assert asked == [True] * ENOUGH + [False] * ENOUGH


def test_spans_in_which_the_policy_had_no_drafts_are_plain_ones() -> None:
    pace = Pace()
    for _ in range(10 * SPAN):
        assert pace.allows(1)  # nothing is known of drafts
        pace.note(1, False, 1, 1.0)


def test_a_workload_that_changes_is_noticed() -> None:
    pace = Pace()

    def run(speedup: float, steps: int) -> float:
        """Of these steps, with drafts."""
        allowed = 0
        for _ in range(steps):
            drafts = pace.allows(1)
            allowed += drafts
            pace.note(1, drafts, 1, 1 / speedup if drafts else 1.0)
        return allowed / steps

    assert run(0.7, 2_000) < 0.15
    run(1.5, 5_000)  # until most spans that are remembered are new
    assert run(1.5, 2_000) > 0.85


def test_each_number_of_streams_is_judged_by_itself() -> None:
    pace = Pace()
    for _ in range(4 * ENOUGH * SPAN):
        for num_rows, speedup in ((1, 2.0), (64, 0.5)):
            drafts = pace.allows(num_rows)
            pace.note(num_rows, drafts, num_rows, num_rows / (speedup if drafts else 1.0))
    assert pace.allows(1)
    assert not pace.allows(64)
