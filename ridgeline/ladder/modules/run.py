"""`ridgeline.optimize`: the ladder for any nn.Module, with its outputs compared to the original's
on the inputs given. A model's name or folder goes to the ladder for models of our families instead.

    fast = ridgeline.optimize(module, x)                          # one positional input
    fast = ridgeline.optimize(model, {"input_ids": ids}, max_kl=0.01, budget_s=120)
    fast = ridgeline.optimize(module, (x, mask), skip=("compile",), for_="throughput")

The original is never changed, nor run: copies of it are.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor, nn

from ridgeline.errors import UsageError, near_matches
from ridgeline.hardware import Hardware
from ridgeline.ladder.measuring.rounds import MIN_ROUNDS
from ridgeline.ladder.modules.bench import ModuleBench
from ridgeline.ladder.modules.climb import Climber
from ridgeline.ladder.modules.forms.building import Built, Example
from ridgeline.ladder.modules.forms.copies import copied
from ridgeline.ladder.modules.forms.inputs import host_tensors, plainly
from ridgeline.ladder.modules.optimized import OptimizedModule
from ridgeline.ladder.modules.outputs import OutputBounds, difference
from ridgeline.ladder.modules.rungs import with_branches
from ridgeline.ladder.modules.settings import Settings
from ridgeline.ladder.outcome import Figures, Goal, RoofPoint, RungOutcome, Side
from ridgeline.ladder.reporting.result import Climb
from ridgeline.ladder.reporting.words import busy_words, quiet_rungs
from ridgeline.profiling.modules.devices import device_of, leaves, mapped, tensors
from ridgeline.profiling.modules.form import ModuleForm
from ridgeline.profiling.modules.gains import accuracy_area
from ridgeline.profiling.modules.result import ModuleProfile
from ridgeline.profiling.modules.run import measured, name_of, profiled
from ridgeline.profiling.modules.tracing import first_line
from ridgeline.profiling.predicting.accuracy import PredictionOutcome, remember
from ridgeline.profiling.roofline import roof_of
from ridgeline.progress import Progress
from ridgeline.quality.gate import USUAL, QualityBounds
from ridgeline.records import Record

HOST = torch.device("cpu")
RATES = ("fp32", "tf32", "bf16", "fp16")


@overload
def optimize(module: nn.Module, inputs: Any, **options: Any) -> OptimizedModule: ...


@overload
def optimize(module: str | Path, **options: Any) -> Climb: ...


def optimize(
    module: nn.Module | str | Path,
    inputs: Any = None,
    *,
    max_error: float = OutputBounds.max_error,
    max_kl: float | None = None,
    budget_s: float | None = None,
    for_: Goal = "latency",
    rounds: int = MIN_ROUNDS,
    round_s: float = Settings.round_s,
    skip: Collection[str] = (),
    hardware: Hardware | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> OptimizedModule | Climb:
    """An `OptimizedModule`; for a model's name, its `Climb`. `inputs` are one tensor, a tuple of
    positional ones, or a mapping of those with names. `max_error` bounds the relative error of any
    output, `max_kl` that of logits; `skip` names rungs to leave out. `options` are for a model's
    name: see ladder/order.py's ClimbOrder.
    """
    if isinstance(module, str | Path):
        usual = (max_error, round_s) == (OutputBounds.max_error, Settings.round_s)
        if inputs is not None or hardware is not None or skip or not usual:
            raise UsageError(
                f"{str(module)!r} is a model name; inputs, max_error, round_s, skip and hardware "
                "apply to modules only"
            )
        common = {"goal": for_, "budget_s": budget_s, "rounds": rounds}
        return _climbed_model(str(module), max_kl, {**common, **options}, progress)
    if options:
        raise UsageError(
            f"unknown option {sorted(options)[0]!r} for a module; it applies to model names only"
        )
    began = time.monotonic()
    settings = Settings(
        OutputBounds(max_error, max_kl), for_, budget_s, rounds, round_s, tuple(skip)
    )
    example = example_of(module, inputs)
    device = device_of(module, example)
    _check_placed(example, device)
    from_host = sum(tensor.nbytes for tensor in host_tensors(tuple(example), device))
    hardware = hardware or measured(device, progress, from_host=from_host > 0)
    original = Built(_copy(module), ModuleForm(), example, None)
    reference, notes = _reference(original, example, settings.bounds)
    args, keywords = plainly(tuple(example), device)
    profile, work = profiled(original.module, args, keywords, hardware, device)
    work = replace(work, host_input_bytes=from_host, is_queued=for_ == "throughput")
    if "streams" not in settings.skip:
        work = with_branches(work, module, example)
    climber = Climber(
        ModuleBench(module, original, reference, example, work, settings, began), progress
    )
    climber.notes += notes
    climber.climb()
    climber.notes += filter(None, [busy_words(climber.outcomes)])
    climb = _climb(name_of(module), climber, profile, hardware)
    remember(outcomes_to_remember(climb.rungs, hardware, climb.model))
    return OptimizedModule(climber.best, climb, profile)


def _climbed_model(
    model: str, max_kl: float | None, options: dict[str, Any], progress: Progress | None
) -> Climb:
    """Its folder holds the result. Options are the fields of a ClimbOrder."""
    # These pull the engine in: only for models.
    from ridgeline.ladder.climbing.climb import climb_model
    from ridgeline.ladder.order import ClimbOrder

    known = [each.name for each in fields(ClimbOrder)]
    for name in options:
        if name not in known:
            hint = near_matches(name, known)
            raise UsageError(f"unknown option {name!r}{hint}; options are {', '.join(known)}")
    if max_kl is not None:
        options.setdefault("bounds", QualityBounds(max_kl).filled_from(USUAL))
    options.setdefault("command", ("python", *sys.argv))
    return climb_model(ClimbOrder(model, **options), progress)


def example_of(module: object, inputs: Any) -> Example:
    if not isinstance(module, nn.Module):
        raise UsageError(
            f"expected an nn.Module or a model name, got {type(module).__name__}; only "
            "ridgeline.profile takes any callable"
        )
    if inputs is None:
        raise UsageError(
            "inputs are missing; pass a tensor, a tuple, or a mapping of keyword arguments"
        )
    if isinstance(inputs, Mapping):
        return Example((), dict(inputs))
    return Example(tuple(inputs) if isinstance(inputs, list | tuple) else (inputs,), {})


def _check_placed(example: Example, device: torch.device) -> None:
    """Inputs may lie in the host's memory: every call then brings them to the device."""
    for path, leaf in leaves(tuple(example)):
        if isinstance(leaf, Tensor) and leaf.device not in (device, HOST) and leaf.dim() > 0:
            raise UsageError(
                f"input {path} is on {leaf.device} but the module is on {device}; move one of them"
            )


