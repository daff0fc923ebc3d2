"""Ranks that were given different things say so, all of them, before anything is trained."""

from __future__ import annotations

from dataclasses import replace

import pytest
from packed import TINY
from process_ranks import run_ranks
from torch import distributed

from ridgeline.errors import UsageError
from ridgeline.models import ModelConfig
from ridgeline.models.families import describe_hf
from ridgeline.parallel.layout import Layout
from ridgeline.parallel.mesh import Mesh
from ridgeline.training.config import TrainConfig
from ridgeline.training.ranks.likeness import check_alike, check_layout

MODEL = describe_hf(TINY, origin="tiny").config


def told(mesh: Mesh, others: list[tuple[TrainConfig, ModelConfig]]) -> list[str]:
    """What the second rank finds and the first hears, time after time."""
    own = TrainConfig(layout=mesh.layout), MODEL
    said = []
    for config, model in (each if mesh.rank == 1 else own for each in others):
        try:
            check_alike(config, model, mesh)
            said.append("")
        except UsageError as error:
            said.append(str(error))
    return said


def test_every_rank_hears_what_differs() -> None:
    layout = Layout(shard=2)
    config = TrainConfig(layout=layout)
    others = [
        (config, MODEL),
        (replace(config, seed=7, end=replace(config.end, steps=9)), MODEL),
        (config, replace(MODEL, mlp_size=96)),
    ]
    for same, seeds, models in run_ranks(layout, told, others):
        assert same == ""
        assert "seed 7, on rank 0 0" in seeds
        assert "end.steps 9, on rank 0 None" in seeds
        assert seeds.endswith("start every rank with the same command (rank 1 of 2)")
        assert "than rank 0: another model" in models


def test_another_layout_is_found_before_groups_are_made() -> None:
    store = distributed.HashStore()
    check_layout(Layout(tensor=2), store, 0)
    check_layout(Layout(tensor=2), store, 1)
    with pytest.raises(UsageError, match="rank 1 was given layout shard=2 and rank 0 tensor=2"):
        check_layout(Layout(shard=2), store, 1)
