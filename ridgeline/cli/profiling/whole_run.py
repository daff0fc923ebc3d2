"""`ridgeline profile MODEL --workload NAME|FILE`: a whole run through the engine, divided by kind
of step and by op.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from typing import Any

from ridgeline.bench.engine import EngineRun, run_workload
from ridgeline.cli.arguments.options import OUTPUT_TOKENS
from ridgeline.cli.bench.engine import asked_workloads, check_part_of_workload, warm_up
from ridgeline.engine.execution.step_watch import StepWatch
from ridgeline.errors import UsageError
from ridgeline.hardware import Hardware
from ridgeline.profiling.model_profile import StepProfile
from ridgeline.profiling.predicting.next_steps import Advice, what_next
from ridgeline.profiling.predicting.prediction import Situation
from ridgeline.profiling.predicting.situation import situation_of
from ridgeline.profiling.roofline import of_one_rank
from ridgeline.profiling.run_profile import DividedKind, divided_kinds, losses, phases_of_kinds
from ridgeline.profiling.step_kinds import kinds_of
from ridgeline.profiling.tracing.stepping import EngineSteps
from ridgeline.progress import Progress

OF_STEPS = ("batch", "context", "prefill", "trace", "counters")
OF_WORKLOADS = ("requests", "category", "speedup", "at_once", "fitting")


@dataclass(frozen=True)
class DividedRun:
    workload: str
    run: EngineRun
    kinds: list[DividedKind]
    situation: Situation
    advice: list[Advice]

    @property
    def steps(self) -> list[StepProfile]:
        """Those that stand for kinds."""
        return [each.typical for each in self.kinds if each.typical is not None]

    @property
    def notes(self) -> list[str]:
        notes = [note for kind in self.kinds for note in kind.notes]
        if self.run.not_finished:
            num, first = len(self.run.not_finished), self.run.not_finished[0]
            notes.append(f"{num} requests did not finish; the first is {first}")
        if self.run.setup_s > 0.01 * self.run.wall_s:
            notes.append(
                f"{self.run.setup_s:.1f} s of the run went into kernels that compiled and graphs "
                "that were captured; it was not warm"
            )
        return notes


def check_whole_run(args: argparse.Namespace) -> None:
    """One line for what does not go together."""
    if args.workload is None:
        given = [name for name in OF_WORKLOADS if getattr(args, name)]
        given += ["output_tokens"] * (args.output_tokens != OUTPUT_TOKENS)
        if given:
            name = given[0].replace("_", "-")
            raise UsageError(f"--{name} is for a workload; add --workload, or remove it")
        return
    if args.train:
        raise UsageError("--workload is for inference; remove it, or --train")
    if args.loop != "engine":
        raise UsageError("--workload runs through the engine; remove it, or --loop naive")
    for name in OF_STEPS:
        if getattr(args, name):
            raise UsageError(
                f"--{name} is for steps of one size, and --workload has its own; remove one of "
                "the two"
            )
    check_part_of_workload(args)


def whole_run(
    args: argparse.Namespace,
    subject: EngineSteps,
    hardware: Hardware,
    num_steps: int,
    progress: Progress,
) -> DividedRun:
    engine = subject.engine
    workload, *others = asked_workloads(args, engine, hardware)
    if others:
        raise UsageError("a run is divided for one --category; give one")
    warm_up(engine, workload, hardware, None)
    watch = StepWatch(engine.runner.device)
    run = run_workload(engine, workload, hardware, progress, watch=watch)
    part = of_one_rank(hardware, subject.ranks_a_device)
    watched = kinds_of(watch, engine.local.costs, hardware, run.empty_s)
    kinds = divided_kinds(subject, watched, hardware, num_steps, progress)
    situation = situation_of(subject, part, phases_of_kinds(kinds), concurrency=run.mean_batch)
    advice = [each for each in what_next(situation) if each.flags]
    return DividedRun(workload.name, run, kinds, situation, advice)


def run_json(whole: DividedRun, *, on_cpu: bool) -> dict[str, Any]:
    """What a document has of it beside the steps that stand for its kinds."""
    run = whole.run
    empty_s = sum(run.empty_s.values())
    in_steps_s = sum(each.kind.seconds for each in whole.kinds)
    return {
        "workload": whole.workload,
        "num_requests": run.num_requests,
        "wall_s": run.wall_s,
        "output_tokens_per_s": run.output_tokens_per_s,
        "tokens_per_s": run.tokens_per_s,
        "limit_s": run.limit_s,
        "share_of_limit": run.share_of_limit,
        "no_requests_s": empty_s,
        "beside_steps_s": max(0.0, run.wall_s - in_steps_s - empty_s),
        "device_idle_s": sum(each.kind.idle_s for each in whole.kinds),
        "kinds": [_kind_json(each, run.wall_s) for each in whole.kinds],
        "losses": [
            asdict(loss) | {"lost_s": loss.lost_s, "share": loss.lost_s / run.wall_s}
            for loss in losses(whole.kinds, whole.advice, on_cpu=on_cpu)
        ],
    }


def _kind_json(each: DividedKind, wall_s: float) -> dict[str, Any]:
    kind, work = each.kind, each.kind.work
    limit_s = kind.limit_s
    return {
        "label": kind.label,
        "kind": kind.name,
        "num_steps": len(kind.plans),
        "mean_rows": work.rows,
        "mean_tokens": work.tokens,
        "seconds": kind.seconds,
        "share": kind.seconds / wall_s,
        "device_s": kind.device_s,
        "idle_s": kind.idle_s,
        "limit_s": limit_s,
        "share_of_limit": None if limit_s is None else limit_s / kind.seconds,
        "parts": each.parts,
        "ops": [asdict(op) for op in each.ops],
        "why_not_divided": each.why_not or None,
    }
