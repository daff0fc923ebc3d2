"""Our engine under traffic over time: three drawn traces, one of them far beyond what it carries,
on two shapes; each a record that `python -m serving_traces --judge` and the tests hold the
simulation to.

    PYTHONPATH=.:tests python -m serving_traces --save results              # make gpu-traces
    PYTHONPATH=.:tests python -m serving_traces --trace trace.csv --save results   # one more
    PYTHONPATH=.:tests python -m serving_traces --device cpu --shapes tiny  # to try it
    PYTHONPATH=.:tests python -m serving_traces --judge results     # with trace.csv in it, if used

With `--steps DIR` what each step held and took, for looking at later. What there is no time for
(`--seconds`) is left out and said.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bare_machine  # noqa: F401, first: it stands for packages that are missing
import numpy as np
import torch

from ridgeline.bench import engine as bench_engine
from ridgeline.bench.engine import EngineRun, run_workload
from ridgeline.data.workload import Workload, WorkloadRequest
from ridgeline.engine import Engine
from ridgeline.engine.execution.step_watch import StepWatch, between_s
from ridgeline.engine.scheduling.step_plan import StepPlan
from ridgeline.hardware import Hardware, detect
from ridgeline.hardware.clocks import ClockSampler
from ridgeline.kernels.extension import build_all, find_nvcc, library
from ridgeline.models.shapes import RandomShape
from ridgeline.planning.validating.own_runs import TracePoint, judge_own, own_records
from ridgeline.recipe import Recipe, edited_at_once
from ridgeline.records import Record, Value

CONTEXT = {"limits.max_context": 16384}
EDITS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": CONTEXT,
    "qwen3-8b": {"scheme": "fp8", "kv.dtype": "fp8"} | CONTEXT,
    "tiny": {"limits.max_context": 1024},
}
POINTS = (
    TracePoint("chat", 160, 14.0),
    TracePoint("documents", 100, 12.0),
    TracePoint("chat", 256, 60.0),  # twice and more of what it carries
    TracePoint("answers", 80, 10.0),
)
OF_FILE = 200, 8.0  # requests of a trace that is given, and how many times as fast they come
TRIED = (TracePoint("answers", 4, 2.0),)  # on a CPU
RESERVE_S = 25.0  # what a point takes at most


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=EDITS, default=["llama-3.1-8b", "qwen3-8b"])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--trace", type=Path, help="one more, a file")
    parser.add_argument("--seconds", type=float, default=420.0, help="begin nothing behind these")
    parser.add_argument("--save", type=Path, metavar="DIR")
    parser.add_argument("--steps", type=Path, metavar="DIR")
    parser.add_argument("--judge", type=Path, metavar="DIR", help="records instead of running")
    args = parser.parse_args(words)
    if args.judge is not None:
        judge(args.judge)
        return 0
    if args.steps is not None:
        bench_engine.StepWatch = KeptWatch  # type: ignore[misc]
    until = time.monotonic() + args.seconds
    build_kernels(args.device)
    for number, shape in enumerate(args.shapes):
        left = until - time.monotonic()  # shapes have even parts of it
        measure_shape(shape, args, time.monotonic() + left / (len(args.shapes) - number))
    return 0


def build_kernels(device: str) -> None:
    """Those in CUDA C++, as an engine that has started once has them."""
    if detect(device).device_type != "cpu":
        began = time.monotonic()
        if find_nvcc() is None:
            say("no nvcc: kernels in CUDA C++ are missing")
            return
        build_all()
        say("kernels are built", seconds=time.monotonic() - began)


def measure_shape(shape: str, args: argparse.Namespace, until: float) -> None:
    hardware = detect(args.device)
    began = time.monotonic()
    recipe = edited_at_once(Recipe(), EDITS[shape])
    engine = Engine(RandomShape(shape), recipe, device=hardware.device)
    KeptWatch.engine = engine
    on_gpu = hardware.device_type != "cpu"
    warm_up(engine, hardware, (2048, 6000) if on_gpu else (32,))
    say(f"{shape}: ready and warm", seconds=time.monotonic() - began)
    points = list(POINTS if on_gpu else TRIED)
    if args.trace is not None:
        count, faster = OF_FILE
        points.insert(1, TracePoint(args.trace.name, count, faster))
    values: dict[str, Value] = {"pages": Value(float(engine.scheduler.config.num_pages), "1")}
    done = []
    clocks = ClockSampler(hardware)
    with clocks:
        for point in points:
            if time.monotonic() + (RESERVE_S if on_gpu else 0.0) > until:
                say(f"{shape}: no time for {point.name}")
                continue
            workload = point.workload(args.trace)
            run = watched_run(engine, workload, hardware, args.steps, f"{shape}-{point.name}")
            values |= values_of(point.name, run)
            done.append(point.to_json(workload))
            say(f"{shape}: {point.name}", **shown(run))
    built = on_gpu and library("decode_attention") is not None
    about = {"shape": shape, "recipe": EDITS[shape], "cuda_cpp": built}
    notes = [json.dumps(about), *map(json.dumps, done)]
    form = recipe.scheme or engine.recipe.dtype
    record = Record.create(
        f"traces-{shape}-{form}", hardware, values, notes=notes, clocks=clocks.median
    )
    if args.save is not None:
        print(record.save(args.save), flush=True)
    engine.close()
    del engine, KeptWatch.engine
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()


def warm_up(engine: Engine, hardware: Hardware, prompts: Sequence[int]) -> None:
    """Kernels compile and graphs are captured when they are first needed. Batches shrink from the
    largest to one beside a request of each length; then a few prompts of all lengths come while
    others decode.
    """
    most = engine.scheduler.config.max_batch
    for length in (16, *prompts):
        beside = tuple(
            WorkloadRequest(16, 2 + each * 40 // most) for each in range(most if most > 8 else 2)
        )
        ramp = Workload("ramp", (WorkloadRequest(length, 44), *beside))
        run_workload(engine, ramp, hardware, with_limit=False)
    sizes = [min(prompts[-1], 12 + 10 * 2**each) for each in range(10)]
    mixed = tuple(WorkloadRequest(size, 12, 0.05 * each) for each, size in enumerate(2 * sizes))
    run_workload(engine, Workload("mixed", mixed), hardware, with_limit=False)


def watched_run(
    engine: Engine, workload: Workload, hardware: Hardware, folder: Path | None, name: str
) -> EngineRun:
    """Behind the same at three times the rate, which compiles what is met for the first time."""
    run_workload(engine, workload.sped_up(3.0), hardware, with_limit=False)
    run = run_workload(engine, workload, hardware, with_limit=False)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"latencies": run.latencies, "steps": steps_of(LAST_WATCH[-1])})
        (folder / f"{name.replace(' ', '-')}.json").write_text(text)
    return run


class KeptWatch(StepWatch):
    """The watch of the last run, which the run itself lets go; with the pages that are in use."""

    engine: Engine

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.pages: list[int] = []
        LAST_WATCH[:] = [self]

    def end(self, plan: StepPlan) -> None:
        count = len(self.steps)
        super().end(plan)
        self.pages += [self.engine.stats.num_pages_used] * (len(self.steps) - count)


LAST_WATCH: list[KeptWatch] = []


def steps_of(watch: KeptWatch) -> list[list[float]]:
    """Of each step: decode rows, the keys they read, the longest's and that of the one at nine
    tenths, tokens and pairs of prompts, samples, pages in use; when it began on the device and how
    long it was there, in s.
    """
    rows = []
    for step, pages in zip(watch.steps, watch.pages, strict=True):
        plan, decodes = step.plan, step.plan.num_decode_rows
        pieces = list(zip(plan.num_tokens, plan.first_positions, strict=True))
        keys = sorted(past + 1 for _, past in pieces[:decodes]) or [0]
        pairs = sum(new * past + new * (new + 1) // 2 for new, past in pieces[decodes:])
        tokens = sum(new for new, _ in pieces[decodes:])
        began = between_s(watch.steps[0].began, step.began)
        took = between_s(step.began, step.ended)
        long, longest = keys[len(keys) * 9 // 10], keys[-1]
        samples = len(plan.sample_keys)
        rows.append([decodes, sum(keys), longest, long, tokens, pairs, samples, pages, began, took])
    return rows


def values_of(name: str, run: EngineRun) -> dict[str, Value]:
    firsts = [each.first_s for each in run.latencies if each.first_s is not None]
    later = run.per_output_token
    assert later is not None, "requests have several tokens"
    p50, p90, p99 = np.percentile(firsts, (50, 90, 99)).tolist()
    figures = {
        "first_token_mean": float(np.mean(firsts)),
        "first_token_p50": p50,
        "first_token_p90": p90,
        "first_token_p99": p99,
        "per_output_token_p50": later.p50,
        "per_output_token_p99": later.p99,
        "wall": run.wall_s,
        "setup": run.setup_s,
    }
    counts = {
        "output_tokens_per_s": (run.output_tokens_per_s, "token/s"),
        "steps": (float(run.num_steps), "1"),
        "mean_batch": (run.mean_batch, "1"),
        "peak_page_share": (run.peak_page_share, "1"),
        "hit_tokens": (float(run.hit_tokens), "token"),
        "preemptions": (float(run.num_preemptions), "1"),
        "not_finished": (float(len(run.not_finished)), "1"),
    }
    values = {f"{name}: {key}": Value(value, "s") for key, value in figures.items()}
    return values | {f"{name}: {key}": Value(*value) for key, value in counts.items()}


def shown(run: EngineRun) -> dict[str, float]:
    values = values_of("", run)
    names = ("first_token_mean", "first_token_p99", "per_output_token_p50", "wall", "setup")
    return {key: values[f": {key}"].value for key in names}


def judge(folder: Path) -> None:
    """What is simulated over what was measured, less one."""
    for record in own_records(folder):
        for row in judge_own(record, folder):
            print(row.words)


def say(text: str, **figures: float) -> None:
    print(text, *(f"{key} {value:.4g}" for key, value in figures.items()), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
