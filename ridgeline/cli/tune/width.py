"""`ridgeline tune width`: a learning rate for a wide network, from sweeps of narrow ones."""

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
from ridgeline.cli.train import flagged_config
from ridgeline.cli.tune.unused import SAVING, WATCHING, refuse_unused
from ridgeline.configs.named import is_named_run, named_run
from ridgeline.errors import CHECK_FAILED_EXIT_CODE, UsageError
from ridgeline.formats.files import atomic_write
from ridgeline.progress import Progress
from ridgeline.training.config import TrainConfig
from ridgeline.tuning.kept_folder import check_folder
from ridgeline.tuning.pages.widths_page import (
    BEST_COLUMNS,
    CHECK_COLUMNS,
    best_rows,
    check_rows,
    check_words,
    exponent_rows,
    widths_headline,
    write_widths_page,
)
from ridgeline.tuning.scaling.coordinates import STEPS, Coordinate, coordinate_check
from ridgeline.tuning.scaling.sweep_runs import opened_runs, sweep_description
from ridgeline.tuning.scaling.transfer import RateTransfer, SweepRun, transfer_of
from ridgeline.tuning.scaling.widths import (
    WidthOptions,
    at_width,
    check_sweep,
    sweep_widths,
    wider,
)
from ridgeline.tuning.short_run import plan_short

EXAMPLE = """\
ridgeline tune width --shape tiny --tokenizer demo --data a.txt --steps 200 \\
  --widths 64,128 --to 512
ridgeline tune width configs:pretrain_tiny --data a.txt --widths 64,128 \\
  --batches 4,16 --to 256"""
MAIN_FLAGS = (
    "--shape", "--tokenizer", "--device", "--data", "--sequence-length", "--batch", "--steps",
    "--widths", "--to", "--batches", "--range", "--rates", "--seeds", "--out",
    "--resume",
)  # fmt: skip
DOCUMENT = "widths.json"
DEFAULTS = WidthOptions((64, 128))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, or_shape=True)
    sweep = group(parser, "sweep")
    sweep.add_argument(
        "--widths", required=True, metavar="N,N", help="that are swept, two or more: 64,128"
    )
    sweep.add_argument(
        "--to", type=int, metavar="N", help="the width that is to be trained (default: 4 times the "
        "largest of --widths)",
    )  # fmt: skip
    sweep.add_argument(
        "--batches", default="", metavar="N,N",
        help="batches that are swept at equal tokens (default: --batch alone)",
    )  # fmt: skip
    sweep.add_argument(
        "--range", default=f"{DEFAULTS.low:g}..{DEFAULTS.high:g}", metavar="LOW..HIGH",
        help="of learning rates (default: %(default)s)",
    )  # fmt: skip
    sweep.add_argument(
        "--rates", type=int, default=DEFAULTS.num_rates, metavar="N",
        help="learning rates at each width (default: %(default)s)",
    )  # fmt: skip
    sweep.add_argument(
        "--seeds", type=int, default=DEFAULTS.seeds, metavar="N",
        help="runs of each, over which intervals are (default: %(default)s)",
    )  # fmt: skip
    group(parser, "run").add_argument(
        "--out", type=Path, default=Path("widths"), metavar="DIR",
        help="folder of the runs and the page (default: %(default)s)",
    )  # fmt: skip
    group(parser, "run").add_argument(
        "--resume", action="store_true", help="go on with the sweep, or add runs to it"
    )
    add_flags(parser, TrainConfig)


def run(args: argparse.Namespace, terminal: Terminal) -> dict[str, Any]:
    refuse_unused(args, ("lr", "minutes", *SAVING, *WATCHING), "rates are those of --range")
    options = WidthOptions(
        whole_numbers(args.widths, "--widths"),
        whole_numbers(args.batches, "--batches"),
        *rate_ends(args.range),
        args.rates,
        args.seeds,
    )
    is_named = args.model is not None and is_named_run(args.model)
    config = flagged_config(args, named_run(args.model) if is_named else TrainConfig(), is_named)
    check_sweep(config, options)
    target = args.to or 4 * max(options.widths)
    assert config.shape is not None, "check_sweep"
    wider(config.shape, target)
    description = sweep_description(config)
    check_folder(args.out, description, args.resume, "sweep")
    if not args.resume:  # what is wrong with data or memory leaves no folder
        plan_short(at_width(config, max(options.widths)), device=args.device)
    with (
        opened_runs(args.out, description, resume=args.resume) as finished,
        terminal.progress() as progress,
    ):
        runs = sweep_widths(
            config, options, device=args.device, progress=progress, finished=finished
        )
        transfer = transfer_of(runs)
        checks = checked(config, options, transfer, args.device, progress)
    document = {"out": str(args.out), "shape": config.shape, "widths": list(options.widths)}
    document |= document_of(runs, transfer, checks, target)
    with atomic_write(args.out / DOCUMENT) as file:
        json.dump(document, file, indent=1)
    page = write_widths_page(args.out, document, config.shape)
    return document | {"report": str(page)}


