"""What ranks of a test of saving do: steps, a checkpoint, and steps that go on from one under
another layout. One device does the same by the usual trainer and saver.
"""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rank_work import LENGTH, sequences, whole_model
from torch import Tensor

from ridgeline.data.loading.packing import joined
from ridgeline.models import Transformer
from ridgeline.models.checkpoint import save
from ridgeline.models.families import Description, describe_hf
from ridgeline.parallel.mesh import Mesh
from ridgeline.parallel.shards import whole_shapes
from ridgeline.quantization import load_model
from ridgeline.training.config import BatchOptions, DataOptions, Precision, TrainConfig
from ridgeline.training.ranks.rank_trainer import (
    RankTrainer,
    WholeTensors,
    rank_trainer,
    whole_tensors,
)
from ridgeline.training.ranks.weights.gathering import gathered_tensors
from ridgeline.training.ranks.weights.sources import stored_tensors
from ridgeline.training.saving import checkpoint, exchange, rank_files, rank_saver
from ridgeline.training.saving.checkpoint import (
    CheckpointContent,
    Exporter,
    SavedState,
    checkpoint_path,
    restore,
)
from ridgeline.training.saving.deal import deal
from ridgeline.training.saving.saver import CheckpointSaver
from ridgeline.training.saving.savers import saver_of
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
    tensors = {  # what no rank has is NaN when they are gathered
        name: each.float() if each.dtype == torch.int16 else each for name, each in tensors.items()
    }
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


def resumed(
    mesh: Mesh | None, folder: Path, values: Values, train: TrainConfig
) -> tuple[Trainer, SavedState]:
    if mesh is None:
        trainer = Trainer(load_model(folder, dtype="fp32", device="cpu"), train)
    else:
        config = described(values).config
        trainer = rank_trainer(config, train, mesh, stored_tensors(folder))
    return trainer, restore(trainer, folder)


def save_and_go_on(
    mesh: Mesh | None, values: Values, train: TrainConfig, run: Path,
    files: dict[str, bytes] | None = None,
) -> Run:  # fmt: skip
    """Two steps, a checkpoint, and two more steps before anything of it is written."""
    trainer = begun(mesh, values, train)
    for number in range(2):
        step(trainer, number, mesh)
    saved, gone_on = stand(trainer), threading.Event()
    about = exporter(values, files or {})
    with saver_of(run, trainer, about, keep=9) as saver, held_up(saver, gone_on):
        saver.begin(state_of(trainer, 2))
        loss = step(trainer, 2, mesh)
        after = stand(trainer, loss)
        step(trainer, 3, mesh)
        gone_on.set()
        written = saver.wait()
    assert written is not None
    assert written.path == checkpoint_path(run, 2)
    return Run(saved, after)


@contextmanager
def held_up(saver: CheckpointSaver, event: threading.Event) -> Iterator[None]:
    """Nothing is sent or written before the event."""
    plain = saver._store

    def late(content: CheckpointContent) -> tuple[Path, int]:
        assert event.wait(60)
        return plain(content)

    saver._store = late  # type: ignore[method-assign]
    yield


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


def save_each_precision(
    mesh: Mesh | None, values: Values, precisions: list[Precision], run: Path
) -> list[Run]:
    return [
        save_and_go_on(mesh, values, replace(FP32, precision=each), run / each)
        for each in precisions
    ]


def go_on_each_precision(
    mesh: Mesh | None, values: Values, precisions: list[Precision], run: Path
) -> list[Run]:
    return [
        go_on(mesh, values, replace(FP32, precision=each), [run / each])[0][0]
        for each in precisions
    ]


def save_in_small_files(mesh: Mesh, values: Values, run: Path, file_bytes: int) -> Run:
    rank_saver.deal = partial(deal, file_bytes=file_bytes)  # type: ignore[attr-defined]
    return save_and_go_on(mesh, values, FP32, run)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


