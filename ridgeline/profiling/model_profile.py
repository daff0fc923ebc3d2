"""A model's prefill and decode steps, timed, divided, and placed under the roofline.

The time of a step is taken first, without anything that slows it. Then a few steps are watched: by
the clock of scopes on a CPU, by torch.profiler on a GPU; that says how the time divides. What of it
is the host's, on a GPU, events around the timed steps say. Of several ranks the first is watched,
and its part of the work counted.

    subject = EngineSteps(engine)
    profile = profile_decode(subject, hardware, batch=1, context=1024, num_steps=30)
    profile.timing.median_s, profile.division.parts, profile.verdict.sentence
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from ridgeline.capture import no_garbage_collection
from ridgeline.engine.execution.step_watch import StepWatch, between_s
from ridgeline.engine.execution.work import cost_base, matrix_dtype
from ridgeline.formats.dtypes import parse_dtype
from ridgeline.hardware import Hardware
from ridgeline.kernels.cost import OpCost
from ridgeline.models.cost import Chunk, MeanStep, StepCost, step_cost
from ridgeline.profiling.op_costs import StepFacts, op_costs
from ridgeline.profiling.placing import PlacedOp, StepVerdict, judge_step, place
from ridgeline.profiling.predicting.prediction import Phase, PhaseTime
from ridgeline.profiling.predicting.situation import mean_work
from ridgeline.profiling.roofline import Limit, of_one_rank, step_limit
from ridgeline.profiling.tracing.device_division import by_events
from ridgeline.profiling.tracing.division import Division
from ridgeline.profiling.tracing.stepping import EngineSteps, ProfiledSteps, StepFunction
from ridgeline.profiling.tracing.watching import MOST_STEPS, WATCHED, watched
from ridgeline.timing import Timing, time_loop

WARM_UP = 4  # steps before any is timed: kernels compile, graphs are captured
WATCH_S = 2.0  # of watching on a CPU, where one pass over a prompt may take longer


@dataclass(frozen=True)
class StepProfile:
    phase: Phase
    label: str  # "decode, batch 1, context 1024"
    timing: Timing
    division: Division
    placed: tuple[PlacedOp, ...]  # longest first
    cost: StepCost  # of the step
    work: MeanStep
    limit: Limit | None
    verdict: StepVerdict
    num_tokens: float  # computed in the step
    documents: tuple[dict[str, Any], ...] = field(default=(), repr=False)  # traces, for a file

    @property
    def step_s(self) -> float:
        return self.timing.median_s

    @property
    def share_of_limit(self) -> float | None:
        return None if self.limit is None else self.limit.seconds / self.step_s

    def phase_time(self, num_steps: float) -> PhaseTime:
        """As predictions want it, for a workload with so many of these."""
        parts, kernels = self.division.parts, self.division.num_kernels
        return PhaseTime(self.phase, num_steps, self.step_s, self.work, parts, kernels)


def profile_decode(
    subject: ProfiledSteps,
    hardware: Hardware,
    *,
    batch: int = 1,
    context: int = 1024,
    num_steps: int = 30,
    with_trace: bool = True,
) -> StepProfile:
    planned = WARM_UP + num_steps + MOST_STEPS
    pieces = [[Chunk(1, context - 1)] * batch]
    with subject.decoding(batch, context, planned) as step:
        label = f"decode, batch {batch}, context {context}"
        return _profile(subject, hardware, "decode", label, step, pieces, num_steps, with_trace)


def profile_prefill(
    subject: ProfiledSteps,
    hardware: Hardware,
    *,
    batch: int = 1,
    length: int = 512,
    num_steps: int = 5,
    with_trace: bool = True,
) -> StepProfile:
    """Of `batch` prompts to their first token, in as many steps as that takes. Without a trace
    there may be none in `documents`, which on a CPU is for a file alone.
    """
    pieces = subject.pieces(batch, length)
    with subject.prefilling(batch, length) as run:
        label = f"prefill, {batch} x {length} tokens"
        if len(pieces) > 1:
            label += f" in {len(pieces)} steps"
        return _profile(subject, hardware, "prefill", label, run, pieces, num_steps, with_trace)


def profile_mixed(
    subject: EngineSteps,
    hardware: Hardware,
    *,
    batch: int,
    context: int,
    num_prompts: int,
    length: int,
    num_steps: int = 10,
    with_trace: bool = True,
) -> StepProfile:
    """Of steps in which prompts are taken to their first token beside sequences that decode."""
    planned = WARM_UP + num_steps + MOST_STEPS
    pieces = [[*[Chunk(1, context - 1)] * batch, *[Chunk(length, 0)] * num_prompts]]
    with subject.mixing(batch, context, num_prompts, length, planned) as step:
        label = f"{num_prompts} x {length} tokens of prompts beside {batch} rows of {context}"
        return _profile(subject, hardware, "prefill", label, step, pieces, num_steps, with_trace)


def _profile(
    subject: ProfiledSteps,
    hardware: Hardware,
    phase: Phase,
    label: str,
    step: StepFunction,
    pieces: Sequence[Sequence[Chunk]],
    num_steps: int,
    with_trace: bool,
) -> StepProfile:
    hardware = of_one_rank(hardware, subject.ranks_a_device)
    on_cpu = subject.device.type == "cpu"
    passes = 1 if on_cpu else 2  # over prompts, which may take seconds each
    for _ in range(WARM_UP if phase == "decode" else passes):
        step()
    gc.collect()
    with no_garbage_collection():  # it stays out of what is timed
        timing, device_s = _timed(subject, step, num_steps, len(pieces))
        count = max(1, min(WATCHED, int(WATCH_S / timing.median_s)))
        division, calls, documents = watched(
            subject, step, timing.median_s, count if on_cpu else WATCHED, with_trace
        )
    if device_s is not None:
        division = by_events(division, timing.median_s, device_s)
    cost = _cost(subject, hardware, phase, pieces)
    costs = op_costs(calls, _facts(subject, cost, pieces))
    placed = tuple(place(op, costs.get(op.name), timing.median_s, hardware) for op in division.ops)
    dtype = matrix_dtype(subject.model, subject.recipe)
    limit = step_limit(cost, hardware, dtype)
    verdict = _judged(phase, division, cost, timing.median_s, hardware, dtype)
    work = _mean(pieces)
    return StepProfile(
        phase, label, timing, division, placed, cost, work, limit, verdict, work.tokens, documents
    )


def _timed(
    subject: ProfiledSteps, step: StepFunction, num_steps: int, num_pieces: int
) -> tuple[Timing, float | None]:
    """Also for how long a GPU was at a step, all pieces of it together, by events around them."""
    watch = None if subject.device.type == "cpu" else StepWatch(subject.device)
    is_watched = watch is not None and subject.watched_by(watch)
    try:
        timing = time_loop(step, num_steps, device=subject.device)
    finally:
        subject.watched_by(None)
    if watch is None or not is_watched:
        return timing, None
    own_s = [between_s(each.began, each.ended) for each in watch.steps]
    passes = range(0, len(own_s), num_pieces)
    return timing, median(sum(own_s[first : first + num_pieces]) for first in passes)


def _cost(
    subject: ProfiledSteps, hardware: Hardware, phase: Phase, pieces: Sequence[Sequence[Chunk]]
) -> StepCost:
    """Of all steps of one pass: weights are read in each."""
    base = cost_base(subject.model, subject.recipe, hardware)
    sizes = {"weight_bytes": base.bytes_per_weight, "kv_bytes": base.bytes_per_kv}
    result = []
    for number, chunks in enumerate(pieces):
        last = number + 1 == len(pieces)
        rows = len(chunks) if phase == "decode" or last else 0
        result.append(step_cost(base.config, list(chunks), logit_rows=rows, **sizes))
    names = StepCost.__dataclass_fields__
    return StepCost(**{name: sum(getattr(each, name) for each in result) for name in names})


def _facts(subject: ProfiledSteps, cost: StepCost, pieces: Sequence[Sequence[Chunk]]) -> StepFacts:
    dtype = parse_dtype(subject.recipe.dtype)
    tokens = sum(chunk.new for chunks in pieces for chunk in chunks)
    return StepFacts(
        subject.model, dtype, subject.recipe.dtype, cost, subject.pages, tokens, subject.num_ranks
    )


def _judged(
    phase: Phase, division: Division, cost: StepCost, step_s: float, hardware: Hardware, dtype: str
) -> StepVerdict:
    whole = OpCost(cost.bytes, 0.0, cost.flops, dtype)
    read = hardware.ceiling("read_bandwidth") or hardware.ceiling("memory_bandwidth")
    rate = hardware.ceiling(f"matrix_{dtype}")
    memory = None if read is None else whole.bytes / step_s / read.value
    matrix = None if rate is None else whole.flops / step_s / rate.value
    return judge_step(phase, division, memory, matrix)


def _mean(pieces: Sequence[Sequence[Chunk]]) -> MeanStep:
    """All steps of a pass as one: what it computes, and which keys it reads."""
    works = [mean_work(list(chunks)) for chunks in pieces]
    names = ("rows", "tokens", "logit_rows", "pairs", "keys")
    return MeanStep(*(sum(getattr(work, name) for work in works) for name in names))
