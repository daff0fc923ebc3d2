"""`ridgeline profile --train MODEL`: one training step, divided, under the roofline, beside what
was predicted of it. profile.py has the command.
"""

from __future__ import annotations

import argparse
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ridgeline.cli.arguments.options import add_some_flags, dest_of, from_flags, given_flags
from ridgeline.cli.arguments.parser import group
from ridgeline.cli.terminal import Terminal
from ridgeline.cli.training.starting import RanksError, RankStart, start_ranks
from ridgeline.errors import UsageError
from ridgeline.formats.fields import dotted_fields, flag_of
from ridgeline.hardware import Hardware, detect, load_cached
from ridgeline.hardware.clocks import ClockSampler
from ridgeline.hardware.detection import available_memory
from ridgeline.kernels import host_library
from ridgeline.kernels.ceilings import measure
from ridgeline.models.shapes import check_one
from ridgeline.parallel.layout import Layout
from ridgeline.parallel.mesh import Mesh
from ridgeline.parallel.starting.options import StartOptions
from ridgeline.parallel.starting.order import layout_for
from ridgeline.profiling.predicting.training_next import TrainingSituation
from ridgeline.profiling.predicting.training_work import planned_step, training_work
from ridgeline.profiling.profile_page import write_page
from ridgeline.profiling.rank_profile import profile_ranks, rank_batches
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
from ridgeline.training.ranks.crew import Crew
from ridgeline.training.ranks.joining import joined_run
from ridgeline.training.starting_model import StartingModel, untokenized_source
from ridgeline.training.stepping.precision import check_precision
from ridgeline.training.stepping.step import Trainer
from ridgeline.version import __version__

FIELDS = (  # of a TrainConfig, that a single step has; a batch is profile's own flag
    "data.sequence_length", "batch.micro", "precision", "fp8_weight_gradients", "recomputation",
    "optimizer.moments", "lora.rank", "lora.targets",
)  # fmt: skip
SHARED = ("--deterministic", "--no-deterministic")  # a recipe's flag, and a run's
OF_ENGINE = ("context", "prefill", "counters")
FILES = ("trace", "html", "save")
STEPS = {"cpu": 3, "gpu": 10}


def add_training_flags(parser: argparse.ArgumentParser) -> None:
    own = group(parser, "training, with --train")
    add_some_flags(own, TrainConfig, FIELDS)
    add_some_flags(own, StartOptions, ("devices",))
    own.add_argument(
        "--layout",
        metavar="WHAT",
        help="how the step is spread over devices: shard=2,tensor=2, or a JSON file",
    )
    parser.set_defaults(resume=False, dry_run=False)  # of a run, whose ranks start as these do


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
    for name in ("layout", "devices"):
        if getattr(args, name) is not None:
            raise UsageError(f"--{name} is for training steps; add --train, or remove it")
    for name, entry in dotted_fields(TrainConfig).items():
        if name in FIELDS and getattr(args, dest_of(TrainConfig, name)) is not None:
            flag = f"--{flag_of(entry)}"
            raise UsageError(f"{flag} is for training steps; add --train, or remove it")


def ordered_step(args: argparse.Namespace, layout: Layout) -> TrainConfig:
    base = TrainConfig(model=args.model, shape=args.shape)
    config = replace(from_flags(args, TrainConfig, base), layout=layout)
    if config.lora.rank is not None and config.shape is not None:
        raise UsageError("--lora goes with a model; random weights of --shape need all of theirs")
    return config


@dataclass(frozen=True)
class PlannedProfile:
    config: TrainConfig  # nothing left open
    source: StartingModel
    situation: TrainingSituation


def planned_profile(
    args: argparse.Namespace, start: RankStart, mesh: Mesh, progress: Progress
) -> PlannedProfile:
    hardware = detect(start.device)
    config = with_auto(ordered_step(args, start.layout), hardware.device)
    check_precision(config.precision, hardware.device)
    source = untokenized_source(config, progress)
    model = source.description.config
    if args.sequence_length is None:
        length = min(config.data.sequence_length, model.max_context)
        config = replace(config, data=DataOptions(sequence_length=length))
    check_length(config, model)
    method = source.method(config, hardware.device)
    free_bytes = mesh.agreed(available_memory(hardware.device), "min")
    plan = plan_training(model, config, hardware.device, free_bytes, method)
    config = with_usual(plan.config)
    documents = [config.data.sequence_length] * config.own_sequences
    step = planned_step(model, config, hardware.device, documents, method)
    units = {f"matrix_{op.units}" for op in training_work(step) if op.units is not None}
    units |= {"matrix_fp32", "matrix_bf16", "read_bandwidth"}
    if hardware.device_type != "cpu":
        units |= {"matrix_tf32", "matrix_fp8", "eager_launch"}
    if mesh.is_first:  # the others have nothing to do meanwhile
        hardware = measure(hardware, units, progress)
    mesh.agreed(0)
    hardware = load_cached(hardware)
    situation = TrainingSituation(
        model, config, hardware.device, hardware, documents, free_bytes, method
    )
    return PlannedProfile(config, source, situation)


