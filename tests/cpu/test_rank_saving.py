"""Checkpoints of layouts: saved under one, resumed under any other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from packed import TINY
from process_ranks import run_ranks
from rank_saving import FP32, Run, Values, go_on, save_and_go_on
from train_runs import single_thread

from ridgeline.parallel.layout import Layout
from ridgeline.training.saving.checkpoint import SavedState, check_whole, checkpoint_path

ONE = "replicate=1"


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with single_thread():
        yield


def saved(layout: str, values: Values, run: Path) -> Run:
    if layout == ONE:
        return save_and_go_on(None, values, FP32, run)
    told: list[Run] = run_ranks(
        Layout.parse(layout), save_and_go_on, values, FP32, run,
        num_kv_heads=values["num_key_value_heads"],
    )  # fmt: skip
    return told[0]


def gone_on(layout: str, values: Values, runs: list[Path]) -> list[tuple[Run, SavedState]]:
    if layout == ONE:
        return go_on(None, values, FP32, runs)
    told: list[list[tuple[Run, SavedState]]] = run_ranks(
        Layout.parse(layout), go_on, values, FP32, runs,
        num_kv_heads=values["num_key_value_heads"],
    )  # fmt: skip
    return told[0]


def check_pairs(layouts: list[str], values: Values, folder: Path) -> None:
    """From each layout to each."""
    begun = {layout: saved(layout, values, folder / layout) for layout in layouts}
    for layout in layouts:
        check_whole(checkpoint_path(folder / layout, 2))
    for layout in layouts:
        found = gone_on(layout, values, [folder / each for each in layouts])
        for source, (run, state) in zip(layouts, found, strict=True):
            expected = begun[source]
            same_tensors(run.saved.tensors, expected.saved.tensors)
            assert run.after.loss == pytest.approx(expected.after.loss, rel=1e-6)
            assert state.layout == Layout.parse(source)
            assert (state.counters.steps, state.progress.updates) == (2, 2)
            if source == layout:
                assert run.after.loss == expected.after.loss
                same_tensors(run.after.tensors, expected.after.tensors)


def same_tensors(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


def test_from_each_layout_to_each(tmp_path: Path) -> None:
    """The vocabulary, 131, cannot be shared evenly; the head is the embedding."""
    check_pairs([ONE, "shard=2", "tensor=2"], TINY, tmp_path)
