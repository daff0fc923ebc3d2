"""`ridgeline tune search`: many runs, few of them to their end, and the best settings."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

from rich.console import Console
from rich.table import Table

from ridgeline.cli.arguments.options import add_flags, add_model
from ridgeline.cli.arguments.parser import group
from ridgeline.cli.terminal import Terminal
from ridgeline.cli.train import flagged_config
from ridgeline.configs import training as own_runs
from ridgeline.configs import tuning as own_searches
from ridgeline.configs.named import is_named_run, named_config, named_run
from ridgeline.errors import INTERRUPTED_EXIT_CODE, OutputError, UsageError
from ridgeline.hardware import detect
from ridgeline.ladder.searching.budget import parse_duration
from ridgeline.progress import Standing, WholeRun
from ridgeline.training.config import TrainConfig, check_complete
from ridgeline.training.config_file import save_config
from ridgeline.training.prepare import with_whole_paths
from ridgeline.tuning.kept_folder import (
    check_folder,
    description_path,
    nothing_to_resume,
    read_description,
)
from ridgeline.tuning.network_shapes import Equal
from ridgeline.tuning.pages.search_page import (
    headline,
    lead,
    loss_words,
    point_words,
    ranked,
    write_search_page,
)
from ridgeline.tuning.searching.config import (
    SearchConfig,
    config_from_study,
    edited,
    parse_space,
)
from ridgeline.tuning.searching.halving import Rungs
from ridgeline.tuning.searching.journal import open_journal
from ridgeline.tuning.searching.outcome import study_document
from ridgeline.tuning.searching.processes import opened_trials
from ridgeline.tuning.searching.search import SearchBudget, SearchLoop, SearchOrder, check_any
from ridgeline.tuning.searching.trials import TrialPlace, trim
from ridgeline.tuning.short_run import plan_short

EXAMPLE = """\
ridgeline tune search demo --data book.txt --steps 200 --budget 2h --out study
ridgeline tune search demo --data book.txt --steps 200 --runs 20 --out study \\
  --over lr=1e-6..1e-3 --over batch=4,8,16 --parallel 2