def _copy(module: nn.Module) -> nn.Module:
    try:
        return copied(module)
    except (TypeError, RuntimeError) as error:
        raise UsageError(
            f"{type(module).__name__} cannot be copied ({first_line(error)}); optimize works on a "
            "copy, so the module must support copy.deepcopy"
        ) from error


def _reference(original: Built, example: Example, bounds: OutputBounds) -> tuple[Any, list[str]]:
    """What the original gives. A module that answers otherwise each time, or changes its inputs,
    cannot be compared.
    """
    before = [tensor.clone() for tensor in tensors(tuple(example))]
    first = _detached(original(*example.args, **example.keywords))
    if not _unchanged(tensors(tuple(example)), before):
        raise UsageError(
            "the module changes its inputs in place, so calls cannot be compared; wrap it so that "
            "it works on a copy"
        )
    again = difference(first, original(*example.args, **example.keywords), bounds)
    if again.problem is not None:
        hint = " call .eval() first," if original.module.training else ""
        raise UsageError(
            f"two calls with the same inputs differ ({again.problem}), so no change could be "
            f"checked;{hint} take randomness out of forward, or allow more with max_error"
        )
    if again.relative_error or again.changed_share:
        shown = max(again.relative_error, again.changed_share)
        return first, [f"the module itself differs between two calls, by {shown:.1e}"]
    return first, []


