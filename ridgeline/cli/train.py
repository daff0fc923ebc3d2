"""`ridgeline train`: fine-tunes a model on text, or trains a shape from nothing. tables/train.py
shows it.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from ridgeline.cli.arguments.options import add_flags, add_model, from_flags, given_flags
from ridgeline.cli.arguments.parser import group
from ridgeline.cli.tables.train import render, shown_run
from ridgeline.cli.terminal import Terminal
from ridgeline.cli.training.launching import job_layout, write_job
from ridgeline.cli.training.starting import RankStart, start_ranks
from ridgeline.configs.named import is_named_run, named_run
from ridgeline.errors import INTERRUPTED_EXIT_CODE, OutputError, UsageError
from ridgeline.hardware import detect, load_cached
from ridgeline.kernels import host_library
from ridgeline.kernels.ceilings import measure
from ridgeline.parallel.layout import Layout
from ridgeline.parallel.mesh import Mesh
from ridgeline.parallel.starting.options import StartOptions
from ridgeline.profiling.predicting.training_run import ceilings_of, predict_run
from ridgeline.profiling.training_page import FILE_NAME as REPORT_NAME
from ridgeline.profiling.training_page import write_training_page
from ridgeline.progress import Progress
from ridgeline.training.config import RunLength, TrainConfig
from ridgeline.training.config_file import FILE_NAME, load_config
from ridgeline.training.merge import merge_run
from ridgeline.training.prepare import PlannedRun, plan_run, prepare_planned
from ridgeline.training.ranks.joining import joined_run
from ridgeline.training.ranks.proving import Proof, prove, prove_once
from ridgeline.training.run import OnRow, TrainLoop

EXAMPLE = """\
ridgeline train demo --data book.txt --minutes 10 --out run
ridgeline train --shape tiny --tokenizer demo --data corpus/ --steps 1000
ridgeline train configs:finetune_demo --data chats.jsonl
ridgeline train --out run --resume
ridgeline train demo --data book.txt --tokens 1000000 --dry-run
ridgeline train demo --data book.txt --minutes 10 --lora 16 --out run
ridgeline train demo --data book.txt --steps 1000 --devices 4 --restarts 3
ridgeline train --merge run --out merged"""
MAIN_FLAGS = (
    "--shape", "--tokenizer", "--device", "--data", "--sequence-length", "--out", "--resume",
    "--dry-run", "--steps", "--minutes", "--batch", "--precision", "--lr", "--lora", "--devices",
)  # fmt: skip

__all__ = ["EXAMPLE", "MAIN_FLAGS", "add_arguments", "exit_code", "render", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, or_shape=True)
    output = group(parser, "run")
    output.add_argument(
        "--out", type=Path, metavar="RUN", help="folder of the run (default: MODEL-trained)"
    )
    output.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    output.add_argument(
        "--dry-run",
        action="store_true",
        help="only show the memory that the run would take, its predicted speed and duration, and "
        "what bounds a step",
    )
    output.add_argument(
        "--merge",
        type=Path,
        metavar="RUN",
        help="train nothing: merge the adapter of this run's last checkpoint (or of the checkpoint "
        "named) into its base, and write the model to --out",
    )
    add_flags(parser, StartOptions)
    add_flags(parser, TrainConfig)
    output.add_argument(
        "--layout",
        metavar="WHAT",
        help="how the work is spread over devices: shard=2,tensor=2, or a JSON file",
    )
    output.add_argument(
        "--prove",
        action=argparse.BooleanOptionalAction,
        help="before the first step, hold a few steps of the model cut down in layers under the "
        "layout to the plain loop (default: the first time that a layout is used here)",
    )


def run(args: argparse.Namespace, terminal: Terminal) -> dict[str, Any]:
    if args.merge is not None:
        return merged(args, terminal)
    out = args.out or usual_folder(args)
    config, options = ordered_config(args, out), from_flags(args, StartOptions)
    layout = given_layout(args, config, options)
    if options.launch != "here":
        layout = job_layout(layout, options)
        return write_job(with_layout(config, layout), options, layout, out, args.device)
    start = start_ranks(args, options, layout, out)
    config = with_layout(config, start.layout)
    if args.dry_run:
        with terminal.progress() as progress:
            plan = plan_run(
                config, out, device=start.device, resume=start.resume, progress=progress
            )
            return preview(plan, progress)
    with joined_run(config.layout, start.device, start.pulse) as mesh:
        return run_on(mesh, start, args, config, out, terminal)


def given_layout(
    args: argparse.Namespace, config: TrainConfig, options: StartOptions
) -> Layout | None:
    """By the flag, or by the named run or the run that is gone on with, unless there are other
    devices now. None: it follows from --devices.
    """
    layout: Layout = config.layout
    if args.layout is not None:
        return layout
    has_others = options.devices is not None and options.devices != layout.size
    return None if layout.is_single or has_others else layout


def with_layout(config: TrainConfig, layout: Layout) -> TrainConfig:
    return config if layout == config.layout else replace(config, layout=layout)


def run_on(
    mesh: Mesh,
    start: RankStart,
    args: argparse.Namespace,
    config: TrainConfig,
    out: Path,
    terminal: Terminal,
) -> dict[str, Any]:
    """As one of the ranks, or as the only one."""
    with terminal.progress() as progress:
        plan = plan_run(
            config, out, device=start.device, resume=start.resume, progress=progress, mesh=mesh
        )
        proof = proven(args.prove, plan, mesh, progress)
        prepared = prepare_planned(plan, out, progress, mesh)
    if proof is not None and not terminal.json and mesh.is_first:
        print(in_words(proof, config), file=sys.stderr, flush=True)
    if not terminal.json and mesh.is_first:
        for note in prepared.notes:
            print(note, file=sys.stderr, flush=True)
    predicted = predicted_speed(replace(plan, ordered=prepared.config, config=prepared.config))
    speeds: list[float] = []
    try:
        with shown_run(terminal) as on_row:
            outcome = TrainLoop(prepared, out, noting(speeds, on_row), start.pulse).run()
    finally:
        if mesh.is_first:
            with suppress(OutputError):  # a full disk, which has been said
                name = config.model or config.shape or out.name
                write_training_page(out, name, predicted_tokens_per_s=predicted)
    return {
        "out": str(out),
        "checkpoint": str(outcome.checkpoint),
        "report": str(out / REPORT_NAME),
        **asdict(outcome.counters),
        "wall_s": outcome.wall_s,
        "notes": prepared.notes,
        "tokens_per_s": median(speeds) if speeds else None,
        "predicted_tokens_per_s": predicted,
        "loss": outcome.loss,
        "held_out_loss_before": outcome.held_out_before,
        "held_out_loss": outcome.held_out_after,
        "interrupted": outcome.interrupted,
        "num_saves": outcome.num_saves,
        "stall_s": outcome.stall_s,
        "stall_share": outcome.stall_share,
        "communication": outcome.communication,
        "warnings": outcome.warnings,
        "layout": config.layout.words(),
        "proof": None if proof is None else asdict(proof),
        "num_quarantined": plan.quarantine.count,
        "quarantine": plan.quarantine.summary() if plan.quarantine.count else None,
    }


def proven(wanted: bool | None, plan: PlannedRun, mesh: Mesh, progress: Progress) -> Proof | None:
    """None where nothing was proven now."""
    if mesh.layout.is_single or wanted is False:
        if wanted:
            raise UsageError("--prove proves a layout of several devices; give --layout")
        return None
    if plan.config.lora.rank is not None:  # whose gradients no proof compares
        if wanted:
            raise UsageError("--prove compares the gradients of all weights; remove it with --lora")
        return None
    if plan.device == "cpu":  # what is proven is what will run
        host_library.prepare(progress)
    progress("proving the layout", 0, 1)
    run = prove if wanted else prove_once
    return run(plan.model, plan.config, mesh)


def in_words(proof: Proof, config: TrainConfig) -> str:
    return (
        f"layout {config.layout.words()} proven against the plain loop: {proof.num_gradients} "
        f"gradients of {proof.num_layers} layers, worst difference {proof.worst:.1e} of a "
        f"gradient's norm, {proof.seconds:.1f} s"
    )


def predicted_speed(plan: PlannedRun) -> float | None:
    """Tokens/s by ceilings that are known already: a run measures none."""
    _, prediction = predict_run(plan, load_cached(detect(plan.device)))
    return None if prediction is None else prediction.tokens_per_s


def noting(speeds: list[float], on_row: OnRow) -> OnRow:
    """`on_row`, which also adds each step's tokens/s to `speeds`."""

    def note(row: dict[str, Any]) -> None:
        if "tokens_per_s" in row:
            speeds.append(row["tokens_per_s"])
        on_row(row)

    return note