ridgeline tune search configs:tiny_shapes --data a.txt --runs 20 --out shapes
ridgeline tune search --out study --resume --runs 40"""
MAIN_FLAGS = (
    "--shape", "--tokenizer", "--device", "--data", "--sequence-length", "--steps", "--tokens",
    "--out", "--resume", "--over", "--equal", "--budget", "--runs", "--parallel", "--ray",
)  # fmt: skip
TRAIN_FILE = "train.json"
NUM_SHOWN = 8
MOST_KEPT = 9  # trials whose checkpoints stay, those expected to end best


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, or_shape=True)
    search = group(parser, "search")
    search.add_argument(
        "--over",
        action="append",
        default=[],
        metavar="NAME=VALUES",
        help="search this flag of `train` too: lr=1e-5..1e-3, batch=4,8,16 (default: lr, 30 times "
        "each way); layers, width and heads of a shape",
    )
    search.add_argument(
        "--equal",
        choices=get_args(Equal),
        default=None,
        metavar="WHAT",
        help="networks of equal parameters or flops (default: free)",
    )
    search.add_argument(
        "--parallel", type=int, default=1, metavar="N", help="trials at once (default: 1)"
    )
    search.add_argument(
        "--ray",
        action="store_true",
        help="trials as Ray tasks, on the cluster of RAY_ADDRESS or on this machine",
    )
    add_search_arguments(parser, Rungs())
    add_flags(parser, TrainConfig)


def add_search_arguments(parser: argparse.ArgumentParser, usual: Rungs) -> None:
    """How long, how trials go on, and where the study lies."""
    search = group(parser, "search")
    search.add_argument("--budget", metavar="TIME", help="how long: 90s, 30m, 2h")
    search.add_argument(
        "--runs", type=float, metavar="N", help="instead: as much work as N whole runs"
    )
    search.add_argument(
        "--one-in", type=int, metavar="N", help=f"one of N trials goes on (default: {usual.keep})"
    )
    search.add_argument(
        "--rungs",
        type=int,
        metavar="N",
        help=f"times that a whole trial is judged (default: {usual.num})",
    )
    search.add_argument(
        "--search-seed", type=int, metavar="N", help="of what is tried (default: 0)"
    )
    output = group(parser, "run")
    output.add_argument(
        "--out", type=Path, metavar="STUDY", required=True, help="folder of the study"
    )
    output.add_argument("--resume", action="store_true", help="go on with the study")


def run(args: argparse.Namespace, terminal: Terminal) -> dict[str, Any]:
    config = ordered_search(args)
    budget = SearchBudget(args.runs, None if args.budget is None else parse_duration(args.budget))
    if args.parallel < 1:
        raise UsageError(f"--parallel is {args.parallel}; give at least 1")
    check_complete(config.base)
    device = detect(args.device).device
    check_folder(args.out, config.to_json(), args.resume)
    if not args.resume:  # what is wrong with model, data or memory leaves no folder
        plan_short(config.base, device=device)
    place = TrialPlace(config, str(args.out.resolve()), device)
    order = SearchOrder(config.space, budget, config.rungs, config.seed, config.firsts)
    subject = config.base.model or config.base.shape or "model"
    is_stopped = False
    with (
        open_journal(args.out, config.to_json(), config.space, resume=args.resume) as journal,
        terminal.whole_run() as whole,
    ):
        with opened_trials(place, args.parallel, on_ray=args.ray) as runner:
            loop = SearchLoop(journal, order, runner, news(whole, place))
            try:
                loop.run()
            except KeyboardInterrupt:
                is_stopped = True
        document = study_document(loop)
        if not is_stopped:
            check_any(loop.trials)
        if loop.best is not None:
            save_config(edited(config, loop.best.point), args.out)
        page = write_search_page(args.out, document, subject)
    answer = args.out / TRAIN_FILE
    return document | {
        "out": str(args.out),
        "report": str(page),
        "train": str(answer) if loop.best is not None else None,
        "interrupted": is_stopped,
    }


def ordered_search(args: argparse.Namespace) -> SearchConfig:
    """Of the flags, of a named search, or of the study that is gone on with."""
    if args.resume and args.model is None and args.shape is None:
        path = description_path(args.out)
        if not path.is_file():
            raise nothing_to_resume(args.out)
        return config_from_study(read_description(args.out), str(path))
    named: SearchConfig | TrainConfig = TrainConfig()
    is_named = args.model is not None and is_named_run(args.model)
    if is_named:
        named = named_search(args.model)
    base = named.base if isinstance(named, SearchConfig) else named
    train = with_whole_paths(flagged_config(args, base, is_named))
    rungs = named.rungs if isinstance(named, SearchConfig) else Rungs()
    space = named.space if isinstance(named, SearchConfig) and not args.over else None
    return SearchConfig(
        train,
        space or parse_space(args.over, train),
        Rungs(_given(args.one_in, rungs.keep), _given(args.rungs, rungs.num)),
        _given(args.search_seed, named.seed if isinstance(named, SearchConfig) else 0),
        args.equal or (named.equal if isinstance(named, SearchConfig) else "free"),
    )


def _given(value: int | None, default: int) -> int:
    return default if value is None else value


def named_search(text: str) -> SearchConfig | TrainConfig:
    """A search, or a run that is searched around."""
    if text.endswith(".json"):
        return named_run(text)
    kinds: tuple[type[Any], ...] = (SearchConfig, TrainConfig)
    config: SearchConfig | TrainConfig = named_config(text, (own_runs, own_searches), kinds)
    return config


def news_of(whole: WholeRun) -> Callable[[SearchLoop], None]:
    """Shows where a search stands."""

    def tell(loop: SearchLoop) -> None:
        best, trials = loop.best, loop.trials
        text = "" if best is None else f"{loss_words(best.losses[-1])} ({point_words(best.point)})"
        budget = loop.order.budget
        done = loop.used_runs if budget.seconds is None else None
        begun = "1 trial" if len(trials) == 1 else f"{len(trials)} trials"
        whole.show(
            Standing(
                f"{begun}, {loop.used_runs:.1f} whole runs of work",
                text,
                sum(loop.journal.seconds()) / loop.runner.num_parallel,
                budget.seconds,
                0 if done is None else int(done),
                0 if budget.runs is None else int(budget.runs),
            )
        )

    return tell


def news(whole: WholeRun, place: TrialPlace) -> Any:
    """Shows where a search stands, and removes what no trial will need."""
    show = news_of(whole)

    def tell(loop: SearchLoop) -> None:
        show(loop)
        best = loop.best
        likely = sorted(loop.expected, key=loop.expected.__getitem__)
        kept = {
            *likely[:MOST_KEPT],
            *(t.number for t in loop.trials if t.number not in loop.expected),
        }
        with suppress(OutputError):
            trim(place, kept | ({best.number} if best is not None else set()))

    return tell


def render_trials(document: dict[str, Any], console: Console) -> None:
    console.print(headline(document), soft_wrap=True, markup=False)
    console.print(lead(document), soft_wrap=True, markup=False, style="dim")
    console.print()
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("trial")
    table.add_column("settings")
    for share in document["shares"]:
        table.add_column(f"at {100 * share:.3g}%", justify="right")
    for trial in ranked(document)[:NUM_SHOWN]:
        losses = [loss_words(loss) for loss in trial["losses"]]
        losses += ["–"] * (len(document["shares"]) - len(losses))
        table.add_row(f"#{trial['number']}", point_words(trial["point"]), *losses)
    console.print(table)
    console.print()


def render(document: dict[str, Any], console: Console) -> None:
    render_trials(document, console)
    if document["train"] is not None:
        console.print(
            f"ridgeline train {document['train']} --out RUN  # a run with these settings",
            soft_wrap=True, markup=False,
        )  # fmt: skip
    console.print(f"report: {document['report']}", soft_wrap=True, markup=False)
    if document["interrupted"]:
        console.print("stopped; go on with --resume")


def exit_code(document: dict[str, Any]) -> int:
    return INTERRUPTED_EXIT_CODE if document["interrupted"] else 0
