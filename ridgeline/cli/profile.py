"""`ridgeline profile MODEL`: where the time of a prefill and of a decode step goes, what bounds
each of its ops, and what to change next.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console

import ridgeline
from ridgeline.cli.bench_engine import prepared
from ridgeline.cli.options import add_flags, from_flags
from ridgeline.cli.profile_table import draw
from ridgeline.cli.terminal import Terminal
from ridgeline.errors import ContextLengthError, UsageError
from ridgeline.formats.dtypes import dtype_name
from ridgeline.hardware import Hardware, detect, measure
from ridgeline.hardware.clocks import ClockSampler
from ridgeline.models.checkpoint import resolve_model
from ridgeline.models.shapes import describe_shape, random_model
from ridgeline.profiling.counters import Absent, Counted, child_command, count
from ridgeline.profiling.document import document
from ridgeline.profiling.model_profile import StepProfile, profile_decode, profile_prefill
from ridgeline.profiling.next_steps import Advice, what_next
from ridgeline.profiling.plain_stepping import NaiveSteps
from ridgeline.profiling.profile_page import write_page
from ridgeline.profiling.situation import situation_of
from ridgeline.profiling.stepping import EngineSteps, Stepping
from ridgeline.profiling.tracing import save_trace
from ridgeline.progress import Progress
from ridgeline.quantization import load_model
from ridgeline.quantization.load import choose_dtype
from ridgeline.recipe import Recipe, edited, field_table, flag, with_auto
from ridgeline.records import Record, Value

EXAMPLE = """\
ridgeline profile demo
ridgeline profile demo --loop naive --dtype fp32 --prefill 128
ridgeline profile --shape llama-3.1-8b --batch 8 --context 4096 --prefill 4x2048 --html p.html"""

OUTPUT_TOKENS = 128  # of each request, where gains are predicted end to end
CONTEXT, STEPS = 1024, {"cpu": 20, "gpu": 50}
COUNTED = "--counted-steps"  # of the child that runs under a profiler with counters
CPU_CEILINGS = {"read_bandwidth", "matrix_fp32", "matrix_bf16"}
GPU_CEILINGS = CPU_CEILINGS | {"matrix_fp8", "matrix_int8", "eager_launch"}
OF_THE_PLAIN_LOOP = ("dtype",)  # fields of a recipe that it obeys


class Prompts(NamedTuple):
    batch: int
    length: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", help="Hugging Face folder or hub name, GGUF file, or `demo`"
    )
    parser.add_argument(
        "--shape", metavar="NAME", help="a model of this shape with random weights instead"
    )
    parser.add_argument(
        "--loop",
        choices=("engine", "naive"),
        default="engine",
        help="what runs the steps: the engine, or the plain loop (default: %(default)s)",
    )
    parser.add_argument(
        "--batch", type=int, default=1, metavar="N", help="sequences that decode (default: 1)"
    )
    parser.add_argument(
        "--context",
        type=int,
        metavar="N",
        help=f"tokens that each of them has (default: {CONTEXT}, or half of the model's context)",
    )
    parser.add_argument(
        "--prefill",
        metavar="N",
        help="prompts that are computed: 2048, or 16x2048 for several (default: as --context)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help=f"decode steps that are timed (default: {STEPS['gpu']} on a GPU, {STEPS['cpu']} on a "
        "CPU)",
    )
    parser.add_argument("--device", default="auto", help="cpu, cuda or cuda:N (default: auto)")
    parser.add_argument("--save", type=Path, metavar="DIR", help="also write a record there")
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="also write Chrome's trace there, 50 MB at most"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page there")
    parser.add_argument(
        "--counters",
        action="store_true",
        help="run once more under ncu, nsys or rocprofv3, where there is one, for their counters",
    )
    parser.add_argument(COUNTED, action="store_true", help=argparse.SUPPRESS)
    parser.set_defaults(save_model=None)
    add_flags(parser, Recipe)


def run(args: argparse.Namespace, terminal: Terminal) -> dict[str, Any]:
    check(args)
    with terminal.progress() as progress:
        hardware = detect(args.device)
        ceilings = CPU_CEILINGS if hardware.device_type == "cpu" else GPU_CEILINGS
        hardware = measure(hardware, ceilings, progress)
        notes: list[str] = []
        subject = subject_of(args, hardware, progress, notes)
        hardware = measure(hardware, {f"matrix_{subject.recipe.dtype}"}, progress)
        context, prompts = sizes_of(args, subject)
        if args.counted_steps:
            return counted_steps(args, subject, context, prompts)
        with ClockSampler(hardware) as clocks:
            steps = profiled(args, subject, hardware, context, prompts, progress)
    advice = advised(args, subject, hardware, steps, prompts)
    counted = asked_counters(args, hardware, notes)
    if args.trace is not None:
        left = save_trace([each for step in steps for each in step.documents], args.trace)
        notes += [f"{args.trace}: {left}"] if left else []
    found = document(about(args, subject, prompts), steps, advice, hardware, counted, notes)
    if args.html is not None:
        write_page(found, args.html)
    found |= {"trace": text_of(args.trace), "html": text_of(args.html), "record": None}
    if args.save is not None:
        record = as_record(found, steps, hardware, clocks)
        found["record"] = str(record.save(args.save))
    return found


def render(found: dict[str, Any], console: Console) -> None:
    draw(found, console)


def check(args: argparse.Namespace) -> None:
    if (args.model is None) == (args.shape is None):
        raise UsageError("give a model, or --shape for one with random weights: one of the two")
    for name in ("batch", "context", "steps"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name} is {value}; give at least 1")
    if args.context is not None and args.context < 2:
        raise UsageError("--context is 1; a decode step follows a prompt; give at least 2")
    if args.prefill is not None:
        parse_prompts(args.prefill)
    if args.loop == "naive":
        check_plain(args)


def check_plain(args: argparse.Namespace) -> None:
    """The plain loop has a dtype; other flags would do nothing."""
    asked = from_flags(args, Recipe)
    for name in field_table():
        if name not in OF_THE_PLAIN_LOOP and value_of(asked, name) != value_of(Recipe(), name):
            raise UsageError(
                f"{flag(name)} is for the engine; the plain loop obeys "
                f"{', '.join(map(flag, OF_THE_PLAIN_LOOP))} alone; leave it out, or --loop naive"
            )


def value_of(recipe: Recipe, name: str) -> Any:
    found: Any = recipe
    for part in name.split("."):
        found = getattr(found, part)
    return found


def parse_prompts(text: str) -> Prompts:
    """`2048`, or `16x2048`."""
    found = re.fullmatch(r"(?:(\d+)x)?(\d+)", text)
    if found is None or not int(found[2]) or found[1] == "0":
        raise UsageError(f"--prefill is {text!r}; give tokens of a prompt, as 2048, or 16x2048")
    return Prompts(int(found[1] or 1), int(found[2]))


def subject_of(
    args: argparse.Namespace, hardware: Hardware, progress: Progress, notes: list[str]
) -> Stepping:
    if args.loop == "naive":
        return plain_subject(args, hardware, progress)

    def without_guesses(recipe: Recipe) -> Recipe:
        if recipe.speculation.method == "none":
            return recipe
        notes.append("steps without guessed tokens: what those cost and give hangs on the text")
        return replace(recipe, speculation=Recipe().speculation)

    return EngineSteps(prepared(args, hardware, progress, without_guesses).engine)


def plain_subject(args: argparse.Namespace, hardware: Hardware, progress: Progress) -> NaiveSteps:
    recipe = from_flags(args, Recipe)
    if args.shape is None:
        path = resolve_model(args.model, progress=progress)
        model = load_model(path, dtype=recipe.dtype, device=args.device, progress=progress)
    else:
        dtype = choose_dtype(recipe.dtype, describe_shape(args.shape).config, hardware)
        model = random_model(args.shape, dtype, hardware.device)
    dtype = model.embed.weight.dtype
    filled = with_auto(recipe, model.config, dtype, hardware.device)
    filled = edited(edited(filled, "dtype", dtype_name(dtype)), "kernels", "reference")
    return NaiveSteps(model, edited(filled, "graphs", False))


def sizes_of(args: argparse.Namespace, subject: Stepping) -> tuple[int, Prompts]:
    """As asked; left open, what fits."""
    longest = subject.recipe.limits.filled().max_context
    context = args.context or min(CONTEXT, max(2, longest // 2))
    if context > longest:
        raise ContextLengthError(
            f"--context is {context}; the model takes {longest} tokens; give at most {longest}"
        )
    if args.prefill is not None:
        return context, parse_prompts(args.prefill)
    return context, Prompts(1, min(context, longest - 2))


def profiled(
    args: argparse.Namespace,
    subject: Stepping,
    hardware: Hardware,
    context: int,
    prompts: Prompts,
    progress: Progress,
) -> list[StepProfile]:
    num_steps = args.steps or STEPS["cpu" if subject.device.type == "cpu" else "gpu"]
    progress("profiling", 0, 2)
    decode = profile_decode(
        subject, hardware, batch=args.batch, context=context, num_steps=num_steps
    )
    progress("profiling", 1, 2)
    passes = max(3, num_steps // 10)
    asked = {"batch": prompts.batch, "length": prompts.length, "num_steps": passes}
    prefill = profile_prefill(subject, hardware, **asked)
    progress("profiling", 2, 2)
    return [prefill, decode]


def advised(
    args: argparse.Namespace,
    subject: Stepping,
    hardware: Hardware,
    steps: Sequence[StepProfile],
    prompts: Prompts,
) -> list[Advice]:
    """For requests of these prompts, as many at once as decode here."""
    counts = {"prefill": args.batch / prompts.batch, "decode": float(OUTPUT_TOKENS)}
    phases = [step.phase_time(counts[step.phase]) for step in steps]
    about: dict[str, Any] = {"loop": subject.loop, "concurrency": float(args.batch)}
    return what_next(situation_of(subject, hardware, phases, **about))


def asked_counters(
    args: argparse.Namespace, hardware: Hardware, notes: list[str]
) -> Counted | None:
    if not args.counters:
        return None
    found = count(child_command(sys.argv[1:], COUNTED), hardware.device_type)
    if isinstance(found, Absent):
        notes.append(found.reason)
        return None
    return found


def counted_steps(
    args: argparse.Namespace, subject: Stepping, context: int, prompts: Prompts
) -> dict[str, Any]:
    """One step of each kind between the marks that profilers with counters go by."""
    with subject.prefilling(*prompts) as run:
        run()
        run()
        _marked(run)
    with subject.decoding(args.batch, context, 8) as step:
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


def about(args: argparse.Namespace, subject: Stepping, prompts: Prompts) -> dict[str, Any]:
    recipe = subject.recipe
    words = [recipe.dtype, recipe.scheme and f"weights in {recipe.scheme}"]
    if recipe.kv.dtype != recipe.dtype:
        words.append(f"keys and values in {recipe.kv.dtype}")
    requests = f"{args.batch} requests" if args.batch > 1 else "a request"
    return {
        "model": args.model or args.shape,
        "loop": subject.loop,
        "form": ", ".join(word for word in words if word),
        "dtype": recipe.dtype,
        "scheme": recipe.scheme,
        "kv_dtype": recipe.kv.dtype,
        "graphs": bool(recipe.graphs),
        "assumed": f"Gains are for {requests} with {prompts.length} tokens in and "
        f"{OUTPUT_TOKENS} out.",
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": ridgeline.__version__,
    }


def text_of(path: Path | None) -> str | None:
    return None if path is None else str(path)


def as_record(
    found: dict[str, Any], steps: Sequence[StepProfile], hardware: Hardware, clocks: ClockSampler
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
    form = "-".join(filter(None, (found["scheme"] or found["dtype"], found["loop"])))
    labels = [step.label for step in steps]
    name = f"profile-{Path(found['model']).name}-{form}"
    return Record.create(
        name, hardware, values, notes=[*labels, *found["notes"]], clocks=clocks.median
    )