def _unchanged(given: Sequence[Tensor], kept: Sequence[Tensor]) -> bool:
    """NaN is like NaN."""
    return len(given) == len(kept) and all(
        torch.equal(now.nan_to_num(), before.nan_to_num())
        if now.is_floating_point()
        else torch.equal(now, before)
        for now, before in zip(given, kept, strict=True)
    )


def _detached(out: Any) -> Any:
    return mapped(out, lambda tensor: tensor.detach().clone())


def _climb(name: str, climber: Climber, profile: ModuleProfile, hardware: Hardware) -> Climb:
    bench, total = climber.bench, climber.total
    call_s = profile.call.median_s
    after_s = call_s if total is None else 1.0 / sorted(total.after)[len(total.after) // 2]
    before_s = call_s if total is None else 1.0 / sorted(total.before)[len(total.before) // 2]
    stamped = Record.create("optimize-module", hardware, {}, command=("python", *sys.argv))
    roof = roof_of(hardware, "fp32")
    rates = {name: hardware.ceiling(f"matrix_{name}") for name in RATES}
    return Climb(
        model=name,
        goal=bench.settings.goal,
        workload=f"{name}({shapes_in_words(bench.example)})",
        command=stamped.command,
        created=stamped.created,
        seconds=bench.spent_s,
        hardware=stamped.hardware,
        versions=stamped.versions,
        bandwidth=None if roof is None else roof.memory.value,
        bandwidth_source=None if roof is None else roof.memory.source,
        matrix_rates={name: rate.value for name, rate in rates.items() if rate is not None},
        bounds=bench.settings.bounds.to_json(),
        before=_side(ModuleForm(), before_s, bench.original, profile),
        after=_side(climber.form, after_s, climber.best, None),
        rungs=tuple(climber.outcomes),
        total=total,
        notes=(*climber.notes, *profile.notes),
        unit="calls/s",
    )


def _side(form: ModuleForm, call_s: float, built: Built, profile: ModuleProfile | None) -> Side:
    limits = () if profile is None else [row.limit_s for row in profile.rows]
    known = [limit for limit in limits if limit is not None]
    share = sum(known) / call_s if known and len(known) == len(limits) else None
    return Side(
        recipe=asdict(form),
        loop="naive",
        figures=Figures(1.0 / call_s, None, None, call_s, share, built.weight_bytes),
        roof=() if profile is None or share is None else (_roof_point(profile, share),),
    )


def _roof_point(profile: ModuleProfile, share: float) -> RoofPoint:
    bound = [row.limit_s or 0.0 for row in profile.rows if row.bound == "compute"]
    most = sum(bound) > 0.5 * sum(row.limit_s or 0.0 for row in profile.rows)
    return RoofPoint(
        "call, before",
        profile.flops / max(profile.num_bytes, 1),
        profile.flops / profile.call.median_s,
        share,
        "compute" if most else "memory",
    )


def shapes_in_words(example: Example) -> str:
    shown = [
        f"{path.split('.', 1)[-1] + '=' if path.startswith('1.') else ''}{list(leaf.shape)}"
        for path, leaf in leaves(tuple(example))
        if isinstance(leaf, Tensor)
    ]
    return ", ".join(shown[:6]) + (", …" if len(shown) > 6 else "")


def outcomes_to_remember(
    rungs: tuple[RungOutcome, ...], hardware: Hardware, model: str
) -> list[PredictionOutcome]:
    """Predictions that were measured on a quiet machine, under areas of their own: other models
    made them.
    """
    return [
        PredictionOutcome(
            accuracy_area(rung.area), rung.name, rung.predicted.speedup, rung.achieved.value,
            hardware.name, model, rung.predicted.low, rung.predicted.high,
        )
        for rung in quiet_rungs(rungs)
        if rung.predicted is not None and rung.achieved is not None
    ]  # fmt: skip
