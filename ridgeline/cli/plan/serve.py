"""`ridgeline plan MODEL --gpus 8xH200 --for serve`: the best way to serve a workload there."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from rich.console import Console
from rich.table import Table

from ridgeline.cli.arguments.options import (
    add_latency_bounds,
    add_some_flags,
    add_workload,
    from_flags,
)
from ridgeline.cli.arguments.parser import group
from ridgeline.cli.plan.train import model_of
from ridgeline.cli.terminal import Terminal
from ridgeline.data.traces import load_workload
from ridgeline.data.workload import Workload
from ridgeline.errors import UsageError
from ridgeline.hardware.units import human_bytes
from ridgeline.planning.clusters.cluster import Cluster
from ridgeline.planning.serving.answer import answer, command, write_plans, write_whole
from ridgeline.planning.serving.fleets.fleet import Policy
from ridgeline.planning.serving.fleets.served import GOOD, ServiceLevel
from ridgeline.planning.serving.search import MOST_REQUESTS, ServingAnswer, search
from ridgeline.planning.serving.variants import (
    AutoscaleWish,
    FleetVariant,
    SplitWish,
    autoscaled,
    disaggregated,
    plain,
)
from ridgeline.recipe import Recipe

RECIPE_FLAGS = (
    "scheme", "kv.dtype", "kv.page_size", "kv.prefix_cache", "limits.max_batch",
    "limits.token_budget", "limits.memory_share", "parallel.tensor",
)  # fmt: skip
MOST_SHOWN = 8  # rejections


def add_arguments(parser: argparse.ArgumentParser) -> None:
    workload = add_workload(parser, default="throughput")
    add_latency_bounds(workload, "; with --for serve")
    serving = group(parser, "serving")
    serving.add_argument(
        "--router",
        choices=get_args(Policy),
        default="prefix",
        help="how requests are spread over replicas (default: %(default)s, as the server does)",
    )
    serving.add_argument(
        "--autoscale", type=int, metavar="N",
        help="also with replicas by the load: N at least, at most what there are GPUs for",
    )  # fmt: skip
    serving.add_argument(
        "--scale-target", type=float, metavar="N",
        help="requests a replica that --autoscale keeps to (default: what costs least)",
    )  # fmt: skip
    serving.add_argument(
        "--start-s", type=float, metavar="S",
        help="seconds a replica takes to start, as `ridgeline serve` says when it is ready "
        "(default: what 8B took on the H200, and more for more weights)",
    )  # fmt: skip
    serving.add_argument(
        "--disaggregate", metavar="N",
        help="also with N replicas for prompts and the others for decoding, or `auto`",
    )  # fmt: skip
    serving.add_argument(
        "--link-gb-s", type=float, metavar="GB",
        help="what a GPU sends of keys and values with --disaggregate (default: by the cluster)",
    )  # fmt: skip
    add_some_flags(serving, Recipe, RECIPE_FLAGS)


def run(args: argparse.Namespace, cluster: Cluster, terminal: Terminal) -> dict[str, Any]:
    autoscale, split = _autoscale(args), _split(args)
    config = model_of(args.model)
    workload = load_workload(args.workload, num_output_tokens=args.output_tokens)
    workload, num_left_out = _within(workload, config.max_context)
    slo = ServiceLevel(_seconds(args.ttft_ms), _seconds(args.tpot_ms))
    base = from_flags(args, Recipe)
    with terminal.progress() as progress:
        result = search(config, cluster, workload, base, slo, args.router, progress)
        whole = workload.first(min(len(workload.requests), MOST_REQUESTS))
        fleets = _variants(result, cluster, whole, slo, args.router, (autoscale, split))
    document = answer(args.model, cluster, workload, slo, result)
    document["num_left_out"] = num_left_out
    document["fleets"] = [each.to_json() for each in fleets]
    paths = write_plans(args.out, document) if args.out is not None else []
    document["command"] = command(
        args.model, document["plans"][0], paths[0] if paths else Path("plan-1.json")
    )
    document["files"] = [str(path) for path in paths]
    if args.out is not None:
        document["files"] += write_whole(args.out, document)
    return document


def _within(workload: Workload, max_context: int) -> tuple[Workload, int]:
    """The requests that the model's context holds, and how many it does not; where it holds none
    all of them, whose planning says so.
    """
    if all(request.num_tokens > max_context for request in workload.requests):
        return workload, 0
    kept = workload.within(max_context)
    return kept, len(workload.requests) - len(kept.requests)


def _autoscale(args: argparse.Namespace) -> AutoscaleWish | None:
    if args.autoscale is not None:
        return AutoscaleWish(args.autoscale, args.scale_target, args.start_s)
    for name in ("scale_target", "start_s"):
        if getattr(args, name) is not None:
            raise UsageError(f"--{name.replace('_', '-')} goes with --autoscale; add it")
    return None


def _split(args: argparse.Namespace) -> SplitWish | None:
    text, link = args.disaggregate, args.link_gb_s
    if text is None:
        if link is not None:
            raise UsageError("--link-gb-s goes with --disaggregate; add it")
        return None
    if text != "auto" and not text.isdigit():
        raise UsageError(f"--disaggregate {text}: give a number of replicas for prompts, or auto")
    count = None if text == "auto" else int(text)
    return SplitWish(count, None if link is None else 1e9 * link)


def _variants(
    result: ServingAnswer,
    cluster: Cluster,
    workload: Workload,
    slo: ServiceLevel,
    policy: Policy,
    wishes: tuple[AutoscaleWish | None, SplitWish | None],
) -> list[FleetVariant]:
    """Of the best option that has several replicas, beside itself."""
    autoscale, split = wishes
    if autoscale is None and split is None:
        return []
    ordered = [result.best, *(point for point in result.points if point.load == 1.0)]
    option = max((point.option for point in ordered), key=lambda each: len(each.setups) > 1)
    if len(option.setups) < 2:
        raise UsageError(
            f"--autoscale and --disaggregate need several replicas, and {option.words} is one; use "
            "more GPUs, or a lower --tensor-parallel"
        )
    variants = [plain(option, workload, slo, policy)]
    if autoscale is not None:
        variants.append(autoscaled(option, workload, slo, policy, autoscale))
    if split is not None:
        variants.append(disaggregated(option, cluster.pools, workload, slo, policy, split))
    return variants


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


def render(document: Mapping[str, Any], console: Console) -> None:
    workload, best, sure = document["workload"], document["best"], document["sure"]
    console.print(f"{document['model']} on {document['cluster']}", markup=False, soft_wrap=True)
    console.print(
        f"{workload['requests']:,} requests in {workload['duration_s']:.0f} s, "
        f"{workload['mean_prompt_tokens']:.0f} tokens in and {workload['mean_output_tokens']:.0f} "
        f"out in the mean ({workload['name']})",
        markup=False,
        soft_wrap=True,
    )
    if document["num_left_out"]:
        count = document["num_left_out"]
        console.print(f"left out, longer than the model's context: {count:,} requests")
    console.print(f"\nbest: {best['option']}", markup=False, soft_wrap=True)
    console.print(
        f"each GPU: {', '.join(f'{k} {human_bytes(v)}' for k, v in _largest(best['memory']))} of "
        f"{human_bytes(best['free_bytes'])}; {best['kv_tokens']:,} tokens of KV a replica",
        markup=False,
        soft_wrap=True,
    )
    if not document["met"]:
        console.print(f"the service level is not met: {document['closest']}", soft_wrap=True)
    console.print()
    console.print(_curve_table(document))
    console.print(
        f"[dim]sure: TPOT ±{sure['tpot']:.0%}, TTFT ±{sure['ttft']:.0%}, tokens/s "
        f"±{sure['throughput']:.0%} ({sure['basis']})[/dim]",
        soft_wrap=True,
    )
    if document["frontier"]:
        console.print()
        console.print(_frontier_table(document))
    if document["fleets"]:
        console.print()
        console.print(_fleets_table(document))
    if document["why_not"]:
        console.print()
        console.print(_why_not_table(document))
    console.print(f"\nrun it: {document['command']}", markup=False, soft_wrap=True)
    if not document["files"]:
        console.print("[dim]--out DIR writes plan-1.json[/dim]")


def _largest(memory: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(memory.items(), key=lambda item: -item[1])[:3]


def _table(title: str, names: tuple[str, ...]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column(title)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _curve_table(document: Mapping[str, Any]) -> Table:
    """The best option under each load that was tried."""
    money = "price_per_million_tokens" in document["best"]
    names = ("requests/s", "TTFT p50", "p99", "TPOT p50", "p99", "tokens/s", "good")
    table = _table("load", names + (("price/M",) if money else ()))
    for point in sorted(document["curves"], key=lambda point: point["load"]):
        if point["option"] != document["best"]["option"]:
            continue
        good = "" if point["goodput"] is None else f"{point['goodput']:.0%}"
        cells = [
            f"{point['load']:g}x",
            f"{point['requests_per_s']:.2f}",
            f"{1e3 * point['ttft']['p50']:.0f} ms",
            f"{1e3 * point['ttft']['p99']:.0f} ms",
            f"{1e3 * point['tpot']['p50']:.1f} ms",
            f"{1e3 * point['tpot']['p99']:.1f} ms",
            f"{point['output_tokens_per_s']:,.0f}",
            good,
        ]
        table.add_row(*cells, *([f"{point['price_per_million_tokens']:.2f}"] if money else []))
    return table


def _frontier_table(document: Mapping[str, Any]) -> Table:
    names = ("load", "tokens/s/GPU", "tokens/s/user")
    table = _table(f"frontier, where {GOOD:.0%} are good", names)
    for point in document["frontier"]:
        table.add_row(
            point["option"],
            f"{point['load']:g}x",
            f"{point['tokens_per_s_per_gpu']:,.0f}",
            f"{point['tokens_per_s_per_user']:,.0f}",
        )
    return table


def _fleets_table(document: Mapping[str, Any]) -> Table:
    names = ("TTFT p50", "p99", "TPOT p50", "p99", "good", "GPU-hours")
    table = _table("fleets, at the workload's own load", names)
    for fleet in document["fleets"]:
        table.add_row(
            f"{fleet['kind']}: {fleet['words']}",
            f"{1e3 * fleet['ttft']['p50']:.0f} ms",
            f"{1e3 * fleet['ttft']['p99']:.0f} ms",
            f"{1e3 * fleet['tpot']['p50']:.1f} ms",
            f"{1e3 * fleet['tpot']['p99']:.1f} ms",
            "" if fleet["goodput"] is None else f"{fleet['goodput']:.0%}",
            f"{fleet['gpu_hours']:.3g}",
        )
    return table


def _why_not_table(document: Mapping[str, Any]) -> Table:
    table = _table(f"why not ({len(document['why_not'])} more)", ())
    table.add_column("because")
    for rejection in document["why_not"][:MOST_SHOWN]:
        remedy = f"; {rejection['remedy']}" if rejection["remedy"] else ""
        table.add_row(rejection["option"], rejection["constraint"] + remedy)
    return table
