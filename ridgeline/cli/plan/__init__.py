"""`ridgeline plan …`: what fits a cluster, how fast it would be and how sure that is, before money
is spent. One file for each purpose (`--for`), shaped like a verb's.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.console import Console

from ridgeline.cli.arguments.options import MODEL_HELP
from ridgeline.cli.arguments.parser import Parser, group
from ridgeline.cli.plan import calibrate, serve, train, validate, verify
from ridgeline.cli.terminal import Terminal
from ridgeline.errors import UsageError
from ridgeline.planning.clusters.cluster import Cluster, with_curves
from ridgeline.planning.clusters.files import load_prices, with_prices
from ridgeline.planning.clusters.parsing import EXAMPLES, gpu_named, parse_cluster

PURPOSES: dict[str, ModuleType] = {"serve": serve, "train": train}
CHECKS: dict[str, ModuleType] = {"validate": validate, "calibrate": calibrate, "verify": verify}
EXAMPLE = """\
ridgeline plan llama-3.1-405b --gpus 2048xH100 --for train --tokens 15T
ridgeline plan llama-3.1-8b --gpus 8xH200 --for train --out plans
ridgeline plan llama-3.1-70b --gpus 8xH200 --for serve --tpot-ms 40
ridgeline plan --calibrate
ridgeline plan --verify plans/plan-1.json
ridgeline plan --validate --points points"""
MAIN_FLAGS = ("--gpus", "--for", "--prices", "--out", "--validate", "--points",
              "--calibrate", "--verify", "--tokens",
              "--sequence-length", "--batch", "--workload", "--ttft-ms", "--tpot-ms",
              "--router")  # fmt: skip


def add_arguments(parser: Parser) -> None:
    shape = f"a shape's name (`llama-3.1-8b`), or {MODEL_HELP}"
    parser.add_argument("model", metavar="MODEL", nargs="?", help=shape)
    group(parser, "model").add_argument(
        "--shape", metavar="NAME", help="instead of MODEL: a shape's name"
    )
    cluster = group(parser, "cluster")
    cluster.add_argument("--gpus", metavar="CLUSTER", help=f"{EXAMPLES}")
    cluster.add_argument(
        "--prices", type=Path, metavar="FILE",
        help="prices of a GPU-hour, a TOML file of `\"H100\" = 2.4`; without it no money is shown",
    )  # fmt: skip
    plan = group(parser, "plan")
    plan.add_argument("--for", dest="purpose", choices=sorted(PURPOSES), default="train",
                      help="what the cluster is to do (default: train)")  # fmt: skip
    for module in (*PURPOSES.values(), validate):
        module.add_arguments(parser)
    own = group(parser, "checking the planner")
    own.add_argument(
        "--calibrate", action="store_true",
        help="measure a few steps on this machine (ten minutes at most), and correct later plans "
        "for such devices part by part",
    )  # fmt: skip
    own.add_argument(
        "--verify", type=Path, metavar="PLAN",
        help="run a plan-1.json on the hardware that it was made for, and show the gap by part",
    )  # fmt: skip
    own.add_argument("--steps", type=int, metavar="N", help="with --verify: steps that are timed")


def run(args: argparse.Namespace, terminal: Terminal) -> dict[str, Any]:
    checks = [name for name in CHECKS if getattr(args, name)]
    if len(checks) > 1:
        raise UsageError(f"give one of --{' and --'.join(checks)}")
    if args.points is not None and not args.validate:
        raise UsageError("--points goes with --validate; add it")
    if args.steps is not None and (args.verify is None or args.steps < 1):
        raise UsageError("--steps goes with --verify, and is at least 1")
    if args.shape is not None and args.model is not None:
        raise UsageError(f"both MODEL ({args.model}) and --shape {args.shape} are given; give one")
    args.model = args.shape if args.model is None else args.model
    if checks:
        return {"what": checks[0], **CHECKS[checks[0]].run(args, terminal)}
    if args.model is None:
        raise UsageError("plan needs a model: a shape's name such as llama-3.1-8b, or a folder")
    if args.gpus is None:
        raise UsageError(f"plan needs --gpus; give e.g. {EXAMPLES}")
    return {"what": args.purpose, **PURPOSES[args.purpose].run(args, cluster_of(args), terminal)}


def cluster_of(args: argparse.Namespace) -> Cluster:
    cluster = parse_cluster(args.gpus)
    if args.prices is not None:
        cluster = with_prices(cluster, load_prices(args.prices), gpu_named)
    return with_curves(cluster)


def render(document: dict[str, Any], console: Console) -> None:
    (CHECKS | PURPOSES)[document["what"]].render(document, console)
