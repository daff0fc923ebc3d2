"""`ridgeline bench serve --beside-engine MODEL`: a server of our own and its bare engine, in one
run.
"""

from __future__ import annotations

import argparse
import gc
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ridgeline.bench.serve.beside import BesidePlan, ServedFigures, ServedSide, engine_rates
from ridgeline.bench.serve.endpoint import meet
from ridgeline.bench.serve.http import Endpoint
from ridgeline.bench.serve.load import LoadProcesses
from ridgeline.bench.serve.own_server import OwnServer
from ridgeline.bench.serve.placeholder import served_folder
from ridgeline.cli.arguments.options import add_flags, from_flags
from ridgeline.cli.terminal import Terminal
from ridgeline.data.workload import Workload
from ridgeline.engine import Engine
from ridgeline.engine.loading.saved import saved_recipe, tokenizer_of
from ridgeline.errors import UsageError
from ridgeline.hardware import Hardware, detect
from ridgeline.models.checkpoint import resolve_model
from ridgeline.models.shapes import describe_shape, random_model
from ridgeline.progress import Progress
from ridgeline.quantization import save_model
from ridgeline.recipe import Recipe
from ridgeline.records import Record, Value

NUM_STREAMS, NUM_PROBES = 200, 100
SHARE_AIM, PART_AIM_S = 0.93, 0.003  # of the engine's tokens/s; of a first token
# So that nobody is refused, however many streams there are.
SERVER_FLAGS = ("--max-waiting", "65536", "--max-per-key", "65536", "--max-connections", "65536")


def add_arguments(server: Any) -> None:
    server.add_argument(
        "--beside-engine", metavar="MODEL",
        help="start a server for MODEL instead of --url, and then its engine alone: how much of "
        "the engine's tokens/s reaches clients, and what the server adds to the first token",
    )  # fmt: skip
    server.add_argument(
        "--shape", metavar="NAME", help="as --beside-engine, with random weights of this shape"
    )
    server.add_argument(
        "--engine-flags", metavar="WORDS", default="",
        help="with --beside-engine: flags for both, e.g. --engine-flags='--max-batch 256'",
    )  # fmt: skip


def is_asked_for(args: argparse.Namespace) -> bool:
    return args.beside_engine is not None or args.shape is not None


def check(args: argparse.Namespace) -> None:
    if not is_asked_for(args):
        if args.engine_flags:
            raise UsageError("--engine-flags needs --beside-engine")
        if not args.url:
            raise UsageError("give --url, or --beside-engine MODEL to start a server here")
        return
    if args.beside_engine is not None and args.shape is not None:
        raise UsageError("--beside-engine and --shape both name the model; remove one")
    for name in ("url", "rate", "arrivals", "find", "plot", "ttft_ms", "tpot_ms"):
        if getattr(args, name):
            flag = name.replace("_", "-")
            raise UsageError(f"--beside-engine and --{flag} do not go together; remove one")


def run(args: argparse.Namespace, workload: Workload, terminal: Terminal) -> dict[str, Any]:
    engine_args = engine_arguments(args.engine_flags)
    hardware = detect(engine_args.device)
    num_streams = args.concurrency or NUM_STREAMS
    plan = BesidePlan(
        workload, num_streams, args.requests or num_streams, args.rounds, NUM_PROBES, args.timeout_s
    )
    with terminal.progress() as progress, model_folder(args, engine_args, hardware) as folder:
        served = measure_served(args, plan, folder, progress)
        rates = measure_engine(plan, engine_args, folder, progress)
    document = documented(args, plan, hardware, served, rates)
    if args.save is not None:
        document["record"] = str(record_of(document, hardware).save(args.save))
    return document


def engine_arguments(words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="--engine-flags", add_help=False)
    parser.add_argument("--device", default="auto")
    add_flags(parser, Recipe)
    return parser.parse_args(shlex.split(words))


@contextmanager
def model_folder(
    args: argparse.Namespace, engine_args: argparse.Namespace, hardware: Hardware
) -> Iterator[Path]:
    """Something that can be served: with weights, and a tokenizer."""
    if args.beside_engine is not None:
        with served_folder(resolve_model(args.beside_engine)) as folder:
            yield folder
        return
    with tempfile.TemporaryDirectory(prefix="ridgeline-bench-") as name:
        description = describe_shape(args.shape)
        dtype = torch.bfloat16 if hardware.device_type != "cpu" else torch.float32
        model = random_model(args.shape, dtype, hardware.device)
        save_model(model, Path(name) / "model", source=description)
        del model
        free_memory()
        with served_folder(Path(name) / "model") as folder:
            yield folder


