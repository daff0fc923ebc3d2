"""Checkpoints of a run: Hugging Face folders with the optimizer's state inside, whole or absent.

    RUN/train.json                              the config (config.py)
    RUN/metrics.jsonl                           every step (metrics.py)
    RUN/checkpoints/step-00000100/              what `serve`, `generate`, `quantize` and
                                                transformers load
    RUN/checkpoints/step-00000100/training/     what resuming takes besides: state.json,
                                                optimizer.safetensors, files.json

All files hold whole tensors: several ranks write several of them (rank_files.py), and any layout,
one device among them, goes on from what any other has saved.

A checkpoint is written beside its name and renamed when it is complete; files.json has the size of
every file, so that one that was cut short later is recognised. The state has a folder of its own,
because some engines load every safetensors file that lies beside the weights.

    write_checkpoint(run, checkpoint_content(trainer, state, exporter))
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ridgeline.errors import CheckpointError, UsageError
from ridgeline.formats.fields import config_from
from ridgeline.models import Transformer
from ridgeline.models.checkpoint import save_safetensors
from ridgeline.models.checkpoint.save import (
    METADATA,
    as_json,
    folder_beside,
    own_memory,
    sync,
    write_description,
    write_file,
)
from ridgeline.models.families import Description
from ridgeline.models.weights import checkpoint_tensors
from ridgeline.parallel.layout import Layout
from ridgeline.parallel.shards import whole_shapes
from ridgeline.quantization.export import hf_config
from ridgeline.training.ranks.rank_trainer import RankTrainer
from ridgeline.training.ranks.weights.local_model import fill_from
from ridgeline.training.saving.adapter_files import AdapterExporter
from ridgeline.training.saving.optimizer_files import OPTIMIZER_NAME, StoredOptimizer, stored_name
from ridgeline.training.schedule import Counters
from ridgeline.training.stepping.step import Trainer, TrainerProgress
from ridgeline.training.watching.watch import WatchState

FOLDER = "checkpoints"
STATE_FOLDER = "training"
STATE_NAME = "state.json"
FILES_NAME = "files.json"
STEP_NAME = re.compile(r"step-(\d{8,})")
WriteModel = Callable[[Path, Sequence[tuple[str, Tensor]]], None]


@dataclass(frozen=True)
class SavedState:
    """What a run goes on from, besides tensors."""

    counters: Counters = field(default_factory=Counters)
    progress: TrainerProgress = field(default_factory=TrainerProgress)
    num_samples: int = 0  # of the data: its order depends on how many there are
    watch: WatchState = field(default_factory=WatchState)
    layout: Layout = field(default_factory=Layout)  # it was saved under; it may change

    def as_json(self) -> dict[str, Any]:
        values = asdict(self)
        if self.layout.is_single:
            del values["layout"]  # older versions do not know it
        return values


@dataclass(frozen=True)
class Exporter:
    """What makes a Hugging Face folder of a model: its description and its tokenizer's files."""

    description: Description
    extra_files: Mapping[str, bytes | Path]

    def weights(self, model: Transformer) -> Iterator[tuple[str, Tensor]]:
        """The model's own tensors, by the names of Hugging Face."""
        yield from checkpoint_tensors(model, self.description)

    def write(
        self, folder: Path, weights: Iterable[tuple[str, Tensor]], model: Transformer
    ) -> None:
        """These values of them, which may be copies."""
        config = hf_config(model, self.description)
        save_safetensors(folder, weights, config, extra_files=self.extra_files)

    def write_beside(self, folder: Path, model: Transformer) -> None:
        """All but the weights."""
        write_description(folder, hf_config(model, self.description), self.extra_files)


@dataclass(frozen=True)
class CheckpointContent:
    """All that a checkpoint holds. The tensors are the run's own, or copies on the host."""

    weights: Sequence[tuple[str, Tensor]]  # by the names that they are stored under
    optimizer: Sequence[tuple[str, Tensor]]
    state: SavedState

    def tensors(self) -> Iterator[Tensor]:
        for _, tensor in (*self.weights, *self.optimizer):
            yield tensor


def checkpoint_content(
    trainer: Trainer, state: SavedState, exporter: Exporter | AdapterExporter
) -> CheckpointContent:
    """Of this moment; the tensors go on changing with the run."""
    return CheckpointContent(
        [(name, tensor.detach()) for name, tensor in exporter.weights(trainer.model)],
        list(trainer.weights.tensors()),
        state,
    )


def checkpoint_path(run: Path, steps: int) -> Path:
    return run.resolve() / FOLDER / f"step-{steps:08d}"


