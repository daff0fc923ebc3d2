"""`ridgeline explain TERM`: what a term means, what it is on this machine, where it is taught."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table
from rich.text import Text

from ridgeline.cli.arguments.options import DEVICE_HELP
from ridgeline.cli.arguments.parser import group
from ridgeline.cli.terminal import Terminal
from ridgeline.hardware import detect
from ridgeline.kernels.ceilings import measure
from ridgeline.learn.glossary import figures, find_term, lesson_of, needs
from ridgeline.learn.terms import TERMS

EXAMPLE = """\
ridgeline explain occupancy
ridgeline explain prefix cache
ridgeline explain"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "term", metavar="TERM", nargs="*", help="one term, of any number of words; none lists all"
    )
    group(parser, "device").add_argument(
        "--device", default="auto", metavar="DEVICE", help=DEVICE_HELP
    )


def run(args: argparse.Namespace, terminal: Terminal) -> dict[str, Any]:
    if not args.term:
        rows = [{"term": term.name, "meaning": term.meaning} for term in TERMS]
        return {"terms": sorted(rows, key=lambda row: row["term"].lower())}
    term = find_term(" ".join(args.term))
    hardware = detect(args.device)
    if needs(term):
        with terminal.progress() as progress:
            hardware = measure(hardware, only=set(needs(term)), progress=progress)
    lesson = lesson_of(term)
    return {
        "term": term.name,
        "also": list(term.also),
        "meaning": term.meaning,
        "device": hardware.name,
        "here": figures(term, hardware),
        "lesson": None
        if lesson is None
        else {"number": lesson.number, "name": lesson.name, "title": lesson.title},
    }


def render(document: dict[str, Any], console: Console) -> None:
    if "terms" in document:
        table = Table(box=None, padding=(0, 1), pad_edge=False, show_header=False)
        table.add_column(no_wrap=True, style="bold")
        table.add_column()
        for row in document["terms"]:
            table.add_row(row["term"], Text(row["meaning"]))
        console.print(table)
        return
    also = f" (also: {', '.join(document['also'])})" if document["also"] else ""
    console.print(Text.assemble((document["term"], "bold"), (also, "dim")))
    console.print(Markdown(document["meaning"]))
    for line in document["here"]:
        console.print(Text.assemble(("here: ", "dim"), line))
    lesson = document["lesson"]
    if lesson is not None:
        console.print(
            f"lesson {lesson['number']}: {lesson['title']} (ridgeline learn {lesson['number']})",
            style="dim",
        )
