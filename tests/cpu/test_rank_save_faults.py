"""Checkpoints of layouts when something fails on one rank: its disk is full, or it dies."""

from __future__ import annotations

from pathlib import Path

import pytest
from packed import TINY
from process_ranks import run_ranks
from rank_saving import (
    FP32,
    finish_alike,
    go_on,
    save_and_die,
    save_on_full_disk,
)

from ridgeline.parallel.layout import Layout
from ridgeline.training.saving.checkpoint import (
    check_whole,
    checkpoint_path,
    last_whole,
    remove_leftovers,
    saved_checkpoints,
)

SHARD = Layout(shard=2)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_of_one_rank_is_an_error_of_all(rank: int, tmp_path: Path) -> None:
    """The system itself refuses to write more into a file. The run goes on, and saves later."""
    told = run_ranks(SHARD, save_on_full_disk, TINY, tmp_path, rank, 9_000)
    for each in told:
        assert each.kind == "OutputError"
        assert "cannot write" in each.error
        assert "step-00000001" in each.error
        assert f"(rank {rank} of 2)" in each.error
        assert (each.error, each.left, each.losses) == (told[0].error, [], told[0].losses)
        assert each.last == checkpoint_path(tmp_path, 3)


def killed(run: Path, rank: int, point: str, number: int, named: bool = False) -> None:
    told = f"rank {rank} died|another rank has gone|(closed|reset) by"
    with pytest.raises(AssertionError, match=told):
        run_ranks(SHARD, save_and_die, TINY, run, rank, point, number, named)


def test_a_killed_rank_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    killed(tmp_path, 1, "file", 1)
    check_last(tmp_path, 2)
    ((run, state),) = go_on(None, TINY, FP32, [tmp_path])
    assert state.counters.steps == 2
    assert run.after.loss is not None


POINTS = [
    *((rank, "send", 1) for rank in (0, 1)),
    *((rank, "file", number) for rank in (0, 1) for number in (1, 2)),
    *((0, "agreement", number) for number in range(1, 6)),
    *((1, "agreement", number) for number in range(1, 5)),
    (0, "description", 1),
    (0, "state", 1),
    (0, "rename", 1),
]


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "point", "number"), POINTS)
def test_killed_at_every_point(rank: int, point: str, number: int, tmp_path: Path) -> None:
    killed(tmp_path, rank, point, number)
    check_last(tmp_path, 2)


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "point", "number"), [(0, "removal", 1), (1, "agreement", 5)])
def test_killed_when_the_checkpoint_has_its_name(
    rank: int, point: str, number: int, tmp_path: Path
) -> None:
    """What the first rank does last needs no other: all have written."""
    killed(tmp_path, rank, point, number, named=True)
    check_last(tmp_path, 3)


def check_last(run: Path, steps: int) -> None:
    """That it is whole, and that nothing else is left that could be taken for one."""
    assert last_whole(run).checkpoint == checkpoint_path(run, steps)
    for path in saved_checkpoints(run):
        check_whole(path)
    remove_leftovers(run)
    assert len(list((run / "checkpoints").iterdir())) == steps - 1


@pytest.mark.slow
def test_all_ranks_hear_of_it_after_the_same_step(tmp_path: Path) -> None:
    told = run_ranks(SHARD, finish_alike, TINY, tmp_path)
    assert told[0] == told[1]
    assert told[0] >= 20
