"""`ridgeline data judge`: is a filter kept? By what small models learn with it and without it."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ridgeline.cli.arguments.options import add_flags
from ridgeline.cli.arguments.parser import group
from ridgeline.cli.terminal import Terminal
from ridgeline.cli.train import flagged_config
from ridgeline.cli.tune.unused import SAVING, WATCHING, refuse_unused
from ridgeline.configs.named import is_named_run, named_run
from ridgeline.errors import CHECK_FAILED_EXIT_CODE
from ridgeline.ladder.filters.judge import FilterOrder, judge_filter
from ridgeline.training.config import DataOptions, OptimizerOptions, RunLength, TrainConfig

EXAMPLE = """\
ridgeline data judge raw.txt filtered.txt --text judged.txt
ridgeline data judge raw/ filtered/ --text judged.txt --proxy demo --lr 5e-5"""
MAIN_FLAGS = (
    "--text", "--proxy", "--shape", "--tokenizer", "--device", "--seeds", "--steps", "--tokens",
    "--batch", "--sequence-length", "--lr",
)  # fmt: skip
PROXY = TrainConfig(
    shape="tiny",
    tokenizer="demo",
    data=DataOptions(sequence_length=128),
    optimizer=OptimizerOptions(lr=5e-3),
    end=RunLength(steps=200),
)
DEFAULT_SEEDS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", type=Path, metavar="BEFORE", help="text as it was")
    parser.add_argument("after", type=Path, metavar="AFTER", help="what the filter left of it")
    judging = group(parser, "judging")
    judging.add_argument(
        "--text", type=Path, required=True, metavar="FILE", help="text to judge by, in neither"
    )
    judging.add_argument(
        "--seeds", type=int, default=DEFAULT_SEEDS, metavar="N",
        help="pairs of proxies, over which the interval is (default: %(default)s)",
    )  # fmt: skip
    model = group(parser, "model")
    model.add_argument(
        "--proxy", dest="model", metavar="MODEL", help="a model or named run that is trained on"
    )
    model.add_argument(
        "--shape", metavar="NAME", help="or a shape with random weights (default: tiny)"
    )
    model.add_argument("--device", default="auto", metavar="DEVICE", help="cpu, cuda or cuda:N")
    add_flags(parser, TrainConfig)


def run(args: argparse.Namespace, terminal: Terminal) -> dict[str, Any]:
    unused = ("data", "held-out", *SAVING, *WATCHING)
    refuse_unused(args, unused, "proxies learn BEFORE and AFTER whole, and leave nothing")
    is_named = args.model is not None and is_named_run(args.model)
    base = named_run(args.model) if is_named else PROXY
    if args.model is not None and not is_named:
        base = TrainConfig(end=PROXY.end)
    config = flagged_config(args, base, is_named)
    order = FilterOrder(config, args.before, args.after, args.text, args.seeds, args.device)
    with terminal.progress() as progress:
        return asdict(judge_filter(order, progress))


def render(document: dict[str, Any], console: Console) -> None:
    word = "kept" if document["is_kept"] else "dropped"
    console.print(f"{word}: {document['reason']}", soft_wrap=True, markup=False)
    console.print()
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("text")
    table.add_column("tokens", justify="right")
    table.add_column("epochs", justify="right")
    table.add_column("loss of each seed")
    for name in ("before", "after"):
        side = document[name]
        losses = " ".join(f"{loss:.4f}" for loss in side["losses"])
        table.add_row(side["path"], f"{side['num_tokens']:,}", f"{side['epochs']:.2f}", losses)
    console.print(table)
    if document["after"]["epochs"] > 1 >= document["before"]["epochs"]:
        console.print(
            "what the filter left is learned more than once in a run; fewer --steps compare new "
            "text with new text",
            soft_wrap=True,
        )  # fmt: skip


def exit_code(document: dict[str, Any]) -> int:
    return 0 if document["is_kept"] else CHECK_FAILED_EXIT_CODE
