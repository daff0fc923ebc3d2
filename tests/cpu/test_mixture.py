"""Which mixture is tried, in plain numbers: the steps, and how far they are gone."""

from __future__ import annotations

import math
import random
from itertools import accumulate, product

import pytest

from ridgeline.ladder.quantizing.mixture import (
    MAX_TRIALS,
    MixtureStep,
    Option,
    furthest,
    schemes_after,
    steps,
    worthwhile,
)
from ridgeline.quantization.scheme import parse_scheme

INT8, G128, G64, G32 = (parse_scheme(n) for n in ("int8", "int4-g128", "int4-g64", "int4-g32"))


def test_what_another_beats_is_left_out() -> None:
    plain, int8 = Option(None, 100, 0.0), Option(INT8, 50, 1.0)
    small, worse = Option(G128, 25, 9.0), Option(G32, 26, 9.5)
    assert worthwhile([plain, worse, small, int8]) == [plain, int8, small]
    # as large and worse; larger than what is there; better and smaller than another
    assert worthwhile([plain, int8, Option(G64, 50, 2.0)]) == [plain, int8]
    assert worthwhile([plain, Option(INT8, 120, 0.1)]) == [plain]
    assert worthwhile([plain, int8, Option(G64, 30, 0.5)]) == [plain, Option(G64, 30, 0.5)]


def test_steps_are_the_best_for_every_number_of_bytes() -> None:
    """Against all mixtures: none is both smaller and better than one on the path."""
    generator = random.Random(4)
    options = {
        f"layers.{i}.mlp.down": [
            Option(None, 100, 0.0),
            Option(INT8, 51, generator.random()),
            Option(G64, 29, 1 + 5 * generator.random()),
            Option(G128, 27, 1 + 9 * generator.random()),
        ]
        for i in range(4)
    }
    path = steps(options)
    for count in range(1, len(path) + 1):
        chosen = schemes_after(path[:count])
        picked = [
            next(option for option in known if option.scheme == chosen.get(name))
            for name, known in options.items()
        ]
        size, cost = sum(o.num_bytes for o in picked), sum(o.kl for o in picked)
        assert size == 400 - sum(step.saved for step in path[:count])
        assert cost == pytest.approx(sum(step.kl for step in path[:count]))
        for others in product(*options.values()):
            smaller = sum(o.num_bytes for o in others) <= size
            better = sum(o.kl for o in others) < cost - 1e-9
            assert not (smaller and better)


def path_of(costs: list[float]) -> list[MixtureStep]:
    return [MixtureStep(f"layers.{i}.mlp.down", INT8, 10, cost) for i, cost in enumerate(costs)]


@pytest.mark.parametrize("bend", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("scale", [0.02, 1.0, 30.0])
@pytest.mark.parametrize("limit", [3.3, 40.0, 199.5])
def test_the_way_to_the_bound_is_short(bend: float, scale: float, limit: float) -> None:
    """Costs that do not add up, and are all wrong by a factor, are found out by measuring."""
    path = path_of([0.1 * 1.02**i for i in range(200)])
    costs = [0.0, *accumulate(step.kl for step in path)]
    right = sum(cost <= limit for cost in costs) - 1
    asked = []

    def share_of_bound(count: int) -> float:
        asked.append(count)
        return (costs[count] / limit) ** bend

    found = furthest(path, share_of_bound, likely=scale / limit, total_bytes=4000)
    assert len(asked) <= MAX_TRIALS
    assert len(set(asked)) == len(asked)
    assert 0.8 * right - 4 <= found <= right


def test_the_ends() -> None:
    path = path_of([1.0] * 20)
    everything = furthest(path, lambda count: 0.0, likely=5.0, total_bytes=400)
    assert everything == 20
    asked = []

    def never(count: int) -> float:
        asked.append(count)
        return 5.0

    assert furthest(path, never, likely=0.01, total_bytes=400) == 0
    assert 1 in asked
    asked.clear()
    assert furthest(path, lambda count: never(count) * math.inf, likely=0, total_bytes=400) == 0
    assert len(asked) == 1
    assert furthest([], never, likely=1.0, total_bytes=400) == 0


@pytest.mark.parametrize("bend", [0.5, 1.0, 2.0])
def test_where_all_steps_lead_is_not_measured_again(bend: float) -> None:
    path = path_of([0.1 * 1.02**i for i in range(200)])
    costs = [0.0, *accumulate(step.kl for step in path)]
    asked = []

    def share_of_bound(count: int) -> float:
        asked.append(count)
        return (costs[count] / 20.0) ** bend

    about = {"likely": 1e-3, "total_bytes": 4000}  # far off: it would begin at the end
    found = furthest(path, share_of_bound, **about, whole=(costs[-1] / 20.0) ** bend)
    right = sum(cost <= 20.0 for cost in costs) - 1
    assert 0.8 * right - 4 <= found <= right
    assert len(path) not in asked
    assert furthest(path, share_of_bound, **about, whole=math.inf) == 0
