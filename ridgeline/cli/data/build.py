"""`ridgeline data build`: raw files to a corpus."""

from __future__ import annotations

import argparse
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.console import Console

from ridgeline.cli.arguments.parser import group
from ridgeline.cli.data.duplicates import duplicate_lines
from ridgeline.cli.data.order import add_order, check_packages, recipe_of, workers_of
from ridgeline.cli.tables.corpus import accounts_table, stages_table
from ridgeline.cli.terminal import Terminal
from ridgeline.data.corpus.recipe import as_toml
from ridgeline.errors import UsageError
from ridgeline.profiling.printing import safe_text

EXAMPLE = """\
ridgeline data build --in 'crawl/*.jsonl.gz' --out corpus
ridgeline data build configs:web_english --in pages.warc.gz --out english
ridgeline data build my_recipes.py:forum --show"""
MAIN_FLAGS = (
    "--in", "--out", "--resume", "--show", "--workers", "--memory", "--ray", "--engine",
    "--text-field", "--separator", "--rules", "--keep", "--tokenizer",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_order(parser, needs_input=False)
    run_group = group(parser, "run")
    run_group.add_argument(
        "--ray", metavar="ADDRESS",
        help="tasks on a Ray cluster whose machines share these folders; local: of this machine",
    )  # fmt: skip
    run_group.add_argument(
        "--engine", choices=("cpu", "gpu"), default="cpu",
        help="where Polars counts words and lines; gpu needs cudf-polars (default: %(default)s)",
    )  # fmt: skip
    run_group.add_argument(
        "--resume", action="store_true", help="go on with a build that was stopped"
    )
    output = group(parser, "output")
    output.add_argument("--out", type=Path, metavar="CORPUS", help="folder to write to")
    output.add_argument("--show", action="store_true", help="print the recipe as TOML, and end")


def run(args: argparse.Namespace, terminal: Terminal) -> dict[str, Any]:
    recipe = recipe_of(args)
    if args.show:
        return {"recipe": as_toml(recipe)}
    for flag, given in (("--in", args.patterns), ("--out", args.out)):
        if not given:
            raise UsageError(f"data build needs {flag} (see: ridgeline data build --help)")
    if args.ray is not None and (args.workers or args.memory):
        raise UsageError(
            "--workers and --memory are of this machine; with --ray the cluster has both"
        )
    check_packages()
    from ridgeline.data.corpus.build import BuildOrder, build
    from ridgeline.data.corpus.engines.local import local_engine
    from ridgeline.data.corpus.engines.ray import RayTasks
    from ridgeline.data.corpus.stages.quality import checked_engine

    order = BuildOrder(
        patterns=tuple(args.patterns),
        out=args.out,
        recipe=recipe,
        resume=args.resume,
        polars=checked_engine(args.engine),
    )
    engine = local_engine(workers_of(args)) if args.ray is None else RayTasks(args.ray)
    with closing(engine), terminal.progress() as progress:
        return {"corpus": str(args.out), **build(order, engine, progress)}


def render(document: dict[str, Any], console: Console) -> None:
    if "recipe" in document:
        console.print(document["recipe"], end="", markup=False, soft_wrap=True)
        return
    console.print(accounts_table(document))
    for place in document["quarantine"]:
        console.print(safe_text(
            f"quarantined: {place['file']} at {place['offset']}: {place['reason']}"
        ))  # fmt: skip
    lines = duplicate_lines(document["duplicates"]) if "duplicates" in document else []
    for line in (*lines, *document["notes"], document["certificate"]):
        console.print(safe_text(line))
    console.print(stages_table(document))
    console.print(safe_text(f"{document['tokens']:,} tokens in {document['corpus']}"), style="bold")
