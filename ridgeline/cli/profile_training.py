"""`ridgeline profile --train MODEL`: one training step, divided, under the roofline, beside what
was predicted of it. profile.py has the command.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ridgeline.cli.options import add_some_flags, dest_of, from_flags, given_flags
from ridgeline.cli.parser import group
from ridgeline.cli.terminal import Terminal
from ridgeline.errors import UsageError
from ridgeline.formats.fields import dotted_fields, flag_of
from ridgeline.hardware import Hardware, detect
from ridgeline.hardware.clocks import ClockSampler
from ridgeline.hardware.detection import available_memory
from ridgeline.kernels import host_library
from ridgeline.kernels.ceilings import measure
from ridgeline.models.shapes import check_one
from ridgeline.profiling.predicting.training_next import TrainingSituation
from ridgeline.profiling.predicting.training_work import planned_step, training_work
from ridgeline.profiling.profile_page import write_page
from ridgeline.profiling.tracing.tracing import save_trace
from ridgeline.profiling.training_profile import (
    TrainingProfile,
    TrainingSteps,
    profile_training,
    random_batches,
    training_document,
)
from ridgeline.progress import Progress
from ridgeline.recipe import Recipe
from ridgeline.records import Record, Value
from ridgeline.training.choices import with_usual
from ridgeline.training.config import DataOptions, TrainConfig, with_auto
from ridgeline.training.memory.plan import plan_training
from ridgeline.training.prepare import check_length
from ridgeline.training.starting_model import StartingModel, untokenized_source
from ridgeline.training.stepping.precision import check_precision
from ridgeline.version import __version__

FIELDS = (  # of a TrainConfig, that a single step has; a batch is profile's own flag
    "data.sequence_length", "batch.micro", "precision", "fp8_weight_gradients", "recomputation",
    "optimizer.moments", "lora.rank", "lora.targets",
)  # fmt: skip
SHARED = ("--deterministic", "--no-deterministic")  # a recipe's flag, and a run's
OF_ENGINE = ("context", "prefill", "counters")
STEPS = {"cpu": 3, "gpu": 10}


def add_training_flags(parser: argparse.ArgumentParser) -> None:
    add_some_flags(group(parser, "training, with --train"), TrainConfig, FIELDS)


def check_training(args: argparse.Namespace) -> None:
    """One line for what means nothing here."""
    check_one(args.model, args.shape)
    for name in OF_ENGINE:
        if getattr(args, name):
            raise UsageError(f"--{name} means nothing for a training step; remove it, or --train")
    if args.loop != "engine":
        raise UsageError("--loop means nothing for a training step; remove it, or --train")
    for word in given_flags(args, Recipe):
        flag = word.partition("=")[0]
        if flag not in SHARED:
            hint = "; use --precision" if flag == "--dtype" else ""
            raise UsageError(
                f"{flag} is for inference, and --train profiles a training step{hint}; remove one "
                "of the two"
            )
    for name in ("batch", "steps"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name} is {value}; give at least 1")


def check_no_training(args: argparse.Namespace) -> None:
    for name, entry in dotted_fields(TrainConfig).items():
        if name in FIELDS and getattr(args, dest_of(TrainConfig, name)) is not None:
            flag = f"--{flag_of(entry)}"
            raise UsageError(f"{flag} is for training steps; add --train, or remove it")


def ordered_step(args: argparse.Namespace) -> TrainConfig:
    config = from_flags(args, TrainConfig, TrainConfig(model=args.model, shape=args.shape))
    if config.lora.rank is not None and config.shape is not None:
        raise UsageError("--lora goes with a model; random weights of --shape need all of theirs")
    return config


@dataclass(frozen=True)
class PlannedProfile:
    config: TrainConfig  # nothing left open
    source: StartingModel
    situation: TrainingSituation


def planned_profile(args: argparse.Namespace, progress: Progress) -> PlannedProfile:
    hardware = detect(args.device)
    config = with_auto(ordered_step(args), hardware.device)
    check_precision(config.precision, hardware.device)
    source = untokenized_source(config, progress)
    model = source.description.config
    if args.sequence_length is None:
        length = min(config.data.sequence_length, model.max_context)
        config = replace(config, data=DataOptions(sequence_length=length))
    check_length(config, model)
    method, free_bytes = source.method(config, hardware.device), available_memory(hardware.device)
    plan = plan_training(model, config, hardware.device, free_bytes, method)
    config = with_usual(plan.config)
    documents = [config.data.sequence_length] * config.batch.size
    step = planned_step(model, config, hardware.device, documents, method)
    units = {f"matrix_{op.units}" for op in training_work(step) if op.units is not None}
    units |= {"matrix_fp32", "matrix_bf16", "read_bandwidth"}
    if hardware.device_type != "cpu":
        units |= {"matrix_tf32", "matrix_fp8", "eager_launch"}
    hardware = measure(hardware, units, progress)
    situation = TrainingSituation(
        model, config, hardware.device, hardware, documents, free_bytes, method
    )
    return PlannedProfile(config, source, situation)


def run_training(args: argparse.Namespace, terminal: Terminal) -> dict[str, Any]:
    check_training(args)
    with terminal.progress() as progress:
        plan = planned_profile(args, progress)
        hardware, config = plan.situation.hardware, plan.config
        if hardware.device_type == "cpu":
            host_library.prepare(progress)
        trainer = plan.source.trainer(config, hardware.device, None, progress)
        length = config.data.sequence_length
        batches = random_batches(plan.situation.model, config.batch, length, hardware.device)
        steps = TrainingSteps(trainer, batches, hardware.device)
        num_steps = args.steps or STEPS["cpu" if hardware.device_type == "cpu" else "gpu"]
        progress("profiling", 0, 1)
        with ClockSampler(hardware) as clocks:
            profile = profile_training(steps, plan.situation, num_steps=num_steps)
        progress("profiling", 1, 1)
    notes: list[str] = []
    if args.trace is not None:
        left = save_trace([profile.document], args.trace)
        notes += [f"{args.trace}: {left}"] if left else []
    result = training_document(described(args, config), profile, hardware, notes)
    if args.html is not None:
        write_page(result, args.html)
    files = {name: getattr(args, name) for name in ("trace", "html")}
    result |= {name: None if path is None else str(path) for name, path in files.items()}
    result["record"] = None
    if args.save is not None:
        record = as_training_record(result, profile, hardware, clocks)
        result["record"] = str(record.save(args.save))
    return result


def described(args: argparse.Namespace, config: TrainConfig) -> dict[str, Any]:
    words = [
        config.precision,
        f"{config.batch.size} sequences of {config.data.sequence_length} tokens",
        f"{config.batch.micro} in a pass",
        f"recomputation {config.recomputation}",
    ]
    if config.lora.rank is not None:
        words.append(f"adapters of rank {config.lora.rank}")
    return {
        "model": args.model or args.shape,
        "loop": "training",
        "form": ", ".join(words),
        "precision": config.precision,
        "assumed": "Gains are of tokens/s in steps of this size; whether the loss stays the same "
        "is not judged.",
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": __version__,
    }


def as_training_record(
    result: dict[str, Any], profile: TrainingProfile, hardware: Hardware, clocks: ClockSampler
) -> Record:
    timing = profile.timing
    source: Any = result["steps"][0]["ceiling_source"]
    values = {
        "training_step": Value(
            timing.median_s, "s", timing.spread, timing.num_samples, profile.share_of_limit, source
        )
    }
    for part, seconds in profile.division.parts.items():
        values[f"training_{part.replace('-', '_')}"] = Value(seconds, "s")
    if profile.predicted is not None:
        values["predicted_step"] = Value(profile.predicted.step_s, "s")
    name = f"profile-training-{Path(result['model']).name}-{result['precision']}"
    notes = [result["form"], *result["notes"]]
    return Record.create(name, hardware, values, notes=notes, clocks=clocks.median)
