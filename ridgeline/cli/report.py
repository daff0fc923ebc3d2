"""`ridgeline report …`: a saved `optimize` run shown again, two of them side by side, and how
accurate predictions were.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ridgeline.cli.arguments.parser import group
from ridgeline.cli.tables.compare import comparison_table
from ridgeline.cli.tables.optimize import climb_table
from ridgeline.cli.terminal import Terminal
from ridgeline.errors import UsageError
from ridgeline.ladder.guessing.earlier import first_answers, known_answers
from ridgeline.ladder.reporting.card import write_card
from ridgeline.ladder.reporting.comparing import NamedClimb, compare, write_comparison
from ridgeline.ladder.reporting.report import write_report
from ridgeline.ladder.reporting.result import Climb
from ridgeline.ladder.reporting.saved import load_climb
from ridgeline.profiling.predicting import accuracy
from ridgeline.profiling.printing import safe_text

EXAMPLE = """\
ridgeline report show demo-fast --html report.html
ridgeline report compare fast faster --html compare.html
ridgeline report accuracy"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parts = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    summary = "show a finished `optimize` run in the terminal"
    show = parts.add_parser("show", help=summary, description=f"{summary.capitalize()}.")
    show.add_argument("folder", type=Path, metavar="DIR", help="the --out folder of that run")
    group(show, "output").add_argument(
        "--html", type=Path, metavar="FILE", help="also write the HTML report to FILE"
    )
    group(show, "output").add_argument(
        "--card", type=Path, metavar="FILE", help="also write the card to share, an SVG, to FILE"
    )
    _add_compare(parts.add_parser)
    summary = "how far predictions and first answers were from what was measured on this machine"
    parts.add_parser("accuracy", help=summary, description=f"{summary.capitalize()}.")


def _add_compare(add_parser: Any) -> None:
    summary = "show two finished `optimize` runs side by side"
    both = add_parser("compare", help=summary, description=f"{summary.capitalize()}.")
    both.add_argument("first", type=Path, metavar="A", help="the --out folder of a run")
    both.add_argument("second", type=Path, metavar="B", help="that of another")
    group(both, "output").add_argument(
        "--html", type=Path, metavar="FILE", help="also write an HTML page to FILE"
    )


def run(args: argparse.Namespace, terminal: Terminal) -> dict[str, Any]:
    if args.what == "show":
        return {"what": "show", **_show(args)}
    return {"what": args.what, **(_compare(args) if args.what == "compare" else _accuracy())}


def _show(args: argparse.Namespace) -> dict[str, Any]:
    climb = load_climb(args.folder)
    document: dict[str, Any] = {"climb": climb.to_json()}
    if args.html is not None:
        write_report(climb, _file("--html", args.html, "report.html"))
        document["html"] = str(args.html)
    if args.card is not None:
        write_card(climb, _file("--card", args.card, "card.svg"))
        document["card"] = str(args.card)
    return document


def _file(flag: str, path: Path, usual: str) -> Path:
    if path.is_dir():
        raise UsageError(f"{flag} {path} is a folder; give a file, e.g. {path}/{usual}")
    return path


def _compare(args: argparse.Namespace) -> dict[str, Any]:
    climbs = [NamedClimb(str(path), load_climb(path)) for path in (args.first, args.second)]
    both = compare(climbs[0], climbs[1])
    document = both.to_json()
    if args.html is not None:
        write_comparison(both, _file("--html", args.html, "compare.html"))
        document["html"] = str(args.html)
    return document


def _accuracy() -> dict[str, Any]:
    path = accuracy.store_path()
    known = accuracy.known_errors(path=path)
    accuracies = accuracy.accuracy_by_area(known.outcomes)
    if len(accuracies) > 1:
        accuracies.append(accuracy.accuracy_of(known.outcomes, "all"))
    first = first_answers(known_answers())
    areas = [each.to_json() | {"factor": _factor(known, each.area)} for each in accuracies]
    return {
        "file": str(path),
        "num": len(known.outcomes),
        "num_broken": known.num_broken,
        "default_factor": accuracy.DEFAULT_FACTOR,
        "coverage": accuracy.COVERAGE,
        "areas": areas,
        "first_answers": None if first is None else first.to_json(),
    }


def _factor(known: accuracy.KnownAccuracy, area: str) -> float | None:
    """What the next prediction's interval would be; None where the default is still used."""
    own = [each for each in known.outcomes if area in ("all", each.area)]
    return accuracy.factor_of(own)


def render(document: dict[str, Any], console: Console) -> None:
    if document["what"] == "accuracy":
        _render_accuracy(document, console)
    elif document["what"] == "compare":
        console.print(comparison_table(document))
    else:
        console.print(climb_table(Climb.from_json(document["climb"])))
    for key, word in (("html", "page"), ("card", "card")):
        if key in document:
            console.print(safe_text(f"{word}: {document[key]}"))


def _render_accuracy(document: dict[str, Any], console: Console) -> None:
    if not document["num"]:
        console.print("no predictions recorded yet; `ridgeline optimize` records its own")
    else:
        console.print(_accuracy_table(document))
        console.print(
            "error: predicted / measured - 1, of a speedup or a plan's tokens/s; bias: the same, "
            "signed. Next predictions get "
            f"an interval of ÷ and × that factor, meant to hold for {document['coverage']:.0%}.",
            style="dim",
        )
    if document["first_answers"] is not None:
        console.print(_first_words(document["first_answers"]))
    if document["num_broken"]:
        console.print(
            safe_text(f"{document['num_broken']} lines of {document['file']} cannot be read")
        )


def _first_words(first: dict[str, Any]) -> str:
    climbs = "one climb" if first["num"] == 1 else f"{first['num']} climbs"
    return (
        f"first answers: of {climbs}, {first['num_last']} ended with what was tried first "
        f"({first['num_from_earlier']} began with an earlier climb's answer); in the median the "
        f"first had {first['median_share']:.0%} of the final speed"
    )


def _accuracy_table(document: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("area", no_wrap=True)
    for name in ("number", "median error", "bias", "within ±20%", "in interval"):
        table.add_column(name, justify="right")
    table.add_column("next interval", no_wrap=True)
    for row in document["areas"]:
        held, factor = row["share_held"], row["factor"]
        table.add_row(
            safe_text(row["area"]),
            str(row["num"]),
            f"{row['median_error']:.1%}",
            f"{row['bias']:+.1%}",
            f"{row['share_close']:.0%}",
            "–" if held is None else f"{held:.0%}",
            f"÷× {document['default_factor']:.2f} (default)" if factor is None
            else f"÷× {factor:.2f}",
        )  # fmt: skip
    return table