def write_checkpoint(run: Path, content: CheckpointContent, write_model: WriteModel) -> Path:
    """Write the checkpoint of this step; one that is there already is this one."""
    target = checkpoint_path(run, content.state.counters.steps)
    if target.exists():
        return target
    with folder_beside(target) as beside:
        write_model(beside, content.weights)
        folder = beside / STATE_FOLDER
        folder.mkdir()
        storages: set[int] = set()
        tensors = {name: own_memory(tensor, storages) for name, tensor in content.optimizer}
        save_file(tensors, folder / OPTIMIZER_NAME, metadata=METADATA)
        sync(folder / OPTIMIZER_NAME)
        finish_checkpoint(beside, content.state)
    return target


def finish_checkpoint(folder: Path, state: SavedState) -> None:
    """When all other files are written."""
    write_file(folder / STATE_FOLDER / STATE_NAME, as_json(state.as_json()))
    write_file(folder / STATE_FOLDER / FILES_NAME, as_json(_sizes(folder)))
    sync(folder / STATE_FOLDER)


def _sizes(checkpoint: Path) -> dict[str, int]:
    return {
        str(path.relative_to(checkpoint)): path.stat().st_size
        for path in sorted(checkpoint.rglob("*"))
        if path.is_file()
    }


def check_whole(checkpoint: Path) -> None:
    """CheckpointError where a file is missing, or not as long as it was written."""
    path = checkpoint / STATE_FOLDER / FILES_NAME
    try:
        expected = json.loads(path.read_text(encoding="utf-8"))
        sizes = _sizes(checkpoint)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is corrupt or cut short ({error})") from error
    for name, size in expected.items():
        if name not in sizes:
            raise CheckpointError(f"{checkpoint / name} is missing")
        if sizes[name] != size:
            raise CheckpointError(
                f"{checkpoint / name} is cut short or changed: it has {sizes[name]:,} bytes "
                f"instead of {size:,}"
            )
    read_state(checkpoint)


@dataclass(frozen=True)
class LastWhole:
    checkpoint: Path | None  # None: there is none at all
    broken: Sequence[Path] = ()  # newer ones that are not whole
    problems: Sequence[str] = ()  # of those


def last_whole(run: Path) -> LastWhole:
    """The newest checkpoint that is whole; CheckpointError where there are some and none is."""
    broken: list[Path] = []
    problems: list[str] = []
    for path in reversed(saved_checkpoints(run)):
        try:
            check_whole(path)
        except CheckpointError as error:
            broken.append(path)
            problems.append(str(error))
            continue
        return LastWhole(path, broken, problems)
    if broken:
        raise CheckpointError(
            f"{problems[0]}; no other checkpoint of {run} is whole: begin again in a new folder"
        )
    return LastWhole(None)


@torch.no_grad()
def restore(trainer: Trainer, checkpoint: Path) -> SavedState:
    """Put the optimizer's state back, or a rank's part of it. The model has been loaded from the
    same folder.
    """
    state = read_state(checkpoint)
    stored = StoredOptimizer.open(checkpoint / STATE_FOLDER)
    own = dict(trainer.weights.tensors())
    if isinstance(trainer, RankTrainer):
        _fill_part(trainer, own, stored)
    else:
        stored.check({name: tuple(tensor.shape) for name, tensor in own.items()})
        for name, tensor in stored.read(own):
            own[name].copy_(tensor)
            del tensor  # it may keep a file mapped
    trainer.weights.copy_masters()
    trainer.progress = state.progress
    return state


def _fill_part(trainer: RankTrainer, own: Mapping[str, Tensor], stored: StoredOptimizer) -> None:
    shapes, kinds = whole_shapes(trainer.whole), trainer.weights.plan.stored()
    stored.check(
        {stored_name(kind, name): shape for kind in kinds for name, shape in shapes.items()}
    )
    parts = trainer.local.parts
    fill_from(
        own,
        {stored_name(kind, name): parts[name] for kind in kinds for name in parts},
        ((name, (), tensor) for name, tensor in stored.read(own)),
    )


def read_state(checkpoint: Path) -> SavedState:
    path = checkpoint / STATE_FOLDER / STATE_NAME
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        state: SavedState = config_from(SavedState, values, str(path))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, UsageError) as error:
        raise CheckpointError(f"{path} is corrupt or cut short ({error})") from error
    return state


def saved_checkpoints(run: Path) -> list[Path]:
    """All that are complete, the oldest first."""
    folder = run / FOLDER
    entries = folder.iterdir() if folder.is_dir() else ()
    return sorted(path for path in entries if STEP_NAME.fullmatch(path.name))


def keep_last(run: Path, count: int) -> None:
    """Remove all but the last ones."""
    for path in saved_checkpoints(run)[:-count]:
        remove_checkpoint(path)


def remove_checkpoint(path: Path) -> None:
    """The folder loses its name first: one that is half removed is none that is there."""
    hidden = path.with_name(f".{path.name}.removed")
    shutil.rmtree(hidden, ignore_errors=True)
    path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def remove_leftovers(run: Path) -> None:
    """What a process that was killed while it wrote left behind."""
    folder = run / FOLDER
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name.startswith("."):
            shutil.rmtree(path, ignore_errors=True)
