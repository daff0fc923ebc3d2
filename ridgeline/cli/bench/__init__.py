"""`ridgeline bench …`: what is measured has a file of its own, with the names that a verb has."""

from __future__ import annotations

import argparse
from types import ModuleType
from typing import Any

from rich.console import Console

from ridgeline.cli.bench import compare as bench_compare
from ridgeline.cli.bench import engine as bench_engine
from ridgeline.cli.bench import kernels as bench_kernels
from ridgeline.cli.bench import serve as bench_serve
from ridgeline.cli.terminal import Terminal

PARTS: dict[str, tuple[ModuleType, str]] = {
    "kernels": (bench_kernels, "every kernel beside the machine's ceilings and torch's own ways"),
    "sequences": (bench_kernels, "kernels that belong together: a decode layer, norm and product"),
    "engine": (bench_engine, "a workload through the engine: throughput, latencies, the limit"),
    "serve": (bench_serve, "load on any OpenAI endpoint: latencies, goodput, the highest rate"),
}
COMPARE = "compare"  # `engine` with --compare
EXAMPLE = """\
ridgeline bench kernels --op rms_norm --only residual --no-compile --save results
ridgeline bench sequences --op decode_layer --save results
ridgeline bench engine demo --workload cpu --peer transformers
ridgeline bench engine demo --workload batch-1 --compare fp32,bf16,int8 --rounds 7
ridgeline bench serve --url http://127.0.0.1:8000 --rate 4 --ttft-ms 500 --plot serve.html"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parts = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    for name, (module, summary) in PARTS.items():
        text = summary[0].upper() + summary[1:] + "."
        module.add_arguments(parts.add_parser(name, help=summary, description=text))


def run(args: argparse.Namespace, terminal: Terminal) -> dict[str, Any]:
    what = args.what if getattr(args, COMPARE, None) is None else COMPARE
    document: dict[str, Any] = {"what": what, **_module(what).run(args, terminal)}
    return document


def render(document: dict[str, Any], console: Console) -> None:
    _module(document["what"]).render(document, console)


def _module(what: str) -> ModuleType:
    return bench_compare if what == COMPARE else PARTS[what][0]
