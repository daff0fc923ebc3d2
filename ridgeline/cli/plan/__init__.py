"""`ridgeline plan`: what a model does on a cluster before money is spent."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console

from ridgeline.cli.options import MODEL_HELP
from ridgeline.cli.parser import group
from ridgeline.cli.plan import serve
from ridgeline.cli.plan.subject import config_named
from ridgeline.cli.terminal import Terminal
from ridgeline.planning.clusters.parsing import parse_cluster

EXAMPLE = """\
ridgeline plan llama-3.1-70b --gpus 8xH200 --for serve \\
  --workload trace.csv --ttft-ms 500 --tpot-ms 40 --save ."""
MAIN_FLAGS = (
    "--gpus", "--for", "--workload", "--ttft-ms", "--tpot-ms", "--router", "--scheme", "--kv-dtype",
    "--max-batch", "--tensor-parallel", "--save",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help=f"a shape such as llama-3.1-70b, or a {MODEL_HELP}"
    )
    plan = group(parser, "plan")
    plan.add_argument(
        "--gpus", required=True, metavar="CLUSTER", help="8xH100, DGX-H200, 2xSuperPOD or a file"
    )
    plan.add_argument("--for", dest="purpose", choices=("serve",), required=True, help="what for")
    serve.add_arguments(parser)
    group(parser, "output").add_argument(
        "--save", type=str, metavar="DIR", help="write plan-1.json and more into DIR"
    )


def run(args: argparse.Namespace, terminal: Terminal) -> dict[str, Any]:
    cluster = parse_cluster(args.gpus)
    return serve.run(args, terminal, config_named(args.model), cluster)


def render(document: dict[str, Any], console: Console) -> None:
    serve.render(document, console)