POINTS: dict[str, tuple[Any, str]] = {
    "send": (exchange.dist, "isend"),
    "file": (save, "save_file"),
    "agreement": (rank_files, "together"),
    "description": (checkpoint, "write_description"),
    "state": (rank_files, "finish_checkpoint"),
    "rename": (Path, "rename"),
    "removal": (rank_files, "keep_last"),
}


def save_and_die(
    mesh: Mesh, values: Values, run: Path, rank: int, point: str, number: int, named: bool = False
) -> None:
    """The second checkpoint of two. `named`: not before it has its name."""

    def act(*args: Any, **options: Any) -> None:
        while named and not checkpoint_path(run, 3).exists():
            time.sleep(0.01)
        die()

    trainer = begun(mesh, values, FP32)
    with saver_of(run, trainer, exporter(values, {}), keep=2) as saver:
        for number_of_step in range(2):
            step(trainer, number_of_step, mesh)
        saver.begin(state_of(trainer, 2))
        saver.wait()
        if mesh.rank == rank:
            at_call(POINTS[point], number, act)
        step(trainer, 2, mesh)
        saver.begin(state_of(trainer, 3))
        step(trainer, 3, mesh)
        saver.wait()


def at_call(target: tuple[Any, str], number: int, act: Callable[..., None]) -> None:
    """`act` in place of one call of a function; the others are as they were."""
    owner, name = target
    plain, calls = getattr(owner, name), 0

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        return act(*args, **options) if calls == number else plain(*args, **options)

    setattr(owner, name, counted)


@dataclass
class Failed:
    error: str
    kind: str
    left: list[str]  # in the folder of checkpoints
    losses: list[float]  # of steps meanwhile and behind it
    last: Path | None = None  # that is whole


def save_on_full_disk(mesh: Mesh, values: Values, run: Path, rank: int, limit: int) -> Failed:
    """One rank may write no more than some bytes into a file; later it may again."""
    trainer, failed = begun(mesh, values, FP32), Failed("", "", [], [])
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    with saver_of(run, trainer, exporter(values, {}), keep=9) as saver:
        failed.losses.append(step(trainer, 0, mesh))
        if mesh.rank == rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, usual[1]))
        saver.begin(state_of(trainer, 1))
        failed.losses.append(step(trainer, 1, mesh))
        try:
            saver.wait()
        except Exception as error:
            failed.error, failed.kind = str(error), type(error).__name__
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
        failed.left = os.listdir(run / "checkpoints")
        failed.losses.append(step(trainer, 2, mesh))
        saver.begin(state_of(trainer, 3))
        saver.wait()
    failed.last = rank_files.last_whole_of_ranks(run, mesh).checkpoint
    return failed


def finish_alike(mesh: Mesh, values: Values, run: Path) -> int:
    """After how many steps this rank hears of a checkpoint. The second's thread is late, when all
    is written.
    """
    trainer, gone_on = begun(mesh, values, FP32), threading.Event()
    with saver_of(run, trainer, exporter(values, {}), keep=9) as saver:
        plain = saver._store

        def late(content: CheckpointContent) -> tuple[Path, int]:
            stored = plain(content)
            assert mesh.rank == 0 or gone_on.wait(60)
            return stored

        saver._store = late  # type: ignore[method-assign]
        saver.begin(state_of(trainer, 0))
        for number in range(1000):
            step(trainer, number % 5, mesh)
            if number == 20:
                gone_on.set()
            if saver.finished() is not None:
                return number
    raise AssertionError("it was never written")


def check_same(tensors: WholeTensors, model: Transformer) -> None:
    """Every element, each once."""
    whole: dict[str, Tensor] = {
        name: torch.full(shape, torch.nan) for name, shape in whole_shapes(model.config).items()
    }
    for name, index, tensor in tensors:
        assert whole[name][index].isnan().all()
        whole[name][index] = tensor.float()
    for name, parameter in model.named_parameters():
        assert torch.equal(whole[name], parameter), name
