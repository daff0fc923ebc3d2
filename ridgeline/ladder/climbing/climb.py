"""`optimize` for models of our families: from the naive fp32 loop up the ladder, on the user's
workload, keeping what is faster beyond noise and inside the quality bound; then the folder with
checkpoint, recipe, records and report.

    climb = climb_model(Order("demo", out=Path("out"), budget_s=240.0))
    climb.total.value, climb.serve_command
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ridgeline.bench.engine import check_fits
from ridgeline.bench.serve.bound import LatencyBound
from ridgeline.data.traces import load_workload
from ridgeline.data.workload import MIXES, Workload
from ridgeline.engine.loading.draft_loading import check_words, find_draft
from ridgeline.engine.loading.loading import tokenizer_of
from ridgeline.errors import UsageError
from ridgeline.hardware import Hardware, detect, measure
from ridgeline.ladder.climbing.bench_processes import (
    CURVE_S,
    ROUND_S,
    Processes,
    common_prefix_share,
)
from ridgeline.ladder.climbing.budget import Budget
from ridgeline.ladder.climbing.finished import Finished
from ridgeline.ladder.climbing.search import ClimbFacts, ClimbProgress, ClimbSearch, Options
from ridgeline.ladder.measuring.judging import Measured
from ridgeline.ladder.measuring.pace import check_arrivals, opening
from ridgeline.ladder.measuring.process import WorkerError
from ridgeline.ladder.measuring.rounds import MIN_ROUNDS
from ridgeline.ladder.measuring.seen import Observation
from ridgeline.ladder.outcome import CurvePoint, Figures, Goal, Quality, RungOutcome, Side, Speedup
from ridgeline.ladder.reporting.folder import (
    CHECK,
    RECORDS,
    REPORT,
    Folder,
    recipe_flags,
    saved_recipe,
)
from ridgeline.ladder.reporting.records import climb_records
from ridgeline.ladder.reporting.report import write_report
from ridgeline.ladder.reporting.saved import FILE_NAME as CLIMB
from ridgeline.ladder.result import Climb
from ridgeline.ladder.state import ClimbState, ClimbSubject, setting
from ridgeline.models.checkpoint import open_checkpoint, resolve_model
from ridgeline.models.families import describe
from ridgeline.models.shapes import check_one, describe_shape
from ridgeline.profiling import roof_of
from ridgeline.profiling.predicting.accuracy import PredictionOutcome, remember
from ridgeline.progress import Progress
from ridgeline.quality.gate import USUAL, QualityBounds
from ridgeline.quantization.files.read import is_quantized
from ridgeline.recipe import Recipe, Speculation
from ridgeline.records import versions_of

CEILINGS = ("read_bandwidth", "matrix_fp32", "matrix_bf16")
GPU_CEILINGS = ("matrix_tf32", "matrix_fp8", "eager_launch", "graph_step")
USUAL_WORKLOADS = {
    ("latency", True): "batch-1",
    ("latency", False): "batch-1",
    ("throughput", True): "cpu",
    ("throughput", False): "throughput",
}  # by goal, and whether the device is a CPU
LONGEST_ROUND_S = 7.0  # of the last comparison
LAST_LOOKS_S = 2 * CURVE_S + 20.0  # curves, and loading both sides
CPU_WINDOW, CPU_WINDOWS = 256, 8  # tokens that quality is measured on there: seconds, not minutes


@dataclass(frozen=True)
class ClimbOrder:
    """What is asked for."""

    model: str | None
    shape: str | None = None  # random weights of this shape instead
    out: Path = Path("optimized")
    goal: Goal = "latency"
    workload: str | None = None  # a mix or a file; None: usual for goal and device
    output_tokens: int = 256  # made for each prompt of a file of prompts
    bounds: QualityBounds = USUAL
    latency: LatencyBound = field(
        default_factory=LatencyBound
    )  # of requests at the trace's own times
    quality: bool = True
    measured: Measured | None = None  # None: as is usual for the device
    budget_s: float | None = None
    resume: bool = False
    device: str = "auto"
    rounds: int = MIN_ROUNDS
    draft_model: str | None = None  # that may guess tokens ahead
    command: tuple[str, ...] = field(default_factory=lambda: ("ridgeline", *sys.argv[1:]))

    def __post_init__(self) -> None:
        check_one(self.model, self.shape)
        if self.output_tokens < 1:
            raise UsageError(f"--output-tokens is {self.output_tokens}; give at least 1")
        if self.shape is not None and self.quality:
            raise UsageError("random weights have no answers to compare; add --quality off")


@dataclass(frozen=True)
class ClimbJob:
    """An order, made out: what is run, on what, where."""

    order: ClimbOrder
    subject: ClimbSubject
    workload: Workload  # all at once
    trace: Workload  # with its arrival times, as much as is replayed
    hardware: Hardware
    facts: ClimbFacts
    measured: Measured


def prepared(order: ClimbOrder, progress: Progress | None = None) -> ClimbJob:
    """What can be wrong is said before anything is measured."""
    hardware = detect(order.device)
    subject, quantized = subject_of(order, hardware, progress)
    whole, has_text = workload_of(order, subject)
    check_arrivals(whole, order.latency)
    draft = draft_of(order, subject, progress)
    workload, trace = whole.at_once(), opening(whole)
    check_fits(workload, subject.config.max_context)
    measured = order.measured or usual_measured(subject.device)
    on_cpu = subject.device == "cpu"
    wanted = {*CEILINGS, *(() if on_cpu else GPU_CEILINGS)}
    hardware = measure(hardware, wanted, progress)
    more = {"goal": order.goal, "quality": order.quality, "measured": measured.to_json()}
    more |= {"bounds": asdict(order.bounds)}
    if order.latency:
        more |= {"latency": asdict(order.latency), "trace": asdict(trace)}
    facts = ClimbFacts(
        subject.config,
        hardware,
        order.goal,
        setting(subject, workload, hardware, more),
        concurrency=1 if order.goal == "latency" else len(workload.requests),
        prefix_share=common_prefix_share(workload, subject.config.vocab_size),
        longest_prompt=max(request.num_prompt_tokens for request in workload.requests),
        has_text=has_text,
        has_random_weights=subject.has_random_weights,
        is_quantized=quantized,
        draft_model=draft,
        bounds=order.bounds,
        latency=order.latency,
    )
    return ClimbJob(order, subject, workload, trace, hardware, facts, measured)


def subject_of(
    order: ClimbOrder, hardware: Hardware, progress: Progress | None
) -> tuple[ClimbSubject, bool]:
    if order.shape is not None:
        config = describe_shape(order.shape).config
        return ClimbSubject(order.shape, None, order.shape, config, hardware.device), False
    assert order.model is not None, "an order has a model or a shape"
    path = resolve_model(order.model, progress=progress).resolve()
    checkpoint = open_checkpoint(path)
    config = describe(checkpoint).config
    quantized = is_quantized(checkpoint) and checkpoint.format != "gguf"
    return ClimbSubject(order.model, path, None, config, hardware.device), quantized


def draft_of(order: ClimbOrder, subject: ClimbSubject, progress: Progress | None) -> str | None:
    """Where the draft model lies; one that cannot serve is refused before anything is measured."""
    if order.draft_model is None:
        return None
    path = resolve_model(order.draft_model, progress=progress).resolve()
    recipe = Recipe(speculation=Speculation("draft", draft_model=str(path)))
    draft = find_draft(recipe, subject.config, progress)
    check_words(draft, None if subject.path is None else tokenizer_of(subject.path))
    return str(path)


def workload_of(order: ClimbOrder, subject: ClimbSubject) -> tuple[Workload, bool]:
    """And whether its prompts are text."""
    name = order.workload or USUAL_WORKLOADS[order.goal, subject.device == "cpu"]
    tokenizer = None if subject.path is None else tokenizer_of(subject.path)
    about = {"tokenizer": tokenizer, "num_output_tokens": order.output_tokens}
    workload = load_workload(name, **about)  # type: ignore[arg-type]
    has_text = name not in MIXES and workload.requests[0].prompt is not None
    return workload, has_text


def usual_measured(device: str) -> Measured:
    return Measured(window=CPU_WINDOW, num_windows=CPU_WINDOWS) if device == "cpu" else Measured()


def climb_model(order: ClimbOrder, progress: Progress | None = None) -> Climb:
    folder = Folder(order.out)
    folder.prepare(order.resume)
    budget = Budget(order.budget_s)
    job = prepared(order, progress)
    about = (job.subject, job.workload, order.goal, job.hardware, folder.work)
    more: dict[str, Any] = {"measured": job.measured, "bounds": order.bounds}
    if order.latency:
        more |= {"latency": order.latency, "trace": job.trace}
    with Processes(*about, **more) as bench:
        search = ClimbSearch(
            job.facts,
            bench,
            budget,
            Options(order.rounds, order.quality),
            Finished(folder.work / "finished.json"),
            progress,
        )
        found = search.run()
        return finish(job, found, bench, folder, budget, progress)


def finish(
    job: ClimbJob,
    found: ClimbProgress,
    bench: Processes,
    folder: Folder,
    budget: Budget,
    progress: Progress | None,
) -> Climb:
    """The folder, and the last measurements, of the very files that lie there."""
    saved = place(job, found, bench, folder)
    last = Last()
    try:
        if not found.is_stopped:
            if progress is not None:
                progress("before and after, in turns", 0, 1)
            bench.round_s = last_round_s(budget)
            last = measure_last(found, saved, bench)
    except KeyboardInterrupt:
        found.is_stopped = True
        found.notes.append("stopped by Ctrl-C before the last comparison")
    except WorkerError as error:
        found.notes.append(f"the last comparison failed: {error}")
    climb = climb_of(job, found, saved, last, budget, folder)
    write(job, climb, folder, bench, saved, last)
    remember(outcomes_to_remember(found.measured, job))
    return climb


@dataclass(frozen=True)
class Last:
    """What was measured at the end."""

    total: Speedup | None = None
    before: Figures | None = None
    after: Figures | None = None
    after_seen: Observation | None = None
    before_curve: tuple[Any, ...] = ()
    after_curve: tuple[Any, ...] = ()
    words: tuple[str, ...] = ()


def place(job: ClimbJob, found: ClimbProgress, bench: Processes, folder: Folder) -> ClimbState:
    """The checkpoint and the recipe into the folder; the state that they are."""
    best, path = found.best, job.subject.path
    if path is None:
        folder.write_json("checkpoint.json", {"shape": job.subject.shape})
        recipe = saved_recipe(found.seen.filled, in_checkpoint=False)
        recipe.save(folder.path)
        return ClimbState(recipe, best.loop)
    in_checkpoint = best.folder is not None
    if best.folder is not None:
        folder.take(Path(best.folder), move=False)
    elif best.recipe.scheme is not None and not found.is_stopped:
        written = folder.work / "checkpoint"
        shutil.rmtree(written, ignore_errors=True)
        bench.write_codes(best, written, found.seen.plain_shapes)
        folder.take(written, move=True)
        in_checkpoint = True
    else:  # a climb that was stopped leaves the scheme in the recipe: it is applied when loaded
        folder.link(path)
    recipe = saved_recipe(found.seen.filled, in_checkpoint)
    recipe.save(folder.path)
    return ClimbState(recipe, best.loop, str(folder.path.resolve()))


def last_round_s(budget: Budget) -> float:
    """Rounds of the last comparison are as long as the budget lets them be: the nearer to the whole
    workload, the more its figures say.
    """
    rounds = 2 * (MIN_ROUNDS + 1)  # both sides; the first shows how long they are
    return min(LONGEST_ROUND_S, max(ROUND_S, (budget.rest_s - LAST_LOOKS_S) / rounds))


def measure_last(found: ClimbProgress, saved: ClimbState, bench: Processes) -> Last:
    """Before and after in the same rounds. The plain loop runs from the original."""
    if saved.loop == "naive":
        return Last(before=found.start_seen.figures, after=found.seen.figures)
    bench.let_go()
    total = bench.compare(found.start, saved, lambda speedup: len(speedup.before) >= MIN_ROUNDS)
    before, after = bench.figures(found.start), bench.figures(saved)
    said = []
    for state, name in ((found.start, "before"), (saved, "after")):
        words = bench.part_words(state)
        if words is not None:
            said.append(f"rounds of {name} ran {words}")
    after_seen = bench.look(saved)
    curves: list[tuple[CurvePoint, ...]] = []
    for state, name in ((found.start, "before"), (saved, "after")):
        try:
            curves.append(bench.curve(state))
        except WorkerError as error:  # what was measured stands without it
            curves.append(())
            said.append(f"no curve over the batch of {name}: {error}")
    before_curve, after_curve = curves
    return Last(total, before, after, after_seen, before_curve, after_curve, tuple(said))


def climb_of(
    job: ClimbJob,
    found: ClimbProgress,
    saved: ClimbState,
    last: Last,
    budget: Budget,
    folder: Folder,
) -> Climb:
    order, hardware = job.order, job.hardware
    seen = last.after_seen or found.seen
    roof = roof_of(hardware, seen.filled.dtype)
    bounds = asdict(order.bounds) if order.quality else {}
    notes = [*found.notes, *last.words]
    if not order.quality:
        notes.append("quality was not measured (--quality off)")
    if found.best == found.start:
        notes.append("no rung was kept: the model runs as it did")
    before = last.before or found.start_seen.figures
    after = last.after or found.seen.figures
    assert before is not None, "rounds were run"
    assert after is not None, "rounds were run"
    config = job.subject.config
    return Climb(
        job.subject.name,
        order.goal,
        job.workload.name,
        order.command,
        datetime.now(UTC).isoformat(timespec="seconds"),
        budget.used_s,
        hardware.summary(),
        versions_of(hardware),
        None if roof is None else roof.memory.value,
        None if roof is None else roof.memory.source,
        matrix_rates(hardware),
        bounds,
        Side(
            asdict(saved_recipe(found.start_seen.filled, in_checkpoint=False)),
            found.start.loop,
            before,
            last.before_curve,
            found.start_seen.roof(config, hardware, "before"),
            found.start_seen.memory,
        ),
        Side(
            asdict(saved.recipe),
            saved.loop,
            after,
            last.after_curve,
            seen.roof(config, hardware, "after"),
            seen.memory,
        ),
        tuple(found.outcomes),
        last.total,
        tuple(notes),
        serve_command(job.subject, saved.recipe, folder.path),
    )


def matrix_rates(hardware: Hardware) -> dict[str, float]:
    found = {}
    for dtype in ("fp32", "tf32", "bf16", "fp16", "fp8", "int8"):
        ceiling = hardware.ceiling(f"matrix_{dtype}")
        if ceiling is not None:
            found[dtype] = ceiling.value
    return found


def serve_command(subject: ClimbSubject, recipe: Recipe, folder: Path) -> tuple[str, ...]:
    if subject.shape is not None:
        flags = recipe_flags(recipe)
        return ("ridgeline", "bench", "engine", "--shape", subject.shape, *flags)
    return ("ridgeline", "serve", str(folder))


def write(
    job: ClimbJob, climb: Climb, folder: Folder, bench: Processes, saved: ClimbState, last: Last
) -> None:
    folder.write_json(CLIMB, climb.to_json())
    records = climb_records(climb, job.hardware, bench.clocks)
    folder.write_json(RECORDS, {"records": [record.to_json() for record in records]})
    if last.total is not None:
        folder.write_json(CHECK, check_document(job, climb, bench, saved, last.total))
    write_report(climb, folder.path / REPORT)


def check_document(
    job: ClimbJob, climb: Climb, bench: Processes, saved: ClimbState, total: Speedup
) -> Mapping[str, Any]:
    """What `--check` measures again."""
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
        "part": bench.part_of(saved).to_json(),
        "rates": list(total.after),
        "bounds": asdict(job.order.bounds) if job.order.quality else {},
        "measured": job.measured.to_json(),
        "quality": None if quality is None else asdict(quality),
        "created": climb.created,
    }


def last_quality(climb: Climb) -> Quality | None:
    """Of what was kept: the last one that was measured holds all before it."""
    kept = [rung.quality for rung in climb.rungs if rung.status == "kept"]
    return next((quality for quality in reversed(kept) if quality is not None), None)


def outcomes_to_remember(
    rungs: Sequence[RungOutcome], job: ClimbJob
) -> Sequence[PredictionOutcome]:
    """What was predicted, beside what came of it."""
    device, model = job.hardware.name, job.subject.name
    return [
        PredictionOutcome(
            rung.area,
            rung.name,
            rung.predicted.speedup,
            rung.achieved.value,
            device,
            model,
            rung.predicted.low,
            rung.predicted.high,
        )
        for rung in rungs
        if rung.predicted is not None and rung.achieved is not None
    ]
