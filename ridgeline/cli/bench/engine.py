"""`ridgeline bench engine`: a workload through the engine, beside the limit and a peer."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ridgeline.bench.engine import EngineRun, Percentiles, as_record, check_fits, run_workload
from ridgeline.bench.peers import PEERS, PeerRun, peer_runs, transformers_peer
from ridgeline.bench.start import time_start
from ridgeline.cli.arguments.options import add_flags, add_model, add_save, add_workload, from_flags
from ridgeline.cli.arguments.parser import group
from ridgeline.cli.bench.llama_cpp import beside_llama_cpp
from ridgeline.cli.terminal import Terminal
from ridgeline.data.traces import load_workload
from ridgeline.data.workload import Workload
from ridgeline.engine import Engine, Sampling
from ridgeline.engine.execution.work import matrix_dtype
from ridgeline.engine.loading.saved import saved_recipe
from ridgeline.errors import UnsupportedError, UsageError
from ridgeline.hardware import Hardware, detect
from ridgeline.hardware.clocks import Clocks, ClockSampler
from ridgeline.hardware.units import human_bytes, is_over, over_words
from ridgeline.kernels.ceilings import measure
from ridgeline.models.checkpoint import resolve_model
from ridgeline.models.families import Description
from ridgeline.models.shapes import RandomShape, check_one, describe_shape, random_model
from ridgeline.progress import Progress
from ridgeline.quantization import save_model
from ridgeline.quantization.choose import in_words
from ridgeline.quantization.load import choose_dtype
from ridgeline.recipe import Recipe
from ridgeline.records import Value

LLAMA_CPP = "llama.cpp"
EXAMPLE = """\
ridgeline bench engine demo --workload cpu --peer transformers
ridgeline bench engine demo --compare fp32,bf16,int8 --rounds 7"""
MAIN_FLAGS = (
    "--shape", "--device", "--workload", "--requests", "--rounds", "--compare", "--peer", "--start",
    "--save", "--dtype", "--scheme", "--kv-dtype", "--speculation",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, or_shape=True)
    group(parser, "model").add_argument(
        "--save-model", type=Path, metavar="DIR", help="save the model of --shape as a checkpoint"
    )
    add_part_of_workload(add_workload(parser, meaning="throughput on a GPU, cpu on a CPU"))
    add_measuring(parser)
    add_save(parser)
    add_flags(parser, Recipe)


def add_part_of_workload(workload: argparse._ArgumentGroup) -> None:
    """Which of its requests, and when they arrive."""
    workload.add_argument("--requests", type=int, metavar="N", help="use only the first N requests")
    workload.add_argument(
        "--category",
        metavar="NAMES",
        help="use only these categories of a prompt file; --requests then counts per category",
    )
    workload.add_argument(
        "--speedup", type=float, metavar="X", help="make requests arrive X times as fast"
    )
    workload.add_argument(
        "--at-once", action="store_true", help="make all requests arrive at the start"
    )
    workload.add_argument(
        "--fitting", action="store_true", help="drop requests longer than the context"
    )


def add_measuring(parser: argparse.ArgumentParser) -> None:
    measuring = group(parser, "measuring")
    measuring.add_argument(
        "--rounds", type=int, default=1, metavar="N", help="timed rounds (default: %(default)s)"
    )
    measuring.add_argument(
        "--warm-up",
        type=int,
        metavar="N",
        help="untimed rounds before (default: 1 on a GPU, a few tokens on a CPU)",
    )
    measuring.add_argument(
        "--compare",
        metavar="NAMES",
        help="time dtypes and schemes in alternating rounds, e.g. fp32,bf16,int8; int8+head adds "
        "an int8 head, bf16+lookup adds prompt lookup; schemes use --dtype for the rest",
    )
    measuring.add_argument(
        "--peer",
        choices=PEERS,
        help="also time this library on the workload; llama.cpp on a CPU and a GGUF file, in turns "
        "with the rounds (pip install llama-cpp-python)",
    )
    measuring.add_argument(
        "--start",
        choices=("warm", "cold"),
        help="also time a new process to its first token, with warm or empty caches",
    )


@dataclass
class BenchSubject:
    """What is measured."""

    name: str
    source: Path | Description
    engine: Engine


def run(args: argparse.Namespace, terminal: Terminal) -> dict[str, Any]:
    check(args)
    with terminal.progress() as progress:
        hardware = detect(args.device)
        subject = prepared(args, hardware, progress)
        clocks = ClockSampler(hardware)
        hardware, runs, peers = measured(args, subject, hardware, clocks, progress)
    result = document(args, subject, runs, peers, hardware)
    result |= {"memory": memory_json(subject.engine), "start": None}
    if args.start is not None:
        result["start"] = timed_start(args, subject)
    return saved(args, result, runs, hardware, clocks.median)


def measured(
    args: argparse.Namespace,
    subject: BenchSubject,
    hardware: Hardware,
    clocks: ClockSampler,
    progress: Progress,
) -> tuple[Hardware, list[EngineRun], list[PeerRun]]:
    """The machine with the ceilings that are needed, the rounds, and the peer's."""
    engine = subject.engine
    if args.peer == LLAMA_CPP and hardware.device_type != "cpu":
        raise UnsupportedError("--peer llama.cpp is timed on a CPU; add --device cpu")
    workload, *others = asked_workloads(args, engine, hardware)
    if others:
        raise UsageError("several categories need --compare; give one category, or add --compare")
    units = matrix_dtype(engine.model, engine.recipe)
    hardware = measure(hardware, {"read_bandwidth", f"matrix_{units}"}, progress)
    warm_up(engine, workload, hardware, args.warm_up)
    if args.peer == LLAMA_CPP:
        with clocks:
            return hardware, *beside_llama_cpp(
                subject.engine, subject.source, workload, hardware, args.rounds, progress
            )
    with clocks:
        runs = [run_workload(engine, workload, hardware, progress) for _ in range(args.rounds)]
    if args.peer is None:
        return hardware, runs, []
    peer = transformers_peer(subject.source, engine.recipe.dtype, hardware.device)
    return hardware, runs, list(peer_runs(peer, workload, progress))


