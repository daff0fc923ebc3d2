"""`ridgeline data …`: one file for each thing that is done with a corpus, shaped like a verb's."""

from __future__ import annotations

import argparse
from types import ModuleType
from typing import Any

from rich.console import Console

from ridgeline.cli.arguments.parser import Parser, example
from ridgeline.cli.data import build as data_build
from ridgeline.cli.data import check as data_check
from ridgeline.cli.data import explain as data_explain
from ridgeline.cli.data import judge as data_judge
from ridgeline.cli.data import mix as data_mix
from ridgeline.cli.data import plan as data_plan
from ridgeline.cli.terminal import Terminal

PARTS: dict[str, tuple[ModuleType, str]] = {
    "build": (data_build, "raw files to clean, deduplicated, tokenized shards"),
    "plan": (data_plan, "units, disk, memory and hours of a build, and what bounds it"),
    "check": (data_check, "every file of a corpus against its index"),
    "explain": (data_explain, "what a batch holds, by file and byte, and where a byte went"),
    "judge": (data_judge, "whether a filter is kept: what small models learn with and without it"),
    "mix": (data_mix, "corpora by exact quotas, as data to train on"),
}
EXAMPLE = """\
ridgeline data plan --in 'crawl/*.jsonl.gz'
ridgeline data build --in 'crawl/*.jsonl.gz' --out corpus"""


def add_arguments(parser: Parser) -> None:
    parts = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    for name, (module, summary) in PARTS.items():
        text = summary[0].upper() + summary[1:] + "."
        part = parts.add_parser(name, help=summary, description=text)
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
