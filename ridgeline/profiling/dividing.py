"""How the steps of a workload divide, for little: a few steps of the same size, run once more and
watched, between rounds that are measured. What was wanted of them are shares; the time of a step
stays what the workload's own steps took.

    result = divided(EngineSteps(engine), phases)
    result.phases[1].division["gaps"], result.slowed
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from ridgeline.errors import RidgelineError
from ridgeline.profiling.predicting.prediction import PhaseTime
from ridgeline.profiling.tracing.device_division import by_events
from ridgeline.profiling.tracing.division import Division
from ridgeline.profiling.tracing.stepping import ProfiledSteps, StepFunction
from ridgeline.profiling.tracing.watching import watched
from ridgeline.timing import time_loop

log = logging.getLogger(__name__)

SECONDS = 2.0  # for all phases, about
WARM_UP, MOST = 2, 4  # steps of one kind: before any counts, and that are timed or watched at once
TRIES, SAME = 3, 1.05  # to find steps as quick behind watching as before, within so much
MOST_RUN = WARM_UP + (3 + TRIES) * MOST + 2  # timed, watched, once more in other ways, timed again
WORTH = 0.02  # of the workload's time: a shorter phase stays as it is


@dataclass(frozen=True)
class Divided:
    phases: tuple[PhaseTime, ...]
    slowed: float = 1.0  # a step behind watching, in those before it: 1 where nothing is left of it


def divided(
    subject: ProfiledSteps, phases: Sequence[PhaseTime], seconds: float = SECONDS
) -> Divided:
    """A phase that cannot be run so stays as it was: memory or the context is too short, say."""
    total = sum(phase.num_steps * phase.step_s for phase in phases)
    result, slowed = [], 1.0
    for phase in phases:
        if phase.num_steps * phase.step_s < WORTH * total:
            result.append(phase)
            continue
        try:
            phase, ratio = _one(subject, phase, seconds / len(phases))
            slowed = max(slowed, ratio)
        except (RidgelineError, RuntimeError) as error:
            log.warning("%s steps are not divided: %s", phase.phase, error)
        result.append(phase)
    return Divided(tuple(result), slowed)


def _one(subject: ProfiledSteps, phase: PhaseTime, seconds: float) -> tuple[PhaseTime, float]:
    on_cpu = subject.device.type == "cpu"
    with _steps_like(subject, phase) as (step, num_pieces):
        took_s = _warm(step, 1 if on_cpu else WARM_UP)
        count = max(1 if on_cpu else 2, min(MOST, int(seconds / (4 * took_s))))
        if on_cpu:  # the clock that divides says how long they took
            division, _, _ = watched(subject, step, took_s, count, with_trace=False)
            slowed = 1.0
        else:
            before = time_loop(step, count, device=subject.device)
            began = time.perf_counter()
            division, _, _ = watched(subject, step, before.median_s, count)
            watched_s = time.perf_counter() - began
            slowed = _slowed(subject, step, count, before.min_s)
            steps = f"{count} {phase.phase} steps of {1e3 * before.median_s:.1f} ms"
            log.info("%s were watched in %.1f s", steps, watched_s)
    fitted = _fitted(division, num_pieces, phase, on_cpu)
    kernels = division.num_kernels / num_pieces
    return replace(phase, division=fitted.parts, num_kernels=kernels), slowed


def _warm(step: StepFunction, num_steps: int) -> float:
    """What the last of them took."""
    for _ in range(num_steps):
        began = time.perf_counter()
        step()
    return max(time.perf_counter() - began, 1e-6)


def _slowed(subject: ProfiledSteps, step: StepFunction, count: int, before_s: float) -> float:
    """A GPU's tracer may leave something behind. What seems slower is timed again: a busy moment
    of the host is over then.
    """
    least_s = float("inf")
    for _ in range(TRIES):
        least_s = min(least_s, time_loop(step, count, device=subject.device).min_s)
        if least_s <= SAME * before_s:
            break
    return least_s / before_s


@contextmanager
def _steps_like(subject: ProfiledSteps, phase: PhaseTime) -> Iterator[tuple[StepFunction, int]]:
    """Steps of the same size, and how many of the engine's one of them is."""
    work, batch = phase.work, max(1, round(phase.work.rows))
    if phase.phase == "decode":
        longest = subject.recipe.limits.filled().max_context
        context = max(round(work.keys / max(work.rows, 1.0)), MOST_RUN + 2)
        with subject.decoding(batch, min(context, longest), MOST_RUN) as step:
            yield step, 1
    else:
        length = max(1, round(work.tokens / batch))
        with subject.prefilling(batch, length) as run:
            yield run, len(subject.pieces(batch, length))


def _fitted(division: Division, num_pieces: int, phase: PhaseTime, on_cpu: bool) -> Division:
    """For a step of the workload. A GPU's kernels take what they take, however slow the host is in
    launching them: waiting is what differs.
    """
    one, step_s = division.scaled(division.total_s / num_pieces), phase.step_s
    if not on_cpu and phase.device_s is not None:
        return by_events(one, step_s, phase.device_s)
    if on_cpu or one.busy_s >= step_s:
        return one.scaled(step_s)
    waits = one.gaps_s + one.host_s
    gaps = one.gaps_s / waits if waits > 0 else 1.0
    left = step_s - one.busy_s
    return replace(one, step_s=step_s, gaps_s=left * gaps, host_s=left * (1.0 - gaps))
