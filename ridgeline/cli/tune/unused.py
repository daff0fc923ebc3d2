"""Flags of a training run that would do nothing in a command that trains its own way: refused."""

from __future__ import annotations

import argparse
from collections.abc import Collection

from ridgeline.cli.arguments.options import given_flags
from ridgeline.errors import UsageError
from ridgeline.training.config import TrainConfig

SAVING = ("save-every", "keep", "save-failure", "tensorboard")
WATCHING = ("non-finite", "spikes", "spike-factor", "max-lost", "eval-every")
LENGTH = ("steps", "minutes", "tokens")
RATE = ("lr", "schedule", "warmup", "final-lr")


def refuse_unused(args: argparse.Namespace, flags: Collection[str], why: str) -> None:
    for word in given_flags(args, TrainConfig):
        name = word.removeprefix("--").partition("=")[0].removeprefix("no-")
        if name in flags:
            raise UsageError(f"--{name} does nothing here: {why}; remove it")
