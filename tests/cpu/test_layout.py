"""Layout: which rank stands where, what it has, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.errors import UsageError
from ridgeline.parallel.layout import AXES, Layout, cut_by_cost

DEGREES = st.integers(1, 3)
LAYOUTS = st.builds(
    Layout,
    replicate=DEGREES,
    shard=DEGREES,
    context=DEGREES,
    tensor=DEGREES,
    pipeline=DEGREES,
)


@given(LAYOUTS)
def test_every_rank_has_a_place_of_its_own(layout: Layout) -> None:
    places = [layout.coordinates(rank) for rank in range(layout.size)]
    assert len(set(places)) == layout.size
    assert [layout.rank_of(place) for place in places] == list(range(layout.size))


@given(LAYOUTS, st.sampled_from([*AXES, "data", "gradient", "all"]))
def test_groups_of_an_axis_have_every_rank_once(layout: Layout, axis) -> None:
    groups = layout.groups(axis)
    assert sorted(rank for group in groups for rank in group) == list(range(layout.size))
    assert {len(group) for group in groups} == {layout.size_of(axis)}
    for rank in range(layout.size):
        assert layout.group(rank, axis)[layout.index(rank, axis)] == rank


def test_tensor_ranks_are_neighbours_and_stages_lie_far_apart() -> None:
    layout = Layout(shard=2, tensor=2, pipeline=2)
    assert layout.group(5, "tensor") == (4, 5)
    assert layout.group(5, "shard") == (5, 7)
    assert layout.group(5, "pipeline") == (1, 5)


@given(LAYOUTS)
def test_all_sequences_and_all_tokens_are_somebodys(layout: Layout) -> None:
    """Once for the ranks that share them, and by all of those alike."""
    count, length = 2 * layout.size_of("data"), 6 * layout.context * 2
    for group in layout.groups("data"):
        owned = [number for rank in group for number in layout.sequences(rank, count)]
        assert owned == list(range(count))
    for group in layout.groups("context"):
        parts = [part for rank in group for part in layout.tokens(rank, length)]
        assert sorted(token for part in parts for token in part) == list(range(length))
    for rank in range(0, layout.size, 7):
        peers = layout.group(rank, "tensor") + layout.group(rank, "pipeline")
        assert {layout.sequences(each, count) for each in peers} == {layout.sequences(rank, count)}


def test_context_ranks_have_as_much_to_attend_to() -> None:
    """Causal attention: a token's work grows with its position."""
    layout = Layout(context=4)
    work = [
        sum(token + 1 for part in layout.tokens(rank, 64) for token in part) for rank in range(4)
    ]
    assert max(work) - min(work) == 0


def test_experts_use_neighbouring_data_ranks() -> None:
    layout = Layout(shard=4, tensor=2, expert=2)
    assert layout.size == 8
    assert layout.group(0, "expert") == (0, 2)
    assert layout.group(7, "expert") == (5, 7)
    assert layout.expert_copies(0) == (0, 4)


@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=9).flatmap(
        lambda costs: st.tuples(st.just(costs), st.integers(1, len(costs)))
    )
)
def test_stages_are_cut_so_that_the_dearest_is_cheapest(case: tuple[list[int], int]) -> None:
    costs, count = case
    stages = cut_by_cost(costs, count)
    assert [layer for stage in stages for layer in stage] == list(range(len(costs)))
    assert all(stages)
    dearest = max(sum(costs[layer] for layer in stage) for stage in stages)
    assert dearest == min(map(max, _all_cuts(costs, count)))


def _all_cuts(costs: list[int], count: int) -> list[list[int]]:
    if count == 1:
        return [[sum(costs)]]
    return [
        [sum(costs[:first]), *rest]
        for first in range(1, len(costs) - count + 2)
        for rest in _all_cuts(costs[first:], count - 1)
    ]


def test_stages_of_a_rank() -> None:
    layout = Layout(pipeline=2, stages=2, schedule="interleaved")
    assert [layout.stages_of(rank) for rank in range(2)] == [(0, 2), (1, 3)]
    flat = [stage for rank in range(2) for stage in layout.stages_of(rank)]
    assert all(one != other for one, other in pairwise(sorted(flat)))


@given(LAYOUTS)
def test_words_and_json_give_the_layout_back(layout: Layout) -> None:
    assert Layout.parse(layout.words()) == layout
    assert json.loads(json.dumps(layout.as_json())) == layout.as_json()


def test_a_layout_comes_from_a_file_that_has_one(tmp_path: Path) -> None:
    layout = Layout(shard=2, tensor=2, sequence=False)
    for name, values in (("own", layout.as_json()), ("plan", {"layout": layout.as_json()})):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(values))
        assert Layout.parse(str(path)) == layout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("shards=2", "shard"),
        ("shard", "NAME=NUMBER"),
        ("shard=two", "shard=two; give a whole number"),
        ("shard=0", "at least 1"),
        ("shard=2,shard=4", "twice"),
        ("shard=4,expert=3", "try expert=2"),
        ("pipeline=2,schedule=interleaved", "try stages=2"),
        ("pipeline=2,stages=2", "try schedule=interleaved"),
        ("stages=2", "without pipeline"),
        ("sequence=maybe", "true or false"),
        ("pipeline=2,schedule=1b1f", "1f1b"),
        ("missing.json", "cannot read missing.json"),
    ],
)
def test_a_wrong_layout_says_what_would_do(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Layout.parse(text)


def test_what_cannot_be_shared_says_what_could() -> None:
    with pytest.raises(UsageError, match="try a batch of 8"):
        Layout(shard=4).sequences(0, 10)
    with pytest.raises(UsageError, match="try 96 tokens"):
        Layout(context=4).tokens(0, 100)
    with pytest.raises(UsageError, match="try 2 or fewer"):
        cut_by_cost([1.0, 1.0], 3)


def test_a_layout_needs_no_torch() -> None:
    code = "import sys, ridgeline.parallel.layout; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
