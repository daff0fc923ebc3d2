"""The arguments that `data build` and `data plan` share: recipe, input, workers."""

from __future__ import annotations

import argparse
from importlib.util import find_spec

from ridgeline.cli.arguments.options import add_flags, from_flags
from ridgeline.cli.arguments.parser import group
from ridgeline.configs.named import named_recipe
from ridgeline.data.corpus.recipe import CorpusRecipe
from ridgeline.data.corpus.resources import WORKER_BYTES, num_workers
from ridgeline.errors import MissingPackageError, UsageError
from ridgeline.hardware.detection import num_cores

PACKAGES = ("polars", "pyarrow", "orjson", "fastwarc", "resiliparse")


def add_order(parser: argparse.ArgumentParser, needs_input: bool) -> None:
    parser.add_argument(
        "recipe", metavar="RECIPE", nargs="?",
        help="configs:NAME, FILE.py:NAME, or a .toml or .json (default: configs:web)",
    )  # fmt: skip
    read = group(parser, "input")
    read.add_argument(
        "--in", dest="patterns", metavar="GLOB", nargs="+", required=needs_input, default=[],
        help="files, folders or patterns: text, JSONL, Parquet, Arrow, HTML, WARC; gz, zst",
    )  # fmt: skip
    run = group(parser, "run")
    run.add_argument(
        "--workers", type=int, metavar="N", help="processes (default: cores, and what memory has)"
    )
    run.add_argument(
        "--memory", type=float, metavar="GIB",
        help=f"that all may take; a worker takes {WORKER_BYTES / 2**30:.2g} GiB",
    )  # fmt: skip
    add_flags(parser, CorpusRecipe)


def recipe_of(args: argparse.Namespace) -> CorpusRecipe:
    """The recipe named, with the flags given."""
    base = CorpusRecipe() if args.recipe is None else named_recipe(args.recipe)
    return from_flags(args, CorpusRecipe, base)


def workers_of(args: argparse.Namespace) -> int:
    if args.workers is not None and args.workers < 1:
        raise UsageError(f"--workers is {args.workers}; give 1 or more")
    return num_workers(args.workers, args.memory, num_cores())


def check_packages() -> None:
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise MissingPackageError(
            f"this needs the package {missing[0]}; try: pip install 'ridgeline[data]'"
        )
