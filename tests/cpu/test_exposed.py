"""What a step waits for, by kind and axis: counts and bytes as the formulas have them, times that
add up and are longest where a rank is late, on ranks over gloo.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from packed import TINY
from process_ranks import run_ranks
from rank_work import LENGTH, sequences, whole_model
from torch import distributed

from ridgeline.models import ModelConfig
from ridgeline.models.families import describe_hf
from ridgeline.parallel.exposed import TimedCollective, over_ranks
from ridgeline.parallel.layout import Layout
from ridgeline.parallel.mesh import Mesh
from ridgeline.profiling.collective_rows import collective_rows, waiting_sentence
from ridgeline.training.config import BatchOptions, DataOptions, TrainConfig
from ridgeline.training.ranks.context import context_cut
from ridgeline.training.ranks.measuring import timed_collectives
from ridgeline.training.ranks.rank_trainer import rank_trainer, whole_tensors

dist: Any = distributed
COUNT = 4  # sequences of a step
LATE_S = 0.3
TRAIN = TrainConfig(
    precision="fp32",
    batch=BatchOptions(sequences=COUNT),
    data=DataOptions(path="-", sequence_length=LENGTH),
)


def tiny(**changes: Any) -> ModelConfig:
    return describe_hf(TINY | changes, origin="tiny").config


def waits(mesh: Mesh, config: ModelConfig, late: int | None) -> tuple[list[TimedCollective], float]:
    """Of a step, and its seconds; one rank may be late for a gather."""
    trainer = rank_trainer(config, TRAIN, mesh, whole_tensors(whole_model(config)))
    cut = context_cut(config, mesh.layout, mesh.rank, LENGTH)
    batch = sequences(COUNT, config.vocab_size)
    own = [cut(batch[i]) for i in mesh.layout.sequences(mesh.rank, COUNT)]
    before = trainer.step(own, lr=0.0).loss
    if late is not None:
        come_late(mesh, late)
    began = time.perf_counter()
    with timed_collectives(trainer) as clock:
        after = trainer.step(own, lr=0.0).loss
    step_s = time.perf_counter() - began
    assert after == before  # who looks changes nothing
    return clock.timed(), step_s


def come_late(mesh: Mesh, late: int) -> None:
    """One rank begins its next gather some time after the other has."""
    axis, gather = mesh.axis("tensor"), mesh.axis("tensor").all_gather
    assert mesh.control is not None
    hosts, word = mesh.control.group, torch.zeros(1)

    def gather_late(x: torch.Tensor) -> torch.Tensor:
        axis.__dict__.pop("all_gather")  # once
        if mesh.rank == late:
            dist.recv(word, 1 - late, group=hosts)
            time.sleep(LATE_S)
        else:
            dist.send(word, late, group=hosts)
        return gather(x)

    axis.__dict__["all_gather"] = gather_late


def by_kind(rank: list[TimedCollective]) -> dict[tuple[str, str], TimedCollective]:
    return {(each.kind, each.over): each for each in rank}


@pytest.mark.slow
def test_a_late_rank_is_waited_for_by_the_others() -> None:
    config = tiny()
    first, second = run_ranks(Layout(tensor=2), waits, config, 0)
    gathers = [by_kind(each)["all-gather", "tensor"].exposed_s for each, _ in (first, second)]
    assert gathers[0] is not None
    assert gathers[1] is not None
    assert gathers[1] > LATE_S / 2
    for timed, step_s in (first, second):
        assert sum(each.exposed_s or 0.0 for each in timed) < step_s
    sums = by_kind(first[0])["reduce-scatter", "tensor"]
    # forward out of the embedding, attention and MLP; backward into attention, MLP and head
    assert sums.count == COUNT * (4 * config.num_layers + 2)
    assert sums.num_bytes == sums.count * 4 * LENGTH * config.hidden_size
    rows = over_ranks([first[0], second[0]])
    (row,) = (each for each in rows if (each["kind"], each["over"]) == ("all-gather", "tensor"))
    assert row["least_s"] == min(gathers)
    assert row["most_s"] == max(gathers)
    assert row["exposed_s"] == pytest.approx(sum(gathers) / 2)


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("pipeline=2", {("receive", "pipeline"), ("send", "pipeline")}),
        pytest.param(
            "context=2",
            {("all-to-all", "context"), ("all-reduce", "context")},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_every_axis_tells_what_it_waits_for(layout: str, expected: set[tuple[str, str]]) -> None:
    config = tiny()
    for timed, step_s in run_ranks(Layout.parse(layout), waits, config, None):
        kinds = by_kind(timed)
        assert kinds.keys() >= expected
        assert sum(each.exposed_s or 0.0 for each in timed) < step_s
        for key in expected - {("send", "pipeline")}:
            assert kinds[key].exposed_s is not None
        if layout == "pipeline=2":  # the stream one way, or its gradient the other
            assert kinds["receive", "pipeline"].num_bytes == COUNT * 4 * LENGTH * config.hidden_size
            assert kinds["send", "pipeline"].exposed_s is None


def test_what_is_known_is_said() -> None:
    ranks = [
        [TimedCollective("all-gather", "shard", 2, 4, 4096, seconds)] for seconds in (0.1, 0.3)
    ] + [[TimedCollective("send", "pipeline", 2, 1, 8, None)]]
    rows = over_ranks(ranks)
    assert [each["exposed_s"] for each in rows] == [pytest.approx(0.2), None]
    cells = collective_rows(rows, step_s=2.0)
    assert cells[0] == ("all-gather", "shard", "2", "4", "4 KiB", "2 KiB", "200 ms", "10.0%")
    assert cells[1][-2:] == ("with receive", "")
    sentence = waiting_sentence({"collectives": rows, "exposed_s": 0.2, "measured_step_s": 2.0})
    assert sentence == "ranks wait for each other 10% of a step: all-gather over shard 10%"