Checks = tuple[list[Coordinate], list[Coordinate]]  # with one rate for all, and by the law


def checked(
    config: TrainConfig,
    options: WidthOptions,
    transfer: RateTransfer,
    device: str,
    progress: Progress,
) -> Checks:
    """At the batch of the run itself."""
    widths, batch = sorted(options.widths), config.batch.size
    first = transfer.rate_at(widths[0], batch).value
    same, law = (
        coordinate_check(
            config, widths, rate_of, seeds=options.seeds, device=device, progress=progress
        )
        for rate_of in (lambda _: first, lambda width: transfer.rate_at(width, batch).value)
    )
    return same, law


def document_of(
    runs: list[SweepRun], transfer: RateTransfer, checks: Checks, target: int
) -> dict[str, Any]:
    same, law = checks
    largest = max(best.width for best in transfer.best)
    batch = transfer.best_batch(largest)
    batch_exponent = transfer.batch_exponent
    return {
        "runs": [
            asdict(run) | {"loss": run.loss if math.isfinite(run.loss) else None} for run in runs
        ],
        "best": [asdict(best) for best in transfer.best],
        "width_exponent": asdict(transfer.width_exponent),
        "batch_exponent": None if batch_exponent is None else asdict(batch_exponent),
        "best_batches": {
            str(width): transfer.best_batch(width)
            for width in sorted({best.width for best in transfer.best})
        },
        "target": {
            "width": target, "batch": batch, "rate": asdict(transfer.rate_at(target, batch)),
        },
        "check_steps": STEPS,
        "coordinates": [
            {"place": each.place, "same": asdict(before.exponent), "law": asdict(each.exponent),
             "sizes": list(each.sizes), "grows": each.grows}
            for before, each in zip(same, law, strict=True)
        ],
        "is_safe": not any(each.grows for each in law),
        "problems": problems(transfer),
    }  # fmt: skip


def problems(transfer: RateTransfer) -> list[str]:
    at_end = [best for best in transfer.best if best.is_at_end]
    if not at_end:
        return []
    words = ", ".join(f"width {best.width} with batch {best.batch}" for best in at_end)
    return [
        f"The lowest loss lies at an end of the rates for {words}: the law is not to be trusted; "
        "give a --range that goes further."
    ]


def whole_numbers(text: str, flag: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(word) for word in text.split(",") if word.strip())
    except ValueError:
        raise UsageError(f"{flag} is {text!r}; give whole numbers with commas: 64,128") from None
    if any(number < 1 for number in numbers):
        raise UsageError(f"{flag} is {text!r}; give numbers above zero")
    return numbers


def rate_ends(text: str) -> tuple[float, float]:
    low, dots, high = text.partition("..")
    try:
        if not dots:
            raise ValueError
        return float(low), float(high)
    except ValueError:
        raise UsageError(f"--range is {text!r}; give two rates as 1e-6..1") from None


def render(document: dict[str, Any], console: Console) -> None:
    for line in (widths_headline(document), check_words(document), *document["problems"]):
        console.print(line, soft_wrap=True, markup=False)
    for name, each in exponent_rows(document).items():
        console.print(
            f"  {name}: {each['value']:+.2f} ({each['low']:+.2f} to {each['high']:+.2f})",
            soft_wrap=True, markup=False,
        )  # fmt: skip
    for columns, rows in (
        (BEST_COLUMNS, best_rows(document)),
        (CHECK_COLUMNS, check_rows(document)),
    ):
        console.print()
        table = Table(box=None, header_style="bold", pad_edge=False)
        for column in columns:
            table.add_column(column.name, justify="right" if column.is_number else "left")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    console.print(f"report: {document['report']}", soft_wrap=True, markup=False)


def exit_code(document: dict[str, Any]) -> int:
    is_sound = document["is_safe"] and not document["problems"]
    return 0 if is_sound else CHECK_FAILED_EXIT_CODE
