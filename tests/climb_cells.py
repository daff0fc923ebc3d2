"""`optimize` beside recipes set by hand, on cells of a shape and a workload: the best of a grid
over the whole workload, what the climb left and how soon, and both in turns. A record of each cell.

    PYTHONPATH=.:tests python -m climb_cells llama-8b-batch-1 --save results
    PYTHONPATH=.:tests python -m climb_cells qwen3-8b-azure --trace trace.csv --save results
    PYTHONPATH=.:tests python -m climb_cells tiny --device cpu --budget 60s     # to try it
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from ridgeline.ladder.climbing.climb import climb_model
from ridgeline.ladder.guessing.answer import default_states
from ridgeline.ladder.measuring.part import WorkloadPart
from ridgeline.ladder.measuring.process import WorkerError
from ridgeline.ladder.order import ClimbJob, ClimbOrder, prepared
from ridgeline.ladder.outcome import Goal
from ridgeline.ladder.processes.bench_processes import Processes
from ridgeline.ladder.reporting.result import Climb
from ridgeline.ladder.searching.budget import parse_duration
from ridgeline.ladder.searching.together import GUESS
from ridgeline.ladder.state import ClimbState, applied
from ridgeline.progress import Progress
from ridgeline.recipe import recipe_from, usual_limits
from ridgeline.records import Record, Value

Edit = Mapping[str, Any]
FP8_ALL = {"scheme": "fp8", "kv.dtype": "fp8"}
LATENCY: Sequence[Edit] = (
    {},
    {"scheme": "fp8"},
    {"scheme": "int8"},
    {"scheme": "int4-g128"},
    {"scheme": "fp8", "head": "int8"},
    {"scheme": "int4-g128", "head": "int8"},
)
THROUGHPUT: Sequence[Edit] = (
    {},
    {"scheme": "fp8"},
    {"scheme": "fp8", "limits.max_batch": 1024},
    FP8_ALL,
    {**FP8_ALL, "limits.max_batch": 1024},
    {**FP8_ALL, "limits.max_batch": 1024, "limits.token_budget": 16384},
)
TRIED: Sequence[Edit] = ({}, {"scheme": "int8"}, {"limits.max_batch": 16})
AZURE = 600  # requests of the trace
BY_HAND = "by hand: "
WARM_SHARE = 0.2  # of all lengths, before a run that counts
TURNS, TURNS_S = 2, 80.0  # runs of the whole workload on each side in the end, if they fit into it


@dataclass(frozen=True)
class Cell:
    shape: str
    goal: Goal
    workload: str | None = None  # "azure": the trace that is given
    grid: Sequence[Edit] = THROUGHPUT
    budget: str = "5m"


CELLS = {
    "llama-8b-batch-1": Cell("llama-3.1-8b", "latency", grid=LATENCY),
    "llama-8b-throughput": Cell("llama-3.1-8b", "throughput"),
    "llama-8b-azure": Cell("llama-3.1-8b", "throughput", "azure"),
    "llama-8b-shared-prefix": Cell("llama-3.1-8b", "throughput", "shared-prefix"),
    "qwen3-8b-batch-1": Cell("qwen3-8b", "latency", grid=LATENCY),
    "qwen3-8b-throughput": Cell("qwen3-8b", "throughput"),
    "qwen3-8b-azure": Cell("qwen3-8b", "throughput", "azure"),
    "gemma-2-9b-batch-1": Cell("gemma-2-9b", "latency", grid=LATENCY),
    "qwen3-30b-throughput": Cell("qwen3-30b-a3b", "throughput", budget="8m"),
    "tiny": Cell("tiny", "throughput", "cpu", TRIED, "60s"),
}


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cells", nargs="+", choices=CELLS)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--requests", type=int, default=AZURE, help="of the trace")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--budget", help="of each climb, instead of the cell's")
    parser.add_argument("--save", type=Path, metavar="DIR")
    parser.add_argument("--logs", type=Path, metavar="FILE", help="what its processes wrote")
    parser.add_argument("--by-hand", type=Path, metavar="RECORD", help="its grid, not run again")
    args = parser.parse_args(words)
    for name in args.cells:
        with tempfile.TemporaryDirectory() as folder:
            record = measured_cell(name, Path(folder), args)
        print(json.dumps({key: value.value for key, value in record.values.items()}), flush=True)
        if args.save is not None:
            print(record.save(args.save))
    return 0


def measured_cell(name: str, folder: Path, args: argparse.Namespace) -> Record:
    cell = CELLS[name]
    workload = cell.workload
    if workload == "azure":
        workload = str(shortened_trace(args.trace, args.requests, folder))
    order = ClimbOrder(
        None, cell.shape, folder / "out", cell.goal, workload, quality=False,
        budget_s=parse_duration(args.budget or cell.budget), device=args.device,
    )  # fmt: skip
    began = time.monotonic()
    climb = climb_model(order, timed_lines(began))
    climb_s = time.monotonic() - began
    print(climb, f"{name}: climbed in {climb_s:.0f} s", sep="\n", flush=True)
    print(json.dumps({"first answer": climb.first_answer_s} | dict(climb.time_ledger)), flush=True)
    if args.logs is not None:
        args.logs.write_text("\n".join(_logs(folder / "out" / "work")))
    job = prepared(order)
    whole = WorkloadPart(len(job.workload.requests))
    with bench_of(job, folder / "grid") as bench:
        rates = grid_of(args.by_hand) if args.by_hand is not None else {}
        grid = without_equals(cell.grid, whole.count, job.subject.device != "cpu")
        for edit in grid if not rates else ():
            rates[in_words(edit)] = one_run(bench, edit, whole)
            print(f"{name}: {in_words(edit)}: {rates[in_words(edit)]}", flush=True)
        runs = [(rate, each) for each in grid if (rate := rates.get(in_words(each)))]
        rate, best = max(runs, key=lambda pair: pair[0])
        bench.let_go()
        answer = ClimbState(recipe_from({"version": 1} | dict(climb.after.recipe)), "engine")
        turns_s = 2 * job.workload.num_output_tokens / rate
        turns = max(1, min(TURNS, int(TURNS_S / turns_s)))
        by_hand, ours = bench.compare_part(state_of(best), answer, whole, turns)
    return record_of(name, job, climb, climb_s, rates, best, by_hand, ours)


def timed_lines(began: float) -> Progress:
    """What is measured, and when it began."""
    last = ""

    def line(doing: str, done: int, total: int) -> None:
        nonlocal last
        if doing != last:
            print(f"{time.monotonic() - began:6.1f} s  {doing}", flush=True)
        last = doing

    return line


def shortened_trace(path: Path | None, count: int, folder: Path) -> Path:
    if path is None:
        raise SystemExit("this cell needs --trace FILE")
    with open(path) as file:
        text = "".join(islice(file, count + 1))
    (folder / "trace.csv").write_text(text)
    return folder / "trace.csv"


def bench_of(job: ClimbJob, folder: Path) -> AbstractContextManager[Processes]:
    return Processes(job.subject, job.workload, job.order.goal, job.hardware, folder)


def without_equals(grid: Sequence[Edit], num_requests: int, on_gpu: bool) -> list[Edit]:
    """What differs by a batch that holds all requests either way is run once."""
    result = list[Edit]()
    for edit in grid:
        least = min(edit.get("limits.max_batch", 0), usual_limits(on_gpu).max_batch)
        if least >= num_requests:
            edit = {name: value for name, value in edit.items() if name != "limits.max_batch"}
        if edit not in result:
            result.append(edit)
    return result


def state_of(edit: Edit) -> ClimbState:
    return applied(default_states()[0], edit)


def one_run(bench: Processes, edit: Edit, whole: WorkloadPart) -> float | None:
    """Of the whole workload; None where it cannot be run."""
    state = state_of(edit)
    try:
        bench.run_part(state, replace(whole, share=WARM_SHARE))  # kernels and graphs
        bench.run_part(state, whole)
        figures = bench.figures(state)
    except WorkerError as error:
        print(f"{in_words(edit)}: {error}", flush=True)
        return None
    finally:
        bench.let_go()
    assert figures is not None, "it ran"
    return figures.output_tokens_per_s


def grid_of(path: Path) -> dict[str, float | None]:
    values = json.loads(path.read_text())["values"]
    return {
        name.removeprefix(BY_HAND): entry["value"]
        for name, entry in values.items()
        if name.startswith(BY_HAND)
    }


def _logs(folder: Path) -> Iterator[str]:
    for path in sorted(folder.glob("*.log")):
        yield f"== {path.name}"
        yield path.read_text(errors="replace")


def in_words(edit: Edit) -> str:
    return ", ".join(f"{name} {value}" for name, value in edit.items()) or "defaults"


def record_of(
    name: str,
    job: ClimbJob,
    climb: Climb,
    climb_s: float,
    rates: Mapping[str, float | None],
    best: Edit,
    by_hand: Sequence[float],
    ours: Sequence[float],
) -> Record:
    cell = CELLS[name]
    later = [
        rung.achieved.value
        for rung in climb.rungs
        if rung.status == "kept" and rung.name != GUESS and rung.achieved is not None
    ]
    share = 1.0
    for gain in later:
        share /= gain
    close = [
        abs(rung.predicted.speedup / rung.achieved.value - 1) <= 0.2
        for rung in climb.rungs
        if rung.predicted is not None and rung.achieved is not None
    ]
    mean = sum(ours) / len(ours)
    values = {
        "answer": Value(mean, "tokens/s"),
        "best_by_hand": Value(sum(by_hand) / len(by_hand), "tokens/s"),
        "answer_over_hand": Value(mean / (sum(by_hand) / len(by_hand)), "ratio"),
        "defaults": Value(climb.before.figures.output_tokens_per_s, "tokens/s"),
        "headline": Value(climb.after.figures.output_tokens_per_s, "tokens/s"),
        "headline_over_answer": Value(climb.after.figures.output_tokens_per_s / mean, "ratio"),
        "climb": Value(climb_s, "s"),
        "first_answer_share": Value(share, "ratio"),
        "first_answer": Value(climb.first_answer_s or climb_s, "s"),
        "predictions_close": Value(sum(close) / len(close) if close else 1.0, "ratio"),
    }
    for words, rate in rates.items():
        if rate is not None:
            values[BY_HAND + words] = Value(rate, "tokens/s")
    notes = [
        f"{cell.shape} for {cell.goal}, {climb.workload}; by hand best: {in_words(best)}",
        f"kept: {', '.join(rung.title for rung in climb.kept) or 'the defaults'}",
        f"left: {json.dumps(dict(climb.after.recipe))}",
        f"time: {json.dumps({name: round(s, 1) for name, s in climb.time_ledger.items()})}",
        *climb.notes,
    ]
    return Record.create(f"climb-cell-{name}", job.hardware, values, notes=notes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
