"""Drafting is kept where it brings more tokens a second, and costs next to nothing where it
does not.
"""

from __future__ import annotations

import random

import pytest

from ridgeline.engine.speculation.pace import ENOUGH, SPAN, DraftPace


def simulated(speedup: float, steps: int, noise: float = 0.3, seed: int = 0) -> float:
    """Tokens a second over those of plain steps, where a step with drafts brings two tokens."""
    pace, generator = DraftPace(), random.Random(seed)
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


def test_drafting_is_tried_first_and_then_the_plain_way() -> None:
    pace = DraftPace()
    asked = []
    for _ in range(2 * ENOUGH):
        asked.append(pace.allows(1))
        for _ in range(SPAN):
            pace.note(1, asked[-1], 1, 1.0)
    assert asked == [True] * ENOUGH + [False] * ENOUGH


def simulated_bursts(overhead: float, burst_share: float, steps: int, seed: int = 0) -> float:
    """The same where steps that may have drafts take so much longer, and few of them really have
    drafts: those come in bursts, take twice as long and bring four tokens.
    """
    pace, generator = DraftPace(), random.Random(seed)
    num_tokens, seconds, in_burst = 0, 0.0, False
    for _ in range(steps):
        if generator.random() < 1 / 8:  # the mean length of a burst
            in_burst = generator.random() < burst_share
        allowed = pace.allows(1)
        tokens = 4 if allowed and in_burst else 1
        mean = (1 + overhead if allowed else 1.0) * (2 if tokens > 1 else 1)
        took = mean * generator.lognormvariate(-0.02, 0.2)
        pace.note(1, allowed, tokens, took)
        num_tokens, seconds = num_tokens + tokens, seconds + took
    return num_tokens / seconds


@pytest.mark.parametrize("overhead", [0.02, 0.05, 0.2, 0.5])
@pytest.mark.parametrize("seed", range(4))
def test_being_allowed_drafts_and_having_none_costs_less_than_two_percent(
    overhead: float, seed: int
) -> None:
    assert simulated_bursts(overhead, 0.0, 20_000, seed) >= 0.98


@pytest.mark.parametrize("seed", range(4))
def test_bursts_that_most_spans_do_not_have_count(seed: int) -> None:
    """Always allowed, the steps would bring 1.19 times the tokens a second."""
    assert simulated_bursts(0.02, 0.12, 20_000, seed) >= 1.12


def test_a_way_that_has_no_drafts_is_left_when_it_is_slower() -> None:
    pace, num_allowed = DraftPace(), 0
    for _ in range(100 * SPAN):
        allowed = pace.allows(1)
        num_allowed += allowed
        pace.note(1, allowed, 1, 1.2 if allowed else 1.0)
    assert num_allowed < 12 * SPAN


def test_steps_that_were_out_when_the_way_changed_are_of_neither() -> None:
    """They come back after it: the first span without drafts has sixteen such steps of its own."""
    pace = DraftPace()
    for _ in range(ENOUGH * SPAN):
        pace.note(1, True, 1, 1.0)
    assert not pace.allows(1)
    for _ in range(3):
        pace.note(1, True, 1, 100.0)
    for _ in range(ENOUGH * SPAN):
        assert not pace.allows(1)
        pace.note(1, False, 1, 2.0)
    assert pace.allows(1)  # the plain way took longer


def test_a_span_that_was_disturbed_is_forgiven() -> None:
    """A graph was captured in the first span with drafts, which are good otherwise."""
    pace, num_allowed = DraftPace(), 0
    for step in range(60 * SPAN):
        allowed = pace.allows(1)
        num_allowed += allowed
        pace.note(1, allowed, 1, (0.7 if allowed else 1.0) + (200.0 if step == 3 else 0.0))
    assert num_allowed > 45 * SPAN


def test_a_workload_that_changes_is_noticed() -> None:
    pace = DraftPace()

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
    run(0.7, 1_000)
    assert run(0.7, 2_000) < 0.15


def test_each_number_of_streams_is_judged_by_itself() -> None:
    pace = DraftPace()
    for _ in range(4 * ENOUGH * SPAN):
        for num_rows, speedup in ((1, 2.0), (64, 0.5)):
            drafts = pace.allows(num_rows)
            pace.note(num_rows, drafts, num_rows, num_rows / (speedup if drafts else 1.0))
    assert pace.allows(1)
    assert not pace.allows(64)