def preview(plan: PlannedRun, progress: Progress) -> dict[str, Any]:
    """What the run would take, of memory and of time; nothing is started. Ceilings that are not
    known yet are measured.
    """
    hardware = detect(plan.device)
    collectives = None
    if plan.config.layout.is_single:
        hardware = measure(hardware, ceilings_of(plan), progress)
    plan, prediction = predict_run(plan, hardware)
    memory = plan.memory
    if not plan.config.layout.is_single:
        progress("collectives of a step", 0, 1)
        collectives = collectives_of(plan)
    return {
        "dry_run": True,
        "device": hardware.name,
        "config": asdict(plan.config),
        "memory": {
            "items": [item._asdict() for item in memory.items],
            "used_bytes": memory.used_bytes,
            "free_bytes": memory.free_bytes,
            "moment": memory.moment,
        },
        "layout": plan.config.layout.words(),
        "collectives": collectives,
        "prediction": None if prediction is None else prediction.to_json(),
        "quarantine": plan.quarantine.summary() if plan.quarantine.count else None,
    }


def collectives_of(plan: PlannedRun) -> list[dict[str, Any]]:
    """In a step, of the first rank; of a pipeline's first and last one it is the one that sends
    more.
    """
    from ridgeline.training.ranks.at_scale import step_at_scale  # torch's fakes take a second

    ends = {0, plan.config.layout.group(0, "pipeline")[-1]}
    steps = [step_at_scale(plan.model, plan.config, rank) for rank in sorted(ends)]
    most = max(steps, key=lambda step: sum(each.sent_bytes for each in step.collectives))
    return [asdict(each) | {"sent_bytes": each.sent_bytes} for each in most.collectives]


