"""`ridgeline bench engine MODEL --compare fp32,bf16,int8,int4-g64`: dtypes and schemes of one model
in rounds that take turns, with a record for each; one comparison for each category of prompts.
"""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console
from rich.table import Table

from ridgeline.bench.compare import (
    Compared,
    Variant,
    VariantEdit,
    compared,
    memory_share,
    variants_of,
)
from ridgeline.bench.engine import as_record
from ridgeline.cli.bench.engine import (
    BenchSubject,
    asked_workloads,
    check,
    prepared,
    record_name,
    warm_up,
)
from ridgeline.cli.terminal import Terminal
from ridgeline.engine.execution.work import matrix_dtype
from ridgeline.errors import UsageError
from ridgeline.hardware import Hardware, detect
from ridgeline.hardware.clocks import Clocks, ClockSampler
from ridgeline.hardware.units import over_words
from ridgeline.kernels.ceilings import measure
from ridgeline.progress import Progress
from ridgeline.quantization.choose import in_words
from ridgeline.recipe import usual_memory_share
from ridgeline.records import Value

ALONE = (
    "peer",
    "start",
    "scheme",
    "head",
    "speculation",
    "save_model",
)  # belong to a run of one engine


def run(args: argparse.Namespace, terminal: Terminal) -> dict[str, Any]:
    check(args)
    for name in ALONE:
        if getattr(args, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} does not go with --compare; remove one")
    edits = variants_of(args.compare, args.dtype or "auto")
    with terminal.progress() as progress:
        hardware = detect(args.device)
        subjects = all_prepared(args, edits, hardware, progress)
        engines = {name: subject.engine for name, subject in subjects.items()}
        first = next(iter(engines.values()))
        workloads = asked_workloads(args, first, hardware)
        units = {matrix_dtype(engine.model, engine.recipe) for engine in engines.values()}
        ceilings = {"read_bandwidth", *(f"matrix_{name}" for name in units)}
        hardware = measure(hardware, ceilings, progress)
        comparisons = []
        for workload in workloads:
            for engine in engines.values():
                warm_up(engine, workload, hardware, args.warm_up)
            with ClockSampler(hardware) as clocks:
                comparison = compared(engines, workload, hardware, args.rounds, progress)
            comparisons.append(document(args, subjects, comparison, hardware, clocks.median))
    return {
        "model": next(iter(subjects.values())).name,
        "device": hardware.name,
        "num_rounds": args.rounds,
        "comparisons": comparisons,
    }


def all_prepared(
    args: argparse.Namespace, edits: dict[str, VariantEdit], hardware: Hardware, progress: Progress
) -> dict[str, BenchSubject]:
    """An engine for each, as if it had been asked for alone, with a part of the memory."""
    share = args.memory_share or usual_memory_share(hardware.device_type != "cpu")
    subjects = {}
    for index, (name, edit) in enumerate(edits.items()):
        own = {**edit._asdict(), "memory_share": memory_share(share, index, len(edits))}
        made = prepared(argparse.Namespace(**vars(args) | own), hardware, progress)
        if made.engine.recipe.scheme != edit.scheme:
            known = made.engine.recipe.scheme
            raise UsageError(f"the model's recipe has scheme {known}; compare an unquantized model")
        subjects[name] = made
    return subjects


def document(
    args: argparse.Namespace,
    subjects: dict[str, BenchSubject],
    comparison: Compared,
    hardware: Hardware,
    clocks: Clocks | None,
) -> dict[str, Any]:
    subject = next(iter(subjects.values()))
    rows = [row(comparison, variant, subjects[variant.name]) for variant in comparison.variants]
    if args.save is not None:
        for entry, variant in zip(rows, comparison.variants, strict=True):
            more = {
                "best_output_tokens_per_s": Value(variant.best, "token/s"),
                f"times_{comparison.base.name}": Value(comparison.speedup(variant), "1"),
                "times_best_plain": Value(comparison.best_speedup(variant), "1"),
                "output_tokens_per_cpu_s": Value(variant.cpu_median, "token/s"),
                "times_plain_by_cpu_s": Value(comparison.cpu_speedup(variant), "1"),
            }
            name = f"{record_name(subject.name, variant.name, variant.runs[0].workload)}-compared"
            record = as_record(name, variant.runs, hardware, clocks, **more)
            entry["record"] = str(record.save(args.save))
    return {
        "workload": comparison.base.runs[0].workload,
        "base": comparison.base.name,
        "variants": rows,
    }


def row(comparison: Compared, variant: Variant, subject: BenchSubject) -> dict[str, Any]:
    recipe = subject.engine.recipe
    return {
        "name": variant.name,
        "dtype": recipe.dtype,
        "scheme": recipe.scheme,
        "head": recipe.head,
        "kv_dtype": recipe.kv.dtype,
        "speculation": recipe.speculation.method,
        "drafted_tokens": sum(run.drafted_tokens for run in variant.runs),
        "accepted_tokens": sum(run.accepted_tokens for run in variant.runs),
        "rounds": variant.rates,
        "median": variant.median,
        "best": variant.best,
        "speedup": comparison.speedup(variant),
        "best_speedup": comparison.best_speedup(variant),
        "per_cpu_s": variant.cpu_median,
        "cpu_speedup": comparison.cpu_speedup(variant),
        "share_of_limit": sorted(variant.runs, key=lambda run: run.output_tokens_per_s)[
            len(variant.runs) // 2
        ].share_of_limit,
        "plain_for_speed": in_words(subject.engine.choices, recipe.dtype),
    }


def render(result: dict[str, Any], console: Console) -> None:
    for comparison in result["comparisons"]:
        subject = f"{result['model']} on {result['device']}; workload {comparison['workload']}"
        console.print(f"{subject}, {result['num_rounds']} alternating rounds")
        render_one(comparison, console)


def render_one(result: dict[str, Any], console: Console) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("output tokens/s")
    for name in ("median", "", "best", "", "per CPU s", "", "of limit"):
        table.add_column(name, justify="right", no_wrap=True)
    for entry in result["variants"]:
        rest = f", rest {entry['dtype']}" if entry["scheme"] or entry["head"] != "plain" else ""
        share = entry["share_of_limit"]
        table.add_row(
            entry["name"] + rest,
            f"{entry['median']:.1f}",
            f"{entry['speedup']:.2f}x",
            f"{entry['best']:.1f}",
            f"{entry['best_speedup']:.2f}x",
            f"{entry['per_cpu_s']:.1f}",
            f"{entry['cpu_speedup']:.2f}x",
            "unknown" if share is None else f"{share:.0%}",
        )
    console.print(table)
    console.print(
        f"x: speedup over the fastest unquantized variant, {result['base']} by its median"
    )
    over = over_words({entry["name"]: entry["share_of_limit"] for entry in result["variants"]})
    if over is not None:
        console.print(over, markup=False, soft_wrap=True)
    for entry in result["variants"]:
        if entry["speculation"] != "none":
            accepted, drafted = entry["accepted_tokens"], entry["drafted_tokens"]
            console.print(f"{entry['name']}: {drafted} tokens drafted, {accepted} accepted")
        if entry["plain_for_speed"]:
            console.print(entry["plain_for_speed"])
        if "record" in entry:
            console.print(f"record: {entry['record']}")
