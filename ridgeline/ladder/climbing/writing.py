"""What a climb leaves in its folder: climb.json, records, what `--check` measures again, and the
report; and the predictions that later ones learn from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ridgeline.hardware import Hardware
from ridgeline.ladder.climbing.kept_level import KeptLevel
from ridgeline.ladder.climbing.last_comparison import LastComparison
from ridgeline.ladder.climbing.remaining import remaining
from ridgeline.ladder.measuring.control import Control
from ridgeline.ladder.measuring.part import WorkloadPart
from ridgeline.ladder.measuring.rounds import MIN_ROUNDS
from ridgeline.ladder.measuring.time_ledger import TimeLedger
from ridgeline.ladder.order import ClimbJob
from ridgeline.ladder.outcome import Quality, RungOutcome, Side, Speedup
from ridgeline.ladder.processes.bench_processes import Processes
from ridgeline.ladder.reporting.card import write_card
from ridgeline.ladder.reporting.folder import (
    CARD,
    CHECK,
    RECORDS,
    REPORT,
    Folder,
    recipe_flags,
    saved_recipe,
)
from ridgeline.ladder.reporting.records import climb_records
from ridgeline.ladder.reporting.report import write_report
from ridgeline.ladder.reporting.result import Climb
from ridgeline.ladder.reporting.saved import FILE_NAME as CLIMB
from ridgeline.ladder.reporting.words import quiet_rungs
from ridgeline.ladder.searching.budget import Budget
from ridgeline.ladder.searching.progress import ClimbProgress
from ridgeline.ladder.state import ClimbState, ClimbSubject
from ridgeline.profiling import roof_of
from ridgeline.profiling.predicting.accuracy import PredictionOutcome
from ridgeline.recipe import Recipe
from ridgeline.records import versions_of


def climb_of(
    job: ClimbJob,
    progress: ClimbProgress,
    saved: ClimbState,
    last: LastComparison,
    ladder: Sequence[RungOutcome],
    ledger: TimeLedger,
    budget: Budget,
    folder: Folder,
) -> Climb:
    order, hardware = job.order, job.hardware
    observed = last.after_observation or progress.observation
    roof = roof_of(hardware, observed.filled.dtype)
    bounds = asdict(order.bounds) if order.quality else {}
    notes = [*progress.notes, *last.words]
    if not order.quality:
        notes.append("quality was not measured (--quality off)")
    if progress.best == progress.start and not any(o.status == "kept" for o in progress.outcomes):
        notes.append("nothing was faster than the engine's defaults: it runs with those")
    before = last.before or progress.start_observation.figures
    after = last.after or progress.observation.figures
    assert before is not None, "rounds were run"
    assert after is not None, "rounds were run"
    config = job.subject.config
    left = remaining(job.facts, observed, saved.loop, progress.outcomes)
    return Climb(
        model=job.subject.name,
        goal=order.goal,
        workload=job.workload.name,
        command=order.command,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=budget.used_s,
        hardware=hardware.summary(),
        versions=versions_of(hardware),
        bandwidth=None if roof is None else roof.memory.value,
        bandwidth_source=None if roof is None else roof.memory.source,
        matrix_rates=matrix_rates(hardware),
        bounds=bounds,
        before=Side(
            recipe=asdict(saved_recipe(progress.start_observation.filled, in_checkpoint=False)),
            loop=progress.start.loop,
            figures=before,
            curve=last.before_curve,
            roof=progress.start_observation.roof(config, hardware, "before"),
            memory=progress.start_observation.memory,
        ),
        after=Side(
            recipe=asdict(saved.recipe),
            loop=saved.loop,
            figures=after,
            curve=last.after_curve,
            roof=observed.roof(config, hardware, "after"),
            memory=observed.memory,
        ),
        rungs=tuple(progress.outcomes),
        ladder=tuple(ladder),
        time_ledger=ledger.seconds,
        gap=left.gap,
        next_steps=left.next_steps,
        first_answer_s=progress.first_answer_s,
        total=last.total,
        is_by_model=last.is_by_model,
        notes=tuple(notes),
        serve_command=serve_command(job.subject, saved.recipe, folder.path),
    )


def matrix_rates(hardware: Hardware) -> dict[str, float]:
    result = {}
    for dtype in ("fp32", "tf32", "bf16", "fp16", "fp8", "int8"):
        ceiling = hardware.ceiling(f"matrix_{dtype}")
        if ceiling is not None:
            result[dtype] = ceiling.value
    return result


def serve_command(subject: ClimbSubject, recipe: Recipe, folder: Path) -> tuple[str, ...]:
    if subject.shape is not None:
        flags = recipe_flags(recipe)
        return ("ridgeline", "bench", "engine", "--shape", subject.shape, *flags)
    return ("ridgeline", "serve", str(folder))


def write_folder(
    job: ClimbJob,
    climb: Climb,
    folder: Folder,
    bench: Processes,
    saved: ClimbState,
    last: LastComparison,
) -> None:
    folder.write_json(CLIMB, climb.to_json())
    records = climb_records(climb, job.hardware, bench.clocks)
    folder.write_json(RECORDS, {"records": [record.to_json() for record in records]})
    level = kept_level(job, climb)
    if level is not None or (last.total is not None and last.part is not None):
        check = check_document(job, climb, saved, last.total, last.part, level)
        folder.write_json(CHECK, check)
    write_report(climb, folder.path / REPORT)
    write_card(climb, folder.path / CARD)


def check_document(
    job: ClimbJob,
    climb: Climb,
    saved: ClimbState,
    total: Speedup | None,
    part: WorkloadPart | None,
    level: KeptLevel | None,
) -> Mapping[str, Any]:
    """What `--check` measures again: rounds, where there were some, and the rate that is held."""
    subject = job.subject
    quality = last_quality(climb)
    return {
        "model": None if subject.path is None else str(subject.path),
        "shape": subject.shape,
        "device": subject.device,
        "device_name": job.hardware.name,
        "goal": job.order.goal,
        "loop": saved.loop,
        "workload": asdict(job.workload),
        "part": None if total is None or part is None else part.to_json(),
        "rates": [] if total is None or part is None else list(total.after),
        "control": control_rates(subject.device, MIN_ROUNDS if total is None else len(total.after)),
        "level": None if level is None else level.to_json(),
        "bounds": asdict(job.order.bounds) if job.order.quality else {},
        "measured": job.measured.to_json(),
        "quality": None if quality is None else asdict(quality),
        "created": climb.created,
    }


def kept_level(job: ClimbJob, climb: Climb) -> KeptLevel | None:
    """The rate that the recipe holds, where a latency bound was given and one was proved."""
    levels = climb.levels
    chosen = None if levels is None else levels.of(levels.chosen)
    if levels is None or chosen is None or chosen.proof is None or not levels.is_proved(chosen):
        return None
    proof = chosen.proof
    return KeptLevel(levels.bound, levels.target, proof.rate, proof.seconds, job.trace)


def control_rates(device: str, count: int) -> list[float]:
    """Of a computation that has nothing to do with the recipe: how fast the machine itself is."""
    control = Control(device)
    control.time(count)
    return control.rates


def last_quality(climb: Climb) -> Quality | None:
    """Of what was kept: the last one that was measured holds all before it."""
    kept = [rung.quality for rung in climb.rungs if rung.status == "kept"]
    return next((quality for quality in reversed(kept) if quality is not None), None)


def outcomes_to_remember(
    rungs: Sequence[RungOutcome], job: ClimbJob
) -> Sequence[PredictionOutcome]:
    """What was predicted, beside what came of it on a quiet machine: what noise made of it is no
    error of the prediction.
    """
    device, model = job.hardware.name, job.subject.name
    return [
        PredictionOutcome(
            area=rung.area,
            rung=rung.name,
            predicted=rung.predicted.speedup,
            achieved=rung.achieved.value,
            device=device,
            model=model,
            low=rung.predicted.low,
            high=rung.predicted.high,
        )
        for rung in quiet_rungs(rungs)
        if rung.predicted is not None and rung.achieved is not None
    ]