def free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def measure_served(
    args: argparse.Namespace, plan: BesidePlan, folder: Path, progress: Progress
) -> ServedFigures:
    flags = (*SERVER_FLAGS, *shlex.split(args.engine_flags))
    tokenizer = tokenizer_of(folder)
    with OwnServer(str(folder), *flags) as server, LoadProcesses(args.processes) as load:
        met = meet(Endpoint.parse(server.url), "completions", None, tokenizer)
        figures = ServedSide(server, load, met, plan).measured(progress)
        server.stop()
    return figures


def measure_engine(
    plan: BesidePlan, engine_args: argparse.Namespace, folder: Path, progress: Progress
) -> list[float]:
    recipe = from_flags(engine_args, Recipe, saved_recipe(folder))
    engine = Engine(folder, recipe, device=engine_args.device)
    assert engine.tokenizer is not None, "it was served"
    return engine_rates(engine, plan, engine.tokenizer.vocab_size, progress)


def documented(
    args: argparse.Namespace,
    plan: BesidePlan,
    hardware: Hardware,
    served: ServedFigures,
    rates: list[float],
) -> dict[str, Any]:
    alone = sorted(rates)[len(rates) // 2]
    return {
        "beside": True,
        "model": args.beside_engine or args.shape,
        "device": hardware.name,
        "workload": plan.workload.name,
        "streams": plan.num_streams,
        "requests": plan.num_requests,
        "engine_flags": args.engine_flags,
        "served_rounds": served.rates,
        "engine_rounds": rates,
        "served_tokens_per_s": served.rate,
        "engine_tokens_per_s": alone,
        "share": served.rate / alone,
        "server_part_alone": served.alone and served.alone._asdict(),
        "server_part_beside": served.beside and served.beside._asdict(),
        "client": served.own and served.own._asdict(),
        "num_probes": [len(served.alone_s), len(served.beside_s)],
    }


def record_of(document: dict[str, Any], hardware: Hardware) -> Record:
    values = {
        "served_tokens_per_s": Value(document["served_tokens_per_s"], "token/s"),
        "engine_tokens_per_s": Value(document["engine_tokens_per_s"], "token/s"),
        "share_of_engine": Value(document["share"], "1"),
    }
    for name in ("server_part_alone", "server_part_beside"):
        for key, seconds in (document[name] or {}).items():
            values[f"{name}_{key}"] = Value(seconds, "s")
    notes = [f"{document['streams']} streams, {document['requests']} requests a round"]
    name = f"bench-serve-beside-engine-{Path(document['model']).name}-{document['workload']}"
    return Record.create(name, hardware, values, notes=notes)


def render(result: dict[str, Any], console: Console) -> None:
    console.print(
        f"{result['model']} on {result['device']}; workload {result['workload']}, "
        f"{result['streams']} streams, {result['requests']} requests a round",
        markup=False,
    )
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(justify="right")
    table.add_column()
    for label, key in (("through HTTP", "served"), ("engine alone", "engine")):
        rounds = result[f"{key}_rounds"]
        spread = f"{min(rounds):.0f} to {max(rounds):.0f}" if rounds[1:] else ""
        table.add_row(f"{label}, tokens/s", f"{result[f'{key}_tokens_per_s']:.1f}", spread)
    table.add_row("share", f"{result['share']:.1%}", f"aim {SHARE_AIM:.0%}")
    labels = {"alone": "alone", "beside": f"beside {result['streams']} streams"}
    for key, label in labels.items():
        part = result[f"server_part_{key}"]
        text = "none" if part is None else f"{1e3 * part['p50']:.2f} / {1e3 * part['p99']:.2f}"
        aim = f"p50 / p99; aim {1e3 * PART_AIM_S:.0f}"
        table.add_row(f"server's part of the first token {label}, ms", text, aim)
    console.print(table)
    if "record" in result:
        console.print(f"record: {result['record']}", markup=False)