def run_training(args: argparse.Namespace, terminal: Terminal) -> dict[str, Any]:
    check_training(args)
    layout = None if args.layout is None else Layout.parse(args.layout)
    ordered_step(args, layout_for(layout, args.devices))  # which refuses before ranks are started
    with logs_of_ranks() as folder:
        start = start_ranks(args, from_flags(args, StartOptions), layout, folder)
    with joined_run(start.layout, start.device, start.pulse) as mesh:
        return profiled(args, start, mesh, terminal)


@contextmanager
def logs_of_ranks() -> Iterator[Path]:
    """A folder that stays where a rank has failed, and its log says more."""
    folder = Path(tempfile.mkdtemp(prefix="ridgeline-profile-"))
    try:
        yield folder
    except RanksError:
        raise
    except BaseException:
        shutil.rmtree(folder)
        raise
    shutil.rmtree(folder)


def profiled(
    args: argparse.Namespace, start: RankStart, mesh: Mesh, terminal: Terminal
) -> dict[str, Any]:
    """As one of the ranks, or as the only one."""
    with terminal.progress() as progress:
        plan = planned_profile(args, start, mesh, progress)
        hardware, config = plan.situation.hardware, plan.config
        if hardware.device_type == "cpu":
            host_library.prepare(progress)
        trainer = plan.source.trainer(config, hardware.device, None, progress, mesh)
        num_steps = args.steps or STEPS["cpu" if hardware.device_type == "cpu" else "gpu"]
        progress("profiling", 0, 1)
        with ClockSampler(hardware) as clocks:
            profile = profile_of(trainer, plan.situation, mesh, num_steps)
        progress("profiling", 1, 1)
    return written(args, plan, profile, clocks, mesh)


def profile_of(
    trainer: Trainer, situation: TrainingSituation, mesh: Mesh, num_steps: int
) -> TrainingProfile:
    config, device = situation.config, situation.device
    if mesh.layout.is_single:
        length = config.data.sequence_length
        batches = random_batches(situation.model, config.batch, length, device)
        steps = TrainingSteps(trainer, batches, device)
        return profile_training(steps, situation, num_steps=num_steps)
    crew = Crew(mesh, config)
    steps = TrainingSteps(trainer, rank_batches(crew, situation.model, config), device)
    return profile_ranks(steps, situation, crew, num_steps=num_steps)


def written(
    args: argparse.Namespace,
    plan: PlannedProfile,
    profile: TrainingProfile,
    clocks: ClockSampler,
    mesh: Mesh,
) -> dict[str, Any]:
    """The document, and what the flags want of it in files: the first rank's."""
    hardware, config = plan.situation.hardware, plan.situation.config
    notes: list[str] = []
    if not mesh.layout.is_single:
        notes.append(
            f"times are those of rank 0 of {mesh.layout.size}, what is waited for is the mean over "
            "all; speed is not predicted under a layout"
        )
    files = {name: getattr(args, name) if mesh.is_first else None for name in FILES}
    if files["trace"] is not None:
        left = save_trace([profile.document], files["trace"])
        notes += [f"{args.trace}: {left}"] if left else []
    result = training_document(described(args, config), profile, hardware, notes)
    if files["html"] is not None:
        write_page(result, files["html"])
    result |= {name: None if path is None else str(path) for name, path in files.items()}
    result["record"] = None
    if files["save"] is not None:
        record = as_training_record(result, profile, hardware, clocks)
        result["record"] = str(record.save(files["save"]))
    del result["save"]
    return result


def described(args: argparse.Namespace, config: TrainConfig) -> dict[str, Any]:
    words = [
        config.precision,
        f"{config.batch.size} sequences of {config.data.sequence_length} tokens",
        f"{config.batch.micro} in a pass",
        f"recomputation {config.recomputation}",
    ]
    if not config.layout.is_single:
        words.append(f"layout {config.layout.words()}")
    if config.lora.rank is not None:
        words.append(f"adapters of rank {config.lora.rank}")
    return {
        "model": args.model or args.shape,
        "loop": "training",
        "form": ", ".join(words),
        "precision": config.precision,
        "layout": config.layout.words(),
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
    waits = profile.communication
    for each in () if waits is None else waits["collectives"]:
        name = f"{each['kind']}_over_{each['over']}".replace("-", "_").replace(" × ", "_")
        values[f"{name}_bytes"] = Value(each["num_bytes"], "B")
        if each["exposed_s"] is not None:
            values[f"{name}_exposed"] = Value(each["exposed_s"], "s")
    name = f"profile-training-{Path(result['model']).name}-{result['precision']}"
    if waits is not None:
        name += "-" + re.sub(r"[^a-z0-9]+", "-", result["layout"])
    notes = [result["form"], *result["notes"]]
    return Record.create(name, hardware, values, notes=notes, clocks=clocks.median)
