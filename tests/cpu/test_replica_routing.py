"""Which replica a request goes to."""

from __future__ import annotations

import random

import pytest

from ridgeline.engine.scheduling import routing
from ridgeline.engine.scheduling.routing import LEAST_LEAD, SLACK, Router, choose


def tokens(number: int, length: int) -> list[int]:
    return [number * 1000 + position for position in range(length)]


@pytest.mark.parametrize(
    ("hits", "loads", "chosen"),
    [
        ([0, 0, 0], [2, 1, 3], 1),  # nobody has it: the one with least to do
        ([0, 0, 0], [1, 1, 1], 0),
        ([0, 64, 0], [0, 2, 1], 1),  # a little more to do is no reason
        ([0, 64, 0], [0, 9, 1], 0),  # much more is
        ([64, 128, 0], [3, 3, 3], 1),  # the longest beginning
        ([64, 128, 0], [3, None, 3], 0),  # but not of one that is down
        ([640, 64, 0], [50, 12, 10], 1),  # the next best of those with room
    ],
)
def test_choices(hits: list[int], loads: list[int | None], chosen: int) -> None:
    assert choose(hits, loads) == chosen


def test_no_choice_breaks_the_bound() -> None:
    draw = random.Random(0)
    for _ in range(3000):
        num = draw.randint(1, 8)
        loads = [None if draw.random() < 0.3 else draw.randint(0, 40) for _ in range(num)]
        if all(load is None for load in loads):
            continue
        hits = [draw.choice((0, 64, 128)) for _ in range(num)]
        load = loads[choose(hits, loads)]
        up = [each for each in loads if each is not None]
        assert load is not None
        assert load <= max(SLACK * sum(up) / len(up), min(up) + LEAST_LEAD)


def test_conversations_stay_where_they_are() -> None:
    """Each goes on at the replica it began at, and all have their share of them."""
    router, loads = Router(4), [0, 0, 0, 0]
    at = {}
    for turn in range(1, 6):
        for number in range(32):
            chosen = router.route(tokens(number, 100 * turn), "", loads)
            assert at.setdefault(number, chosen) == chosen
            if turn == 1:
                loads[chosen] += 1
    assert [list(at.values()).count(replica) for replica in range(4)] == [8, 8, 8, 8]


def test_a_common_beginning_does_not_crowd_one_replica() -> None:
    """All begin alike: without a bound every one would go to the first."""
    router, loads = Router(4), [0, 0, 0, 0]
    for number in range(100):
        prompt = tokens(0, 640) + tokens(number + 1, 32)
        loads[router.route(prompt, "", loads)] += 1
    assert max(loads) <= SLACK * 25 + LEAST_LEAD
    assert min(loads) >= 15


def test_what_is_not_shared_is_not_counted() -> None:
    router = Router(3)
    idle = [0, 0, 0]
    assert router.route(tokens(1, 200), "a", [1, 0, 1]) == 1
    assert router.route(tokens(1, 200), "a", idle) == 1
    assert router.route(tokens(1, 200), "b", idle) == 0  # another tenant's
    assert router.route(tokens(1, 63), "a", idle) == 0  # no whole block
    assert router.route([5, *tokens(1, 200)], "a", idle) == 0  # another beginning
    router.forget(1)
    assert router.route(tokens(1, 200), "a", idle) == 0


def test_the_oldest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "MAX_BLOCKS", 10)
    router = Router(2)
    router.route(tokens(1, 64), "", [1, 0])
    for number in range(2, 11):
        router.route(tokens(number, 64), "", [0, 1])
    assert router.route(tokens(1, 64), "", [0, 0]) == 1  # used again: now the newest
    for number in range(20, 29):
        router.route(tokens(number, 64), "", [0, 1])
    assert router.route(tokens(1, 64), "", [0, 0]) == 1
    for number in range(30, 40):
        router.route(tokens(number, 64), "", [0, 1])
    assert router.route(tokens(1, 64), "", [0, 0]) == 0
