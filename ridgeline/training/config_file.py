"""`train.json`: a config in the folder of its run, and what differs between two.

save_config(config, Path("run")); load_config(Path("run")) == config
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path
from typing import Any

from ridgeline.errors import UsageError
from ridgeline.formats.fields import config_from, dotted_fields
from ridgeline.formats.files import atomic_write
from ridgeline.training.config import TrainConfig

FILE_NAME = "train.json"
VERSION = 1  # of the file's schema; raised when a field changes its meaning
# What may change in a run that goes on.
FREE = ("end.", "evaluation.", "checkpoints.", "watch.", "tensorboard", "layout.")


def changes(one: TrainConfig, other: TrainConfig) -> list[str]:
    """Of a run that goes on. How long it lasts may change, how often it measures and saves, and
    which steps it leaves out.
    """
    if one.layout != other.layout:  # other ranks have other passes, of the same batch
        return differences(one, other, (*FREE, "batch.micro", "recomputation"))
    return differences(one, other, FREE)


def differences(one: TrainConfig, other: TrainConfig, free: tuple[str, ...] = ()) -> list[str]:
    """Fields that differ, in words: `optimizer.lr 0.0001, was 0.001`."""
    return [
        f"{name} {attrgetter(name)(other)!r}, was {attrgetter(name)(one)!r}"
        for name in dotted_fields(TrainConfig)
        if not name.startswith(free) and attrgetter(name)(one) != attrgetter(name)(other)
    ]


def save_config(config: TrainConfig, folder: Path) -> Path:
    """Write `train.json` into a folder, whole or not at all."""
    path = folder / FILE_NAME
    with atomic_write(path) as file:
        json.dump({"version": VERSION} | asdict(config), file, indent=2)
        file.write("\n")
    return path


def load_config(path: Path) -> TrainConfig:
    """From a `train.json`, or from the folder it lies in."""
    path = path / FILE_NAME if path.is_dir() else path
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}") from error
    return parse_config(values, str(path))


def parse_config(values: Any, origin: str) -> TrainConfig:
    """From the fields of its file. Fields left out keep their defaults."""
    if not isinstance(values, Mapping):
        raise UsageError(f"{origin} is {str(values)[:60]!r}; expected an object with fields")
    version = values.get("version")
    if version != VERSION:
        raise UsageError(
            f"{origin} is a training config of version {version!r}; this Ridgeline reads version "
            f"{VERSION}"
        )
    own = {name: value for name, value in values.items() if name != "version"}
    config: TrainConfig = config_from(TrainConfig, own, origin)
    return config