def merged(args: argparse.Namespace, terminal: Terminal) -> dict[str, Any]:
    if args.out is None:
        raise UsageError("--merge writes a model; give --out FOLDER")
    given = given_flags(args, TrainConfig)
    if args.model is not None or args.shape is not None or args.resume or args.dry_run or given:
        raise UsageError("--merge takes the run's own config; give --merge RUN --out FOLDER alone")
    with terminal.progress() as progress:
        result = merge_run(args.merge, args.out, device=args.device, progress=progress)
    figures = {
        name: getattr(result, name) for name in ("dtype", "effect", "difference", "rounding")
    }
    return {"out": str(result.out), "adapter": str(result.checkpoint), **figures}


def usual_folder(args: argparse.Namespace) -> Path:
    """`demo-trained`, `book-trained` for models/book, `finetune_demo-trained` for a named run."""
    name = args.model or args.shape
    if name is None:
        raise UsageError(
            "give a model, --shape for one with random weights, or --out RUN with --resume"
        )
    return Path(f"{Path(name.rpartition(':')[2]).stem}-trained")


def ordered_config(args: argparse.Namespace, out: Path) -> TrainConfig:
    """The flags over a named run, over that of the folder that is resumed, or over defaults."""
    layout = None if args.layout is None else Layout.parse(args.layout)
    base = TrainConfig()
    if args.resume and (out / FILE_NAME).is_file():
        base = without_layout(load_config(out), layout, args.devices)
    named = args.model is not None and is_named_run(args.model)
    if named:
        base = named_run(args.model)
    config = flagged_config(args, base, named)
    return config if layout is None else with_layout(config, layout)


def flagged_config(args: argparse.Namespace, base: TrainConfig, is_named: bool) -> TrainConfig:
    """A config, with what was given on the command line; `is_named`: MODEL is where it is from."""
    if any(getattr(args, name) is not None for name in ("steps", "minutes", "tokens")):
        base = replace(base, end=RunLength())
    given: dict[str, Any] = {}
    if args.model is not None and not is_named:
        given["model"] = args.model
    if args.shape is not None:
        given["shape"] = args.shape
    return from_flags(args, TrainConfig, replace(base, **given))


def without_layout(config: TrainConfig, layout: Layout | None, devices: int | None) -> TrainConfig:
    """A run that is to go on over other devices: what they take at once is chosen anew."""
    if layout in (None, config.layout) and devices in (None, config.layout.size):
        return config
    batch = replace(config.batch, micro=None)
    return replace(config, layout=Layout(), batch=batch, recomputation="auto")


def exit_code(document: dict[str, Any]) -> int:
    return INTERRUPTED_EXIT_CODE if document.get("interrupted") else 0
