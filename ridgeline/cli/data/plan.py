"""`ridgeline data plan`: what a build will take."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from ridgeline.cli.arguments.parser import group
from ridgeline.cli.data.order import add_order, check_packages, recipe_of, workers_of
from ridgeline.cli.tables.corpus import plan_table, stages_table
from ridgeline.cli.terminal import Terminal

EXAMPLE = """\
ridgeline data plan --in 'crawl/*.jsonl.gz'
ridgeline data plan configs:web_english --in pages.warc.gz --workers 64"""
MAIN_FLAGS = (
    "--in", "--out", "--workers", "--memory", "--text-field", "--separator", "--rules", "--keep",
    "--tokenizer",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_order(parser, needs_input=True)
    group(parser, "output").add_argument(
        "--out", type=Path, default=Path(), metavar="CORPUS", help="whose disk is looked at"
    )


def run(args: argparse.Namespace, terminal: Terminal) -> dict[str, Any]:
    recipe = recipe_of(args)
    check_packages()
    from ridgeline.data.corpus.plan import plan

    return plan(tuple(args.patterns), recipe, args.out, workers_of(args))


def render(document: dict[str, Any], console: Console) -> None:
    console.print(plan_table(document))
    console.print(stages_table(document))
