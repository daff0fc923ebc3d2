"""`ridgeline tune lr`: the learning rate to train with, from a short run under a rising one."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ridgeline.cli.arguments.options import add_flags, add_model
from ridgeline.cli.arguments.parser import group
from ridgeline.cli.terminal import Terminal
from ridgeline.cli.train import flagged_config, usual_folder
from ridgeline.cli.tune.unused import LENGTH, RATE, SAVING, WATCHING, refuse_unused
from ridgeline.cli.tune.width import rate_ends
from ridgeline.configs.named import is_named_run, named_run
from ridgeline.errors import CHECK_FAILED_EXIT_CODE
from ridgeline.formats.files import atomic_write
from ridgeline.training.config import TrainConfig
from ridgeline.tuning.pages.rates_page import COLUMNS, rate_headline, seed_rows, write_rates_page
from ridgeline.tuning.rates.range_test import RangeOptions, range_test

EXAMPLE = """\
ridgeline tune lr demo --data book.txt --out rates
ridgeline tune lr --shape tiny --tokenizer demo --data a.txt --range 1e-5..10
ridgeline tune lr configs:lora_demo --data book.txt --seeds 5"""
MAIN_FLAGS = (
    "--shape", "--tokenizer", "--device", "--data", "--sequence-length", "--batch", "--lora",
    "--range", "--range-steps", "--seeds", "--out",
)  # fmt: skip
DOCUMENT = "rates.json"
DEFAULTS = RangeOptions()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, or_shape=True)
    rising = group(parser, "range test")
    rising.add_argument(
        "--range",
        default=f"{DEFAULTS.low:g}..{DEFAULTS.high:g}",
        metavar="LOW..HIGH",
        help="rates from the first step to the last (default: %(default)s)",
    )
    rising.add_argument(
        "--range-steps", type=int, default=DEFAULTS.steps, metavar="N",
        help="steps of a seed (default: %(default)s)",
    )  # fmt: skip
    rising.add_argument(
        "--seeds", type=int, default=DEFAULTS.seeds, metavar="N",
        help="runs, over which the interval is (default: %(default)s)",
    )  # fmt: skip
    group(parser, "run").add_argument(
        "--out", type=Path, metavar="DIR", help="folder of the page (default: MODEL-rates)"
    )
    add_flags(parser, TrainConfig)


def run(args: argparse.Namespace, terminal: Terminal) -> dict[str, Any]:
    unused = (*LENGTH, *RATE, *SAVING, *WATCHING, "eval-sequences")
    refuse_unused(args, unused, "rates are those of --range, over --range-steps")
    options = RangeOptions(*rate_ends(args.range), args.range_steps, args.seeds)
    is_named = args.model is not None and is_named_run(args.model)
    base = named_run(args.model) if is_named else TrainConfig()
    config = flagged_config(args, base, is_named)
    out = args.out or Path(usual_folder(args).name.replace("-trained", "-rates"))
    with terminal.progress() as progress:
        outcome = range_test(config, options, device=args.device, progress=progress)
    document = {
        "out": str(out),
        **asdict(outcome.verdict),
        "rates": list(outcome.rates),
        "losses": [
            [loss if math.isfinite(loss) else None for loss in run] for run in outcome.losses
        ],
    }
    with atomic_write(out / DOCUMENT) as file:
        json.dump(document, file)
    page = write_rates_page(out, document, config.model or config.shape or "model")
    return document | {"report": str(page)}


def render(document: dict[str, Any], console: Console) -> None:
    console.print(rate_headline(document), soft_wrap=True, markup=False)
    if document["problem"]:
        console.print(document["problem"], soft_wrap=True, markup=False)
    console.print()
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in COLUMNS:
        table.add_column(column.name, justify="right" if column.is_number else "left")
    for row in seed_rows(document):
        table.add_row(*row)
    console.print(table)
    console.print(f"report: {document['report']}", soft_wrap=True, markup=False)


def exit_code(document: dict[str, Any]) -> int:
    return CHECK_FAILED_EXIT_CODE if document["suggested"] is None else 0
