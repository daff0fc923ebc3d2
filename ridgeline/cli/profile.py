"""`ridgeline profile MODEL`: where the time of a prefill and of a decode step goes, or that of a
whole workload; what bounds each of its ops, and what to change next.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ridgeline.cli.arguments.options import (
    add_flags,
    add_model,
    add_save,
    add_workload,
    flag_words,
    given_flags,
)
from ridgeline.cli.arguments.parser import group
from ridgeline.cli.bench.engine import add_part_of_workload
from ridgeline.cli.profiling.subject import CONTEXT, PromptSizes, check, sizes_of, subject_of
from ridgeline.cli.profiling.whole_run import DividedRun, check_whole_run, run_json, whole_run
from ridgeline.cli.tables.profile import draw
from ridgeline.cli.terminal import Terminal
from ridgeline.cli.training.profile import STEPS as TRAINING_STEPS
from ridgeline.cli.training.profile import add_training_flags, check_no_training, run_training
from ridgeline.engine.execution.work import matrix_dtype
from ridgeline.hardware import Hardware, detect
from ridgeline.hardware.clocks import ClockSampler
from ridgeline.kernels.ceilings import measure
from ridgeline.profiling.document import document
from ridgeline.profiling.model_profile import StepProfile, profile_decode, profile_prefill
from ridgeline.profiling.predicting.gap import gap_parts
from ridgeline.profiling.predicting.next_steps import what_next
from ridgeline.profiling.predicting.prediction import Situation
from ridgeline.profiling.predicting.situation import situation_of
from ridgeline.profiling.profile_page import write_page
from ridgeline.profiling.roofline import of_one_rank
from ridgeline.profiling.tracing.counters import Absent, Counted, count
from ridgeline.profiling.tracing.stepping import EngineSteps, ProfiledSteps
from ridgeline.profiling.tracing.tracing import save_trace
from ridgeline.progress import Progress
from ridgeline.recipe import Recipe
from ridgeline.records import Record, Value
from ridgeline.version import __version__

EXAMPLE = """\
ridgeline profile demo
ridgeline profile --shape llama-3.1-8b --batch 8 --context 4096
ridgeline profile demo --workload cpu
ridgeline profile --train --shape llama-3.2-1b --sequence-length 4096"""
MAIN_FLAGS = (
    "--shape", "--device", "--train", "--batch", "--context", "--prefill", "--workload", "--loop",
    "--dtype", "--scheme", "--kv-dtype", "--html", "--trace", "--save",
)  # fmt: skip

OUTPUT_TOKENS = 128  # of each request, where gains are predicted end to end
STEPS = {"cpu": 20, "gpu": 50}
COUNTED = "--counted-steps"  # of the child that runs under a profiler with counters
OF_THE_STEPS = ("shape", "loop", "batch", "context", "prefill", "steps", "device")  # its flags
CPU_CEILINGS = {"read_bandwidth", "matrix_fp32", "matrix_bf16"}
GPU_CEILINGS = CPU_CEILINGS | {"matrix_fp8", "matrix_int8", "eager_launch"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, or_shape=True)
    work = group(parser, "work to profile")
    work.add_argument(
        "--train", action="store_true", help="profile a training step instead of inference"
    )
    work.add_argument(
        "--batch",
        type=int,
        metavar="N",
        help="sequences in a decode step (default: 1), or in a training step (8)",
    )
    work.add_argument(
        "--context",
        type=int,
        metavar="N",
        help=f"tokens per sequence (default: {CONTEXT}, or half of the model's context)",
    )
    work.add_argument(
        "--prefill",
        metavar="N",
        help="prompt length, e.g. 2048, or 16x2048 for 16 prompts (default: as --context)",
    )
    work.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help=f"decode steps to time (default: {STEPS['gpu']} on a GPU, {STEPS['cpu']} on a CPU), "
        f"or training steps ({TRAINING_STEPS['gpu']}, {TRAINING_STEPS['cpu']})",
    )
    work.add_argument(
        "--loop",
        choices=("engine", "naive"),
        default="engine",
        help="run steps in the engine or in the plain reference loop (default: %(default)s)",
    )
    add_part_of_workload(add_workload(parser, meaning="none: steps of one size"))
    add_output(parser)
    parser.add_argument(COUNTED, action="store_true", help=argparse.SUPPRESS)
    parser.set_defaults(save_model=None)
    add_flags(parser, Recipe)
    add_training_flags(parser)


def add_output(parser: argparse.ArgumentParser) -> None:
    output = add_save(parser)
    output.add_argument("--html", type=Path, metavar="FILE", help="also write an HTML page")
    output.add_argument(
        "--trace", type=Path, metavar="FILE", help="also write a Chrome trace, 50 MB at most"
    )
    output.add_argument(
        "--counters",
        action="store_true",
        help="run again under ncu, nsys or rocprofv3, if installed, to read hardware counters",
    )


def run(args: argparse.Namespace, terminal: Terminal) -> dict[str, Any]:
    check_whole_run(args)
    if args.train:
        return run_training(args, terminal)
    check_no_training(args)
    check(args)
    with terminal.progress() as progress:
        hardware = detect(args.device)
        ceilings = CPU_CEILINGS if hardware.device_type == "cpu" else GPU_CEILINGS
        hardware = measure(hardware, ceilings, progress)
        notes: list[str] = []
        subject = subject_of(args, hardware, progress, notes)
        if subject.ranks_a_device == 1:  # or others would have some of its threads
            units = matrix_dtype(subject.model, subject.recipe)
            hardware = measure(hardware, {f"matrix_{units}"}, progress)
        if args.workload is not None:
            return of_a_run(args, subject, hardware, notes, progress)
        context, prompts = sizes_of(args, subject)
        if args.counted_steps:
            return counted_steps(args, subject, context, prompts)
        with ClockSampler(hardware) as clocks:
            steps = profiled(args, subject, hardware, context, prompts, progress)
    notes += notes_of_ranks(subject)
    part = of_one_rank(hardware, subject.ranks_a_device)
    situation = situation_here(args, subject, part, steps, prompts)
    header = described(args, subject, assumed(args, prompts))
    del subject  # a process that reads counters needs its memory
    counted = counters_of(args, hardware, header["num_ranks"], notes)
    if args.trace is not None:
        left = save_trace([each for step in steps for each in step.documents], args.trace)
        notes += [f"{args.trace}: {left}"] if left else []
    result = document(
        header, steps, what_next(situation), gap_parts(situation), part, counted, notes
    )
    return written(args, result, as_record(result, steps, hardware, clocks))


def of_a_run(
    args: argparse.Namespace,
    subject: ProfiledSteps,
    hardware: Hardware,
    notes: Sequence[str],
    progress: Progress,
) -> dict[str, Any]:
    """Of a whole workload, and of the steps that stand for its kinds."""
    assert isinstance(subject, EngineSteps), "a workload runs through the engine"
    with ClockSampler(hardware) as clocks:
        whole = whole_run(args, subject, hardware, steps_asked(args, subject), progress)
    header = described(args, subject, f"Gains are for the workload {whole.workload}.")
    part = of_one_rank(hardware, subject.ranks_a_device)
    noted = [*notes, *notes_of_ranks(subject), *whole.notes]
    gap = gap_parts(whole.situation)
    result = document(header, whole.steps, whole.advice, gap, part, None, noted)
    divided = [each for each in whole.kinds if each.typical is not None]
    for step, each in zip(result["steps"], divided, strict=True):
        step["name"] = each.kind.label
    result["run"] = run_json(whole, on_cpu=hardware.device_type == "cpu")
    return written(args, result, record_of_run(result, whole, hardware, clocks))


def written(args: argparse.Namespace, result: dict[str, Any], record: Record) -> dict[str, Any]:
    """With the files that were asked for."""
    if args.html is not None:
        write_page(result, args.html)
    result |= {"trace": text_of(args.trace), "html": text_of(args.html), "record": None}
    if args.save is not None:
        result["record"] = str(record.save(args.save))
    return result


def render(result: dict[str, Any], console: Console) -> None:
    draw(result, console)


def profiled(
    args: argparse.Namespace,
    subject: ProfiledSteps,
    hardware: Hardware,
    context: int,
    prompts: PromptSizes,
    progress: Progress,
) -> list[StepProfile]:
    num_steps = steps_asked(args, subject)
    progress("profiling", 0, 2)
    decode = profile_decode(
        subject, hardware, batch=args.batch or 1, context=context, num_steps=num_steps,
        with_trace=args.trace is not None,
    )  # fmt: skip
    progress("profiling", 1, 2)
    passes = max(3, num_steps // 10)
    prefill = profile_prefill(
        subject, hardware, batch=prompts.batch, length=prompts.length, num_steps=passes,
        with_trace=args.trace is not None,
    )  # fmt: skip
    progress("profiling", 2, 2)
    return [prefill, decode]


def steps_asked(args: argparse.Namespace, subject: ProfiledSteps) -> int:
    return args.steps or STEPS["cpu" if subject.device.type == "cpu" else "gpu"]


def situation_here(
    args: argparse.Namespace,
    subject: ProfiledSteps,
    hardware: Hardware,
    steps: Sequence[StepProfile],
    prompts: PromptSizes,
) -> Situation:
    """For requests of these prompts, as many at once as decode here."""
    batch = args.batch or 1
    counts = {"prefill": batch / prompts.batch, "decode": float(OUTPUT_TOKENS)}
    phases = [step.phase_time(counts[step.phase]) for step in steps]
    return situation_of(subject, hardware, phases, loop=subject.loop, concurrency=float(batch))


def notes_of_ranks(subject: ProfiledSteps) -> list[str]:
    """What is different on several ranks."""
    if subject.num_ranks == 1:
        return []
    lines = [
        f"times and work are those of rank 0 of {subject.num_ranks}; changes that the engine does "
        "not support on several ranks yet (quantized weights, drafts) are left out"
    ]
    if subject.ranks_a_device > 1:
        lines.append(
            f"{subject.ranks_a_device} ranks share this device: limits are those of one rank"
        )
    return lines


def counters_of(
    args: argparse.Namespace, hardware: Hardware, num_ranks: int, notes: list[str]
) -> Counted | None:
    if not args.counters:
        return None
    if num_ranks > 1:
        notes.append(
            "no counters on several ranks: profilers replay kernels, and ranks wait for each other"
        )
        return None
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    counted = count(counting_command(args), hardware.device_type)
    if isinstance(counted, Absent):
        notes.append(counted.reason)
        return None
    return counted


def counting_command(args: argparse.Namespace) -> list[str]:
    """The same steps in a process of its own, which writes no files."""
    words = [] if args.model is None else [str(args.model)]
    for name in OF_THE_STEPS:
        words += flag_words(name, getattr(args, name))
    words += given_flags(args, Recipe)
    return [sys.executable, "-P", "-m", "ridgeline", "profile", *words, COUNTED]


def counted_steps(
    args: argparse.Namespace, subject: ProfiledSteps, context: int, prompts: PromptSizes
) -> dict[str, Any]:
    """One step of each kind between the marks that profilers with counters go by."""
    with subject.prefilling(prompts.batch, prompts.length) as run:
        run()
        run()
        _marked(run)
    with subject.decoding(args.batch or 1, context, 8) as step:
        for _ in range(4):
            step()
        _marked(step)
    return {"counted": 2}


def _marked(step: Any) -> None:
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    step()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def assumed(args: argparse.Namespace, prompts: PromptSizes) -> str:
    requests = f"{args.batch} requests" if (args.batch or 1) > 1 else "a request"
    return f"Gains are for {requests} with {prompts.length} tokens in and {OUTPUT_TOKENS} out."


def described(args: argparse.Namespace, subject: ProfiledSteps, assumed: str) -> dict[str, Any]:
    recipe = subject.recipe
    words = [recipe.dtype, recipe.scheme and f"weights in {recipe.scheme}"]
    if recipe.kv.dtype != recipe.dtype:
        words.append(f"KV cache in {recipe.kv.dtype}")
    if subject.num_ranks > 1:
        words.append(f"{subject.num_ranks} ranks")
    return {
        "model": args.model or args.shape,
        "loop": subject.loop,
        "form": ", ".join(word for word in words if word),
        "dtype": recipe.dtype,
        "scheme": recipe.scheme,
        "kv_dtype": recipe.kv.dtype,
        "graphs": bool(recipe.graphs),
        "num_ranks": subject.num_ranks,
        "assumed": assumed,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": __version__,
    }


def text_of(path: Path | None) -> str | None:
    return None if path is None else str(path)


def as_record(
    result: dict[str, Any], steps: Sequence[StepProfile], hardware: Hardware, clocks: ClockSampler
) -> Record:
    values: dict[str, Value] = {}
    for step in steps:
        phase, timing = step.phase, step.timing
        source = None if step.limit is None else step.limit.ceiling.source
        values[f"{phase}_step"] = Value(
            timing.median_s,
            "s",
            timing.spread,
            timing.num_samples,
            step.share_of_limit,
            source,
        )
        for part, seconds in step.division.parts.items():
            values[f"{phase}_{part.replace(' ', '_')}"] = Value(seconds, "s")
    notes = [*(step.label for step in steps), *result["notes"]]
    name = f"profile-{form_of(result)}"
    return Record.create(name, hardware, values, notes=notes, clocks=clocks.median)


def record_of_run(
    result: dict[str, Any], whole: DividedRun, hardware: Hardware, clocks: ClockSampler
) -> Record:
    run = result["run"]
    read = hardware.ceiling("read_bandwidth") or hardware.ceiling("memory_bandwidth")
    source = None if run["share_of_limit"] is None or read is None else read.source
    values = {
        "output_tokens_per_s": Value(
            run["output_tokens_per_s"],
            "token/s",
            share_of_ceiling=run["share_of_limit"],
            ceiling_source=source,
        ),
        "wall": Value(run["wall_s"], "s"),
        "device_idle": Value(run["device_idle_s"], "s"),
        "no_requests": Value(run["no_requests_s"], "s"),
        "beside_steps": Value(run["beside_steps_s"], "s"),
    }
    for each in whole.kinds:
        kind = each.kind
        values[kind.label] = Value(
            kind.seconds,
            "s",
            num_samples=len(kind.plans),
            share_of_ceiling=None if kind.limit_s is None else kind.limit_s / kind.seconds,
            ceiling_source=source,
        )
        for name, seconds in each.parts.items():
            values[f"{kind.label}: {name}"] = Value(seconds, "s")
    name = f"profile-run-{form_of(result)}-{run['workload']}"
    return Record.create(name, hardware, values, notes=result["notes"], clocks=clocks.median)


def form_of(result: dict[str, Any]) -> str:
    """Model, dtype or scheme, loop and ranks, as a record's name has them."""
    ranks = f"tensor-{result['num_ranks']}" if result["num_ranks"] > 1 else None
    words = (result["scheme"] or result["dtype"], result["loop"], ranks)
    return "-".join(filter(None, (Path(result["model"]).name, *words)))
