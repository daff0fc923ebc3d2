"""What a climb of training leaves: its result as a `Climb`, from which the page, the table in the
terminal and `ridgeline report` are drawn, and records.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from statistics import median

from ridgeline.hardware import Hardware
from ridgeline.hardware.clocks import Clocks
from ridgeline.ladder.outcome import Figures, ReportedMemory, RungOutcome, Side, Speedup
from ridgeline.ladder.reporting.card import write_card
from ridgeline.ladder.reporting.folder import CARD, RECORDS, REPORT, Folder
from ridgeline.ladder.reporting.records import rung_values, speedup_values
from ridgeline.ladder.reporting.report import write_report
from ridgeline.ladder.reporting.result import LEARNED, Climb
from ridgeline.ladder.reporting.saved import FILE_NAME as CLIMB
from ridgeline.ladder.reporting.words import busy_words
from ridgeline.ladder.training.climb import TrainClimber
from ridgeline.ladder.training.forms import TrainForm
from ridgeline.ladder.training.order import TrainClimbJob
from ridgeline.profiling.roofline import roof_of
from ridgeline.records import Record, Value
from ridgeline.training.config import TrainConfig
from ridgeline.training.config_file import FILE_NAME
from ridgeline.training.memory.plan import itemise
from ridgeline.training.watching.utilization import Utilization

RATES = ("fp32", "tf32", "bf16", "fp16", "fp8")


def climb_of(climber: TrainClimber, ladder: list[RungOutcome], plain: Speedup | None) -> Climb:
    job, total = climber.job, climber.total
    order, hardware = job.order, job.hardware
    default_s, best_s = step_seconds(climber)
    roof = roof_of(hardware, "bf16")
    rates = {name: hardware.ceiling(f"matrix_{name}") for name in RATES}
    stamped = Record.create("optimize-training", hardware, {}, command=order.command)
    notes = [*climber.notes, *filter(None, [busy_words(climber.outcomes)])]
    return Climb(
        model=job.name,
        goal="throughput",
        workload=job.workload,
        command=order.command,
        created=stamped.created,
        seconds=climber.budget.used_s,
        hardware=stamped.hardware,
        versions=stamped.versions,
        bandwidth=None if roof is None else roof.memory.value,
        bandwidth_source=None if roof is None else roof.memory.source,
        matrix_rates={name: each.value for name, each in rates.items() if each is not None},
        bounds={"max_loss_increase": order.max_loss_increase},
        before=_side(job, climber.defaults, default_s),
        after=_side(job, climber.best, best_s),
        rungs=tuple(climber.outcomes),
        total=total,
        notes=tuple(notes),
        serve_command=train_command(job, order.out),
        ladder=tuple(ladder),
        plain=plain,
        time_ledger=climber.bench.ledger.seconds,
        first_answer_s=climber.first_answer_s,
        unit=LEARNED,
    )


def step_seconds(climber: TrainClimber) -> tuple[float, float]:
    """Of the defaults and of the answer, in the rounds that compared them."""
    tokens = climber.job.order.config.batch_tokens
    if climber.total is not None:
        before, after = climber.total.before, climber.total.after
        return tokens / median(before), tokens / median(after)
    step_s = climber.comparing.step_s(TrainForm(climber.defaults))
    assert step_s is not None, "the defaults were timed first"
    return step_s, step_s


def _side(job: TrainClimbJob, config: TrainConfig, step_s: float) -> Side:
    context = job.context
    memory = itemise(job.subject.model, config, job.device, context.free_bytes, context.method)
    items = [ReportedMemory(each.name, each.num_bytes, each.meaning) for each in memory.items]
    weights = next((each.num_bytes for each in memory.items if each.name == "weights"), 0)
    return Side(
        recipe=asdict(config),
        loop="engine",
        figures=Figures(
            output_tokens_per_s=config.batch_tokens / step_s,
            first_token_s=None,
            per_output_token_s=None,
            request_s=step_s,
            share_of_limit=share_of_limit(job, config, step_s),
            weight_bytes=weights,
        ),
        memory=tuple(items),
    )


def share_of_limit(job: TrainClimbJob, config: TrainConfig, step_s: float) -> float | None:
    """Of the matrix rate that was measured here, else of the datasheet's: MFU."""
    is_frozen = config.lora.rank is not None
    used = Utilization(job.subject.model, job.hardware, config.precision, is_frozen=is_frozen)
    windows, count = job.subject.windows, config.batch.size
    batch = windows.batch(windows.order(config.seed).samples(0, count))
    shares = used.shares(used.flops([batch]), step_s)
    return shares["mfu_measured"] or shares["mfu"]


def train_command(job: TrainClimbJob, out: Path) -> tuple[str, ...]:
    """That runs the answer; what the climb did not need is left to be filled in."""
    config, more = job.order.config, []
    if config.shape is not None and config.tokenizer is None:
        more += ["--tokenizer", "MODEL"]
    if config.data.path is None:
        more += ["--data", "FILE"]
    if not config.end.is_given:
        more += ["--minutes", "10"]
    return ("ridgeline", "train", str(out / FILE_NAME), *more)


def write_folder(job: TrainClimbJob, climb: Climb, folder: Folder, clocks: Clocks | None) -> None:
    folder.write_json(CLIMB, climb.to_json())
    records = climb_records(climb, job.hardware, clocks)
    folder.write_json(RECORDS, {"records": [record.to_json() for record in records]})
    write_report(climb, folder.path / REPORT)
    write_card(climb, folder.path / CARD)


def climb_records(climb: Climb, hardware: Hardware, clocks: Clocks | None) -> list[Record]:
    stem = f"optimize-training-{Path(climb.model).name}"
    total = {} if climb.total is None else speedup_values(climb.total)
    named = {
        f"{stem}-before": figure_values(climb.before.figures),
        f"{stem}-after": figure_values(climb.after.figures) | total,
    }
    named |= {
        f"{stem}-{rung.name}": rung_values(rung)
        for rung in climb.rungs
        if rung.achieved is not None
    }
    return [
        Record.create(name, hardware, values, climb.command, climb.notes, clocks)
        for name, values in named.items()
    ]


def figure_values(figures: Figures) -> dict[str, Value]:
    assert figures.request_s is not None, "a step was timed"
    values = {
        "tokens_per_s": Value(figures.output_tokens_per_s, "token/s"),
        "step": Value(figures.request_s, "s"),
    }
    if figures.share_of_limit is not None:
        values["mfu"] = Value(figures.share_of_limit, "1")
    return values
