"""`ridgeline optimize --train`: its flags, and what of them does not go together."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from ridgeline.cli.arguments.options import add_some_flags, dest_of, from_flags
from ridgeline.cli.arguments.parser import group
from ridgeline.configs.named import is_named_run, named_run
from ridgeline.errors import UsageError
from ridgeline.ladder.searching.budget import parse_duration
from ridgeline.ladder.training.losses import USUAL_BOUND
from ridgeline.ladder.training.order import TrainClimbOrder
from ridgeline.training.config import TrainConfig

TITLE = "training, with --train"
FIELDS = (
    "tokenizer", "data.sequence_length", "batch.sequences", "batch.micro", "precision",
    "recomputation", "optimizer.lr", "seed",
)  # fmt: skip
BOUND = "max_loss_increase"
COMMON = ("model", "shape", "device", "out", "budget", "rounds", "data", "json", "debug")


def add_training_arguments(parser: argparse.ArgumentParser) -> None:
    training = group(parser, TITLE)
    training.add_argument(
        "--train",
        action="store_true",
        help="make training steps of MODEL faster instead: measures what `ridgeline train` runs by "
        "itself and what may be faster, and writes DIR/train.json for it; --data is the text to "
        "train on (default: a built-in one)",
    )
    add_some_flags(training, TrainConfig, FIELDS)
    training.add_argument(
        "--max-loss-increase",
        type=float,
        metavar="SHARE",
        help="how much higher the loss may be after a change that alters what is learned, over "
        f"paired seeds with 95%% confidence (default: {USUAL_BOUND:g})",
    )


def check_flags(args: argparse.Namespace) -> None:
    """No flag is taken and ignored: those of training need --train, and it takes no others."""
    own = {BOUND, *(dest_of(TrainConfig, name) for name in FIELDS)}
    allowed = {*COMMON, *own, "train"}
    for action in args.parser._actions:
        if not action.option_strings or action.dest == argparse.SUPPRESS:
            continue
        is_given = getattr(args, action.dest, action.default) != action.default
        flag = action.option_strings[-1]
        if is_given and args.train and action.dest not in allowed:
            raise UsageError(f"{flag} does not go with --train; remove one of them")
        if is_given and not args.train and action.dest in own:
            raise UsageError(f"{flag} goes with --train, which makes training faster")


def training_order(args: argparse.Namespace) -> TrainClimbOrder:
    config = ordered_config(args)
    name = Path((args.model or args.shape or "model").rpartition(":")[2]).stem
    return TrainClimbOrder(
        config,
        args.out or Path(f"{name}-training"),
        args.device,
        None if args.budget is None else parse_duration(args.budget),
        args.rounds,
        max_loss_increase=USUAL_BOUND if args.max_loss_increase is None else args.max_loss_increase,
    )


def ordered_config(args: argparse.Namespace) -> TrainConfig:
    """The flags over a named run or a file, or over the defaults."""
    is_named = args.model is not None and is_named_run(args.model)
    base = named_run(args.model) if is_named else TrainConfig()
    given: dict[str, Any] = {}
    if args.model is not None and not is_named:
        given["model"] = args.model
    if args.shape is not None:
        given["shape"] = args.shape
    if args.data is not None:
        given["data"] = replace(base.data, path=str(args.data))
    dests = [dest_of(TrainConfig, name) for name in FIELDS]
    flags = argparse.Namespace(**{dest: getattr(args, dest) for dest in dests})
    return from_flags(flags, TrainConfig, replace(base, **given))