def check(args: argparse.Namespace) -> None:
    check_one(args.model, args.shape)
    if args.start is not None and args.shape is not None and args.save_model is None:
        raise UsageError("--start loads a checkpoint; with --shape, add --save-model DIR")
    if args.save_model is not None and args.shape is None:
        raise UsageError("--save-model saves the model of --shape; add --shape")
    check_part_of_workload(args)
    for name, least in (("rounds", 1), ("warm_up", 0)):
        check_least(args, name, least)


def check_part_of_workload(args: argparse.Namespace) -> None:
    if args.at_once and args.speedup is not None:
        raise UsageError("--at-once and --speedup both change the arrivals; remove one")
    for name in ("requests", "output_tokens"):
        check_least(args, name, 1)


def check_least(args: argparse.Namespace, name: str, least: int) -> None:
    value = getattr(args, name)
    if value is not None and value < least:
        raise UsageError(f"--{name.replace('_', '-')} is {value}; give at least {least}")


def prepared(
    args: argparse.Namespace,
    hardware: Hardware,
    progress: Progress,
    edit: Callable[[Recipe], Recipe] = lambda recipe: recipe,
) -> BenchSubject:
    """The engine that was asked for; `edit` has the last word on its recipe."""
    if args.shape is None:
        path = resolve_model(args.model, progress=progress)
        recipe = edit(from_flags(args, Recipe, saved_recipe(path)))
        engine = Engine(path, recipe, device=args.device, progress=progress)
        return BenchSubject(str(args.model), path, engine)
    description = describe_shape(args.shape)
    recipe = edit(from_flags(args, Recipe))
    if args.save_model is not None:
        dtype = choose_dtype(recipe.dtype, description.config, hardware)
        model = random_model(args.shape, dtype, hardware.device)
        save_model(model, args.save_model, source=description)
        del model
    engine = Engine(RandomShape(args.shape), recipe, device=hardware.device)
    if torch.device(hardware.device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(hardware.device)
    return BenchSubject(args.shape, description, engine)


def asked_workloads(args: argparse.Namespace, engine: Engine, hardware: Hardware) -> list[Workload]:
    """One that the engine's context takes, or one for each category that was named."""
    name = args.workload or ("cpu" if hardware.device_type == "cpu" else "throughput")
    whole = load_workload(name, tokenizer=engine.tokenizer, num_output_tokens=args.output_tokens)
    names = [] if args.category is None else [each.strip() for each in args.category.split(",")]
    parts = [whole.of_category(each) for each in names] or [whole]
    return [_asked_part(args, part, engine.max_context) for part in parts]


def _asked_part(args: argparse.Namespace, workload: Workload, max_context: int) -> Workload:
    if args.requests is not None:
        workload = workload.first(args.requests)
    if args.speedup is not None:
        workload = workload.sped_up(args.speedup)
    if args.at_once:
        workload = workload.at_once()
    if args.fitting:
        workload = workload.within(max_context)
    check_fits(workload, max_context)
    return workload


def warm_up(engine: Engine, workload: Workload, hardware: Hardware, rounds: int | None) -> None:
    """Kernels compile and graphs are captured when they are first needed: not in a timed round."""
    if rounds is None and hardware.device_type != "cpu":
        rounds = 1
    if rounds is None:
        ids = workload.prompt_ids(0, engine.model.config.vocab_size)
        engine.generate([ids[:16], ids[:5]], Sampling(max_tokens=3, ignore_eos=True))
    for _ in range(rounds or 0):
        run_workload(engine, workload, hardware)


def document(
    args: argparse.Namespace,
    subject: BenchSubject,
    runs: list[EngineRun],
    peers: list[PeerRun],
    hardware: Hardware,
) -> dict[str, Any]:
    best = max(runs, key=lambda run: run.output_tokens_per_s)
    median = sorted(runs, key=lambda run: run.output_tokens_per_s)[len(runs) // 2]
    engine = subject.engine
    result: dict[str, Any] = {
        "model": subject.name,
        "device": hardware.name,
        "dtype": engine.recipe.dtype,
        "kv_dtype": engine.recipe.kv.dtype,
        "scheme": engine.recipe.scheme,
        "head": engine.recipe.head,
        "plain_for_speed": in_words(engine.choices, engine.recipe.dtype),
        "num_pages": engine.scheduler.config.num_pages,
        "rounds": [run.output_tokens_per_s for run in runs],
        "best_round": best.output_tokens_per_s,
        **run_json(median),
        "peer": args.peer,
        "peers": [
            {
                **asdict(peer),
                "output_tokens_per_s": peer.output_tokens_per_s,
                "speedup": median.output_tokens_per_s / peer.output_tokens_per_s,
            }
            for peer in peers
        ],
    }
    return result


def memory_json(engine: Engine) -> dict[str, Any]:
    """The plan, and on a GPU the most that was allocated since."""
    used = None
    if engine.runner.device.type == "cuda":
        used = torch.cuda.max_memory_allocated(engine.runner.device)
    return {"planned_bytes": engine.memory_plan.used_bytes, "used_bytes": used}


def timed_start(args: argparse.Namespace, subject: BenchSubject) -> dict[str, Any]:
    """The engine that was measured goes first, and nobody else holds it: the new one needs its
    memory.
    """
    path = subject.source if isinstance(subject.source, Path) else args.save_model
    recipe = subject.engine.recipe
    del subject.engine
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    start = time_start(path, recipe, args.device, cold=args.start == "cold")
    return {"caches": args.start, **start._asdict()}


def saved(
    args: argparse.Namespace,
    result: dict[str, Any],
    runs: list[EngineRun],
    hardware: Hardware,
    clocks: Clocks | None,
) -> dict[str, Any]:
    if args.save is None:
        return result
    more = {
        f"{args.peer}_{peer['name'].replace(' ', '_')}": Value(
            peer["output_tokens_per_s"], "token/s"
        )
        for peer in result["peers"]
    }
    for peer in result["peers"]:
        for part in ("prefill", "decode"):
            rate = peer[f"{part}_tokens_per_s"]
            if rate is not None:
                more[f"{args.peer}_{part}"] = Value(rate, "token/s")
    if result["start"] is not None:
        caches = result["start"]["caches"]
        more[f"start_{caches}"] = Value(result["start"]["first_token_s"], "s")
    for name, value in result["memory"].items():
        if value is not None:
            more[f"memory_{name.removesuffix('_bytes')}"] = Value(float(value), "B")
    pages = result["kv_dtype"] if result["kv_dtype"] != result["dtype"] else None
    head = result["head"] if result["head"] != "plain" else None
    parts = (result["scheme"] or result["dtype"], head and f"head-{head}", pages and f"kv-{pages}")
    form = "-".join(filter(None, parts))
    name = record_name(result["model"], form, result["workload"])
    record = as_record(name, runs, hardware, clocks, **more)
    builds = {peer["build"] for peer in result["peers"] if peer["build"]}
    record = replace(record, notes=(*record.notes, *(f"{args.peer}: {each}" for each in builds)))
    return result | {"record": str(record.save(args.save))}


def record_name(model: str, variant: str, workload: str) -> str:
    model = Path(model).name.removesuffix(".gguf")  # a name may have dots of its own
    return f"bench-engine-{model}-{variant}-{workload}"


def run_json(run: EngineRun) -> dict[str, Any]:
    values = asdict(run)
    for name, value in values.items():
        if isinstance(value, Percentiles):
            values[name] = value._asdict()
    return values | {
        "output_tokens_per_s": run.output_tokens_per_s,
        "tokens_per_s": run.tokens_per_s,
        "share_of_limit": run.share_of_limit,
    }


def render(result: dict[str, Any], console: Console) -> None:
    head = f"head {result['head']}" if result["head"] != "plain" else None
    codes = ", ".join(filter(None, (result["scheme"], head)))
    scheme = f"{codes}, rest " if codes else ""
    subject = f"{result['model']} in {scheme}{result['dtype']}, KV in {result['kv_dtype']}"
    console.print(f"{subject}, on {result['device']}; workload {result['workload']}")
    if result["plain_for_speed"]:
        console.print(result["plain_for_speed"])
    console.print(throughput_table(result))
    over = over_words({"these steps": result["share_of_limit"]})
    if over is not None:
        console.print(over, markup=False, soft_wrap=True)
    console.print(latency_table(result))
    if result["start"] is not None:
        start = result["start"]
        seconds = f"ready {start['ready_s']:.1f} s, first token {start['first_token_s']:.1f} s"
        console.print(f"start of a new process with {start['caches']} caches: {seconds}")
    for reason in result["not_finished"][:5]:
        console.print(f"not finished: {reason}", markup=False)
    if "record" in result:
        console.print(f"record: {result['record']}")


def throughput_table(result: dict[str, Any]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(justify="right")
    table.add_column()
    share = result["share_of_limit"]
    spread = result["rounds"]
    rounds = f"{min(spread):.0f} to {max(spread):.0f} in {len(spread)} rounds"
    table.add_row(
        "output tokens/s", f"{result['output_tokens_per_s']:.1f}", rounds if spread[1:] else ""
    )
    table.add_row("all tokens/s", f"{result['tokens_per_s']:.1f}", "prompts and outputs")
    limit = "unknown" if share is None else f"{share:.1%}"
    meaning = "the fastest these steps can run here"
    table.add_row("of the limit", limit, f"not {meaning}: see below" if is_over(share) else meaning)
    table.add_row("requests", str(result["num_requests"]), sizes_text(result))
    table.add_row("steps", str(result["num_steps"]), f"{result['wall_s']:.2f} s")
    table.add_row(
        "batch", f"{result['mean_batch']:.1f}", f"mean; {result['batch_share']:.0%} of --max-batch"
    )
    pages = f"{result['mean_page_share']:.0%}"
    table.add_row("pages in use", pages, f"mean; peak {result['peak_page_share']:.0%}")
    if result["drafted_tokens"]:
        accepted = f"{result['accepted_tokens'] / result['drafted_tokens']:.0%} accepted"
        table.add_row("tokens drafted", str(result["drafted_tokens"]), accepted)
    planned, used = result["memory"].values()
    taken = f"peak {human_bytes(used)}" if used is not None else ""
    table.add_row("memory planned", human_bytes(planned), taken)
    for peer in result["peers"]:
        speedup = f"Ridgeline: {peer['speedup']:.2f}x"
        name = f"{result['peer']} {peer['name']}"
        table.add_row(name, f"{peer['output_tokens_per_s']:.1f}", speedup)
    return table


def sizes_text(result: dict[str, Any]) -> str:
    text = f"{result['num_prompt_tokens']} tokens in, {result['num_output_tokens']} out"
    if result["hit_tokens"]:
        text += f"; {result['hit_tokens']} from the prefix cache"
    if result["num_preemptions"]:
        text += f"; {result['num_preemptions']} preempted"
    return text


LATENCIES = {
    "first_token": "time to first token",
    "per_output_token": "per output token",
    "request": "whole request",
    "gap": "device idle before a step",
}


def latency_table(result: dict[str, Any]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("ms")
    for name in Percentiles._fields:
        table.add_column(name, justify="right")
    for key, label in LATENCIES.items():
        if result[key] is not None:
            table.add_row(label, *(f"{1000 * value:.2f}" for value in result[key].values()))
    return table
