"""Checkpoints of a run: Hugging Face folders with the optimizer's state inside, whole or absent.

    RUN/train.json                              the config (config.py)
    RUN/metrics.jsonl                           every step (metrics.py)
    RUN/checkpoints/step-00000100/              what `serve`, `generate`, `quantize` and
                                                transformers load
    RUN/checkpoints/step-00000100/training/     what resuming takes besides: state.json and
                                                optimizer.safetensors

A checkpoint is written beside its name and renamed when it is complete. The state has a folder of
its own, because some engines load every safetensors file that lies beside the weights.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file

from ridgeline.errors import CheckpointError, UsageError
from ridgeline.formats.fields import config_from
from ridgeline.models.checkpoint.safetensors import open_shard
from ridgeline.models.checkpoint.save import (
    METADATA,
    as_json,
    folder_beside,
    own_memory,
    sync,
    write_file,
)
from ridgeline.models.families import Description
from ridgeline.quantization import save_model
from ridgeline.training.schedule import Counters
from ridgeline.training.step import Trainer, TrainerProgress

FOLDER = "checkpoints"
STATE_FOLDER = "training"
STATE_NAME = "state.json"
OPTIMIZER_NAME = "optimizer.safetensors"
STEP_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class SavedState:
    """What a run goes on from, besides tensors."""

    counters: Counters = field(default_factory=Counters)
    progress: TrainerProgress = field(default_factory=TrainerProgress)
    num_samples: int = 0  # of the data: its order depends on how many there are


@dataclass(frozen=True)
class Exporter:
    """What makes a Hugging Face folder of a model: its description and its tokenizer's files."""

    description: Description
    extra_files: Mapping[str, bytes | Path]


def save_checkpoint(run: Path, trainer: Trainer, state: SavedState, exporter: Exporter) -> Path:
    """Write the checkpoint of this step; one that is there already is this one."""
    target = run.resolve() / FOLDER / f"step-{state.counters.steps:08d}"
    if target.exists():
        return target
    with folder_beside(target) as beside:
        save_model(
            trainer.model, beside, source=exporter.description, extra_files=exporter.extra_files
        )
        folder = beside / STATE_FOLDER
        folder.mkdir()
        write_file(folder / STATE_NAME, as_json(asdict(state)))
        storages: set[int] = set()
        tensors = {name: own_memory(tensor, storages) for name, tensor in trainer.weights.tensors()}
        save_file(tensors, folder / OPTIMIZER_NAME, metadata=METADATA)
        sync(folder / OPTIMIZER_NAME)
        sync(folder)
    return target


@torch.no_grad()
def restore(trainer: Trainer, checkpoint: Path) -> SavedState:
    """Put the optimizer's state back. The model has been loaded from the same folder."""
    folder = checkpoint / STATE_FOLDER
    state = read_state(checkpoint)
    wanted = dict(trainer.weights.tensors())
    with open_shard(folder / OPTIMIZER_NAME) as file:
        names = set(file.keys())
        if names != wanted.keys():
            some = ", ".join(sorted(names ^ wanted.keys())[:3])
            raise CheckpointError(
                f"{folder / OPTIMIZER_NAME} does not fit this run: {some} are on one side only"
            )
        for name, tensor in wanted.items():
            stored = file.get_tensor(name)
            if stored.shape != tensor.shape:
                raise CheckpointError(
                    f"{folder / OPTIMIZER_NAME}: {name} has the shape {list(stored.shape)} "
                    f"instead of {list(tensor.shape)}"
                )
            tensor.copy_(stored)
    trainer.weights.copy_masters()
    trainer.progress = state.progress
    return state


def read_state(checkpoint: Path) -> SavedState:
    path = checkpoint / STATE_FOLDER / STATE_NAME
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        state: SavedState = config_from(SavedState, values, str(path))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, UsageError) as error:
        raise CheckpointError(
            f"{path} is corrupt or cut short ({error}); remove the folder {checkpoint} to go on "
            "from the checkpoint before it"
        ) from error
    return state


def saved_checkpoints(run: Path) -> list[Path]:
    """All that are complete, the oldest first."""
    folder = run / FOLDER
    entries = folder.iterdir() if folder.is_dir() else ()
    return sorted(path for path in entries if STEP_NAME.fullmatch(path.name))


def keep_last(run: Path, count: int) -> None:
    """Remove all but the last ones. A folder loses its name first: one that is half removed is none
    that is there.
    """
    for path in saved_checkpoints(run)[:-count]:
        hidden = path.with_name(f".{path.name}.removed")
        path.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def remove_leftovers(run: Path) -> None:
    """What a process that was killed while it wrote left behind."""
    folder = run / FOLDER
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name.startswith("."):
            shutil.rmtree(path, ignore_errors=True)
