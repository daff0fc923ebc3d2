"""`ridgeline bench …`: one file for each thing that is measured, shaped like a verb's."""

from __future__ import annotations

import argparse
from types import ModuleType
from typing import Any

from rich.console import Console

from ridgeline.cli.arguments.parser import Parser, example
from ridgeline.cli.bench import collectives as bench_collectives
from ridgeline.cli.bench import compare as bench_compare
from ridgeline.cli.bench import engine as bench_engine
from ridgeline.cli.bench import kernels as bench_kernels
from ridgeline.cli.bench import serve as bench_serve
from ridgeline.cli.terminal import Terminal

PARTS: dict[str, tuple[ModuleType, str]] = {
    "kernels": (bench_kernels, "kernels against the hardware limit and against PyTorch"),
    "sequences": (bench_kernels, "kernels that run together: a decode layer, norm and matmul"),
    "collectives": (bench_collectives, "what ranks do together, by size; plans use the figures"),
    "engine": (bench_engine, "a workload in the engine: throughput, latency, share of the limit"),
    "serve": (bench_serve, "load on any OpenAI-compatible server: latency, goodput, highest rate"),
}
COMPARE = "compare"  # `engine` with --compare
EXAMPLE = """\
ridgeline bench kernels --op rms_norm
ridgeline bench engine demo --workload cpu --peer transformers
ridgeline bench serve --url http://127.0.0.1:8000 --rate 4"""


def add_arguments(parser: Parser) -> None:
    parts = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    for name, (module, summary) in PARTS.items():
        text = summary[0].upper() + summary[1:] + "."
        part = parts.add_parser(name, help=summary, description=text)
        part.main_flags = getattr(module, "MAIN_FLAGS", ())
        if hasattr(module, "EXAMPLE"):
            part.epilog = example(module.EXAMPLE)
        module.add_arguments(part)


def run(args: argparse.Namespace, terminal: Terminal) -> dict[str, Any]:
    what = args.what if getattr(args, COMPARE, None) is None else COMPARE
    document: dict[str, Any] = {"what": what, **_module(what).run(args, terminal)}
    return document


def render(document: dict[str, Any], console: Console) -> None:
    _module(document["what"]).render(document, console)


def _module(what: str) -> ModuleType:
    return bench_compare if what == COMPARE else PARTS[what][0]
