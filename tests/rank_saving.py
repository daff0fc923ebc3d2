"""What ranks of a test of saving do: steps, a checkpoint, and steps that go on from one under
another layout. One device does the same by the usual trainer and saver.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rank_work import LENGTH, joined, sequences, whole_model
from torch import Tensor

from ridgeline.models.families import Description, describe_hf
from ridgeline.parallel.mesh import Mesh
from ridgeline.quantization import load_model
from ridgeline.training.config import BatchOptions, DataOptions, TrainConfig
from ridgeline.training.ranks.gathering import gathered_tensors
from ridgeline.training.ranks.local_model import whole_shapes
from ridgeline.training.ranks.rank_trainer import RankTrainer, rank_trainer, whole_tensors
from ridgeline.training.ranks.sources import stored_tensors
from ridgeline.training.saving.checkpoint import Exporter, SavedState, checkpoint_path, restore
from ridgeline.training.saving.rank_saver import RankSaver
from ridgeline.training.saving.saver import CheckpointSaver
from ridgeline.training.schedule import Counters
from ridgeline.training.stepping.step import Trainer

Values = dict[str, Any]  # of a config.json
FP32 = TrainConfig(
    precision="fp32",
    batch=BatchOptions(sequences=4),
    data=DataOptions(path="-", sequence_length=LENGTH),
)
SIZE = 4  # sequences of a step


@dataclass
class Stand:
    """Where a run stands: every tensor that a checkpoint holds, whole, and the last step's loss."""

    tensors: dict[str, Tensor]
    loss: float | None = None


@dataclass
class Run:
    saved: Stand
    after: Stand  # when one more step has been run


def described(values: Values) -> Description:
    return describe_hf(values, origin="tiny")


def step(trainer: Trainer, number: int, mesh: Mesh | None = None) -> float:
    batch = sequences(SIZE * (number + 1), trainer.model.config.vocab_size)[-SIZE:]
    own = range(SIZE) if mesh is None else mesh.layout.sequences(mesh.rank, SIZE)
    return trainer.step([joined([batch[i] for i in own])], lr=1e-2).loss


def state_of(trainer: Trainer, steps: int) -> SavedState:
    return SavedState(Counters(steps, SIZE * steps), trainer.progress, 99)


def stand(trainer: Trainer, loss: float | None = None) -> Stand:
    weights = {f"weight.{name}": each for name, each in trainer.weights.local.items()}
    tensors = weights | dict(trainer.weights.tensors())
    if not isinstance(trainer, RankTrainer):
        return Stand({name: each.clone() for name, each in tensors.items()}, loss)
    shapes, parts = whole_shapes(trainer.whole), trainer.local.parts
    kinds = {name: name.split(".", 1)[1] for name in tensors}
    whole = gathered_tensors(
        tensors,
        {name: parts[kinds[name]] for name in tensors},
        {f"{kind}.{each}": shapes[each] for each in shapes for kind in KINDS},
        trainer.mesh,
    )
    return Stand(whole, loss)


KINDS = ("weight", "first", "second", "remainder", "master")


def exporter(values: Values, files: dict[str, bytes]) -> Exporter:
    return Exporter(described(values), files)


def begun(mesh: Mesh | None, values: Values, train: TrainConfig) -> Trainer:
    model = whole_model(described(values).config)
    if mesh is None:
        return Trainer(model, train)
    return rank_trainer(model.config, train, mesh, whole_tensors(model))


def saver_of(trainer: Trainer, run: Path, about: Exporter, keep: int = 9) -> CheckpointSaver:
    kind: Any = RankSaver if isinstance(trainer, RankTrainer) else CheckpointSaver
    saver: CheckpointSaver = kind(run, trainer, about, keep)
    return saver


def resumed(
    mesh: Mesh | None, checkpoint: Path, values: Values, train: TrainConfig
) -> tuple[Trainer, SavedState]:
    if mesh is None:
        trainer = Trainer(load_model(checkpoint, dtype="fp32", device="cpu"), train)
    else:
        config = described(values).config
        trainer = rank_trainer(config, train, mesh, stored_tensors(checkpoint))
    return trainer, restore(trainer, checkpoint)


def save_and_go_on(
    mesh: Mesh | None, values: Values, train: TrainConfig, run: Path,
    files: dict[str, bytes] | None = None,
) -> Run:  # fmt: skip
    """Two steps, a checkpoint, and two more steps that begin while it is written."""
    trainer = begun(mesh, values, train)
    for number in range(2):
        step(trainer, number, mesh)
    saved = stand(trainer)
    with saver_of(trainer, run, exporter(values, files or {})) as saver:
        saver.begin(state_of(trainer, 2))
        loss = step(trainer, 2, mesh)
        after = stand(trainer, loss)
        step(trainer, 3, mesh)
        written = saver.wait()
    assert written is not None
    assert written.path == checkpoint_path(run, 2)
    return Run(saved, after)


def go_on(
    mesh: Mesh | None, values: Values, train: TrainConfig, runs: list[Path]
) -> list[tuple[Run, SavedState]]:
    """From the checkpoint of each run."""
    found = []
    for run in runs:
        trainer, state = resumed(mesh, checkpoint_path(run, 2), values, train)
        saved = stand(trainer)
        found.append((Run(saved, stand(trainer, step(trainer, 2, mesh))), state))
    return found


def save_each_precision(mesh: Mesh, values: Values, precisions: list[str], run: Path) -> list[Run]:
    return [
        save_and_go_on(mesh, values, replace(FP32, precision=each), run / each)  # type: ignore[arg-type]
        for each in precisions
    ]


def go_on_each_precision(
    mesh: Mesh | None, values: Values, precisions: list[str], run: Path
) -> list[Run]:
    return [
        go_on(mesh, values, replace(FP32, precision=each), [run / each])[0][0]  # type: ignore[arg-type]
        for each in precisions
    ]


@contextmanager
def at_call(target: tuple[Any, str], number: int, act: Any) -> Iterator[None]:
    """`act` in place of one call of a function; the others are as they were."""
    owner, name = target
    plain, calls = getattr(owner, name), 0

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        return act(*args, **options) if calls == number else plain(*args, **options)

    setattr(owner, name, counted)
    try:
        yield
    finally:
        setattr(owner, name, plain)


def kill(*args: Any, **options: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def full_disk(*args: Any, **options: Any) -> None:
    raise OSError(28, "No space left on device")
