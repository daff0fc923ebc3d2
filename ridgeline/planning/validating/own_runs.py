"""Our own engine under traffic over time: what was measured (records `traces-…` of
tests/serving_traces.py) beside the same requests simulated. Nothing is fitted to them.

    for record in own_records(Path("results")):
        for row in judge_own(record): print(row.words)

A trace is one of drawn_traces.py, so that anybody can simulate it again, or a file by its name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ridgeline.data.traces import load_workload
from ridgeline.data.workload import Workload
from ridgeline.errors import UsageError
from ridgeline.hardware.specs import find_spec
from ridgeline.models.shapes import describe_shape
from ridgeline.planning.clusters.parsing import parse_cluster
from ridgeline.planning.serving.fleets.fleet import Fleet
from ridgeline.planning.serving.fleets.served import RunReport
from ridgeline.planning.serving.setup import engine_setup
from ridgeline.planning.serving.sustained import sustained
from ridgeline.planning.serving.tunings import tuning_for
from ridgeline.planning.validating.drawn_traces import TRACES, drawn_trace
from ridgeline.planning.validating.judging import JudgedRow
from ridgeline.recipe import Recipe, edited_at_once
from ridgeline.records import Record

PREFIX, OWN = "traces-", "own"
# Of a point's values: what the simulation says of the same.
FIGURES = ("TPOT", "mean TTFT", "TTFT p99", "tokens/s")


@dataclass(frozen=True)
class TracePoint:
    """Requests of a drawn trace and their rate; or of a file, and how many times as fast."""

    trace: str
    num_requests: int
    rate: float
    seed: int = 0

    @property
    def name(self) -> str:
        return f"{self.trace} {self.num_requests} at {self.rate:g}"

    def workload(self, file: Path | None = None) -> Workload:
        if self.trace in TRACES:
            return drawn_trace(self.trace, self.num_requests, self.rate, self.seed)
        if file is None or file.name != self.trace:
            raise UsageError(f"point {self.name} needs the file {self.trace}; give it")
        return load_workload(file).first(self.num_requests).sped_up(self.rate)

    def to_json(self, workload: Workload) -> dict[str, Any]:
        """With sums, by which a changed generator or file is seen."""
        return asdict(self) | {
            "prompt_tokens": workload.num_prompt_tokens,
            "output_tokens": workload.num_output_tokens,
        }


@dataclass(frozen=True)
class OwnRow:
    """One point: measured and simulated, in the order of `FIGURES`."""

    subject: str
    point: TracePoint
    measured: tuple[float, ...]
    predicted: tuple[float, ...]  # none where its trace is not there

    @property
    def errors(self) -> tuple[float, ...]:
        return tuple(p / m - 1 for p, m in zip(self.predicted, self.measured, strict=True))

    @property
    def words(self) -> str:
        if not self.predicted:
            return f"{self.subject}, {self.point.name}: needs the file {self.point.trace}"
        each = zip(FIGURES, self.measured, self.predicted, self.errors, strict=True)
        figures = ", ".join(f"{n} {m:.4g} as {p:.4g} ({e:+.1%})" for n, m, p, e in each)
        return f"{self.subject}, {self.point.name}: {figures}"


def own_records(folder: Path) -> list[Record]:
    paths = sorted(folder.glob(f"{PREFIX}*.json"))
    return [Record.from_json(json.loads(path.read_text())) for path in paths]


def judge_rows(folder: Path) -> list[JudgedRow]:
    """Of all records in a folder, with the traces that lie there too."""
    rows = []
    for record in own_records(folder):
        for each in judge_own(record, folder):
            name = f"{each.subject} {each.point.name}"
            if not each.predicted:
                reason = f"needs the file {each.point.trace} beside it"
                rows.append(JudgedRow(name, each.subject, OWN, None, None, refused=reason))
            rows += [
                JudgedRow(name, each.subject, f"{OWN} {kind}", predicted, measured)
                for kind, measured, predicted in zip(
                    FIGURES, each.measured, each.predicted, strict=False
                )
            ]
    return rows


def judge_own(record: Record, folder: Path | None = None) -> Iterator[OwnRow]:
    """Points of files that are not in the folder have no predictions."""
    subject, *points = map(json.loads, record.notes)
    for described in points:
        names = TracePoint.__dataclass_fields__
        point = TracePoint(**{key: described[key] for key in names})
        file = None if folder is None else folder / point.trace
        row = OwnRow(record.name.removeprefix(PREFIX), point, _measured(record, point), ())
        if point.trace not in TRACES and (file is None or not file.is_file()):
            yield row
            continue
        workload = point.workload(file)
        if point.to_json(workload) != described:
            raise UsageError(f"{record.name}, {point.name}: its trace is another now")
        yield replace(row, predicted=_figures(simulated(record, subject, workload)))


def simulated(record: Record, subject: Mapping[str, Any], workload: Workload) -> RunReport:
    spec = find_spec(record.hardware["name"], record.hardware["num_units"])
    gpu = "here" if spec is None else spec.name
    pool = parse_cluster(gpu).pools[0]
    recipe = edited_at_once(Recipe(), subject["recipe"])
    config = describe_shape(subject["shape"]).config
    setup = engine_setup(config, recipe, sustained(pool), tuning_for(gpu))
    return Fleet([setup]).run(workload).report()


def _measured(record: Record, point: TracePoint) -> tuple[float, ...]:
    keys = ("per_output_token_p50", "first_token_mean", "first_token_p99", "output_tokens_per_s")
    return tuple(record.values[f"{point.name}: {key}"].value for key in keys)


def _figures(report: RunReport) -> tuple[float, ...]:
    ttft = report.ttft
    return report.tpot.p50, ttft.mean, ttft.p99, report.output_tokens_per_s
