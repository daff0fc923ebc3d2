"""`ridgeline tune …`: one file for each thing that is looked for, shaped like a verb's."""

from __future__ import annotations

import argparse
from types import ModuleType
from typing import Any

from rich.console import Console

from ridgeline.cli.arguments.parser import Parser, example
from ridgeline.cli.terminal import Terminal
from ridgeline.cli.tune import lr as tune_lr
from ridgeline.cli.tune import scale as tune_scale
from ridgeline.cli.tune import search as tune_search
from ridgeline.cli.tune import serve as tune_serve
from ridgeline.cli.tune import width as tune_width

PARTS: dict[str, tuple[ModuleType, str]] = {
    "lr": (tune_lr, "a learning rate, from the loss under a rising one"),
    "search": (tune_search, "the best of many short runs: learning rate, batch, shape and more"),
    "width": (
        tune_width,
        "a learning rate for a wide network, from narrow ones; a coordinate check",
    ),
    "serve": (tune_serve, "the serving recipe that does a workload fastest: batch, pages, tiles"),
    "scale": (tune_scale, "a scaling law of finished runs: loss by parameters and tokens"),
}
EXAMPLE = """\
ridgeline tune lr demo --data book.txt --out rates
ridgeline tune search demo --data book.txt --steps 200 --budget 2h --out study
ridgeline tune scale runs/ --out law"""


def add_arguments(parser: Parser) -> None:
    parts = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    for name, (module, summary) in PARTS.items():
        part = parts.add_parser(
            name, help=summary, description=summary[0].upper() + summary[1:] + "."
        )
        part.main_flags = getattr(module, "MAIN_FLAGS", ())
        part.epilog = example(module.EXAMPLE)
        module.add_arguments(part)


def run(args: argparse.Namespace, terminal: Terminal) -> dict[str, Any]:
    return {"what": args.what, **PARTS[args.what][0].run(args, terminal)}


def render(document: dict[str, Any], console: Console) -> None:
    PARTS[document["what"]][0].render(document, console)


def exit_code(document: dict[str, Any]) -> int:
    module = PARTS[document["what"]][0]
    return module.exit_code(document) if hasattr(module, "exit_code") else 0
