"""`ridgeline tune serve`: the serving recipe that does a workload fastest, by a search over flags
of `ridgeline serve`; `optimize`'s bench measures each trial beside the defaults.
"""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console

from ridgeline.cli.arguments.options import add_model, add_workload, from_flags
from ridgeline.cli.arguments.parser import group
from ridgeline.cli.arguments.tasks import check_task_flags
from ridgeline.cli.optimize import add_quality_arguments, asked_measured
from ridgeline.cli.terminal import Terminal
from ridgeline.cli.tune.search import add_search_arguments, news_of, render_trials
from ridgeline.errors import INTERRUPTED_EXIT_CODE, UsageError
from ridgeline.ladder.order import ClimbOrder, prepared
from ridgeline.ladder.recipe_search.answer import search_recipes
from ridgeline.ladder.recipe_search.choices import RecipeSearch, parse_recipe_space
from ridgeline.ladder.searching.budget import parse_duration
from ridgeline.quality.gate import USUAL, QualityBounds
from ridgeline.quality.tasks import TaskOptions
from ridgeline.recipe import FILE_NAME
from ridgeline.tuning.kept_folder import check_folder
from ridgeline.tuning.pages.search_page import write_search_page
from ridgeline.tuning.searching.halving import Rungs
from ridgeline.tuning.searching.journal import open_journal
from ridgeline.tuning.searching.search import SearchBudget

EXAMPLE = """\
ridgeline tune serve demo --over max-batch=4,8,16,32 \\
  --over token-budget=128..2048 --runs 12 --out serving
ridgeline tune serve ./model --for latency --over scheme=int8,int4-g128 \\
  --over tiles.skinny_linear=0..5 --budget 20m --out serving"""
MAIN_FLAGS = (
    "--shape", "--device", "--for", "--workload", "--over", "--budget", "--runs", "--quality",
    "--max-kl", "--out", "--resume",
)  # fmt: skip
USUAL_RUNGS = Rungs(3, 2)
SHORTER = "a shorter --workload"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, or_shape=True)
    group(parser, "goal").add_argument(
        "--for", dest="goal", choices=("latency", "throughput"), default="throughput",
        help="latency: one request at a time; throughput: all at once (default: %(default)s)",
    )  # fmt: skip
    add_workload(parser, meaning="as `optimize`")
    group(parser, "search").add_argument(
        "--over", action="append", default=[], metavar="NAME=VALUES",
        help="search this flag of `serve`: max-batch=8,16,32, token-budget=256..4096, "
        "kv-dtype=bf16,int8; tiles.OP=0..5 takes kernel tiles measured to be so many places behind "
        "the fastest",
    )  # fmt: skip
    add_search_arguments(parser, USUAL_RUNGS)
    add_quality_arguments(parser)


def run(args: argparse.Namespace, terminal: Terminal) -> dict[str, Any]:
    search = asked_search(args)
    seconds = None if args.budget is None else parse_duration(args.budget)
    budget = SearchBudget(args.runs, seconds, SHORTER)
    check_folder(args.out, search.to_json(), args.resume)
    with terminal.whole_run() as whole:
        job = prepared(search.order, whole)  # what is wrong with the model leaves no folder
        with open_journal(args.out, search.to_json(), search.space, resume=args.resume) as journal:
            document = search_recipes(search, job, budget, journal, args.out, whole, news_of(whole))
    page = write_search_page(args.out, document, search.order.model or search.order.shape or "")
    return document | {
        "out": str(args.out),
        "report": str(page),
        "model": search.order.model,
        "recipe": str(args.out / FILE_NAME) if document["is_kept"] else None,
    }


def asked_search(args: argparse.Namespace) -> RecipeSearch:
    given: QualityBounds = from_flags(args, QualityBounds)
    quality = args.quality == "on"
    if not quality and (given.are_given or args.text or args.task):
        raise UsageError(
            "--max-kl, --max-ppl-increase, --text and --task do not go with --quality off"
        )
    check_task_flags(args, TaskOptions(args.limit, args.shots, args.examples, args.run_code))
    if args.text is not None and not args.text.is_file():
        raise UsageError(f"there is no file {str(args.text)!r}; give a text file")
    order = ClimbOrder(
        args.model,
        args.shape,
        args.out,
        args.goal,
        args.workload,
        args.output_tokens,
        given.filled_from(USUAL),
        quality=quality,
        measured=asked_measured(args),
        device=args.device,
    )
    rungs = Rungs(args.one_in or USUAL_RUNGS.keep, args.rungs or USUAL_RUNGS.num)
    return RecipeSearch(order, parse_recipe_space(args.over), rungs, args.search_seed or 0)


def render(document: dict[str, Any], console: Console) -> None:
    render_trials(document, console)
    if document["recipe"] is not None:
        words = f"ridgeline serve {document['model']} --recipe {document['recipe']}"
        console.print(words, soft_wrap=True, markup=False)
    console.print(f"report: {document['report']}", soft_wrap=True, markup=False)
    if document["interrupted"]:
        console.print("stopped; go on with --resume")


def exit_code(document: dict[str, Any]) -> int:
    return INTERRUPTED_EXIT_CODE if document["interrupted"] else 0
