"""A whole run of a workload, divided: by kind of step, and by op within each kind; what of it is
lost beside the limit, the largest loss first, and what would mend it.

The run itself is not slowed: it is watched by marks at the ends of its steps alone. Then a step of
each kind, as it was in the mean, is repeated and divided, and its parts are scaled to the time that
the device was at work in all steps of that kind. How long it stood idle is the run's own.

    kinds = divided_kinds(subject, kinds_of(watch, ...), hardware, num_steps=20)
    losses(kinds, what_next(situation))[0].what             # "layers.*.mlp.down"
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ridgeline.errors import RidgelineError
from ridgeline.hardware import Hardware
from ridgeline.profiling.model_profile import (
    StepProfile,
    profile_decode,
    profile_mixed,
    profile_prefill,
)
from ridgeline.profiling.placing import Verdict
from ridgeline.profiling.predicting.next_steps import Advice
from ridgeline.profiling.predicting.prediction import Phase, PhaseTime
from ridgeline.profiling.predicting.situation import mean_plan
from ridgeline.profiling.step_kinds import StepKind
from ridgeline.profiling.tracing.stepping import EngineSteps
from ridgeline.progress import Progress

DIVIDED_SHARE = 0.98  # of the steps' time: kinds beyond that are not divided
MOST_DIVIDED = 8  # kinds
PAST_SHARE = 0.1  # of what prompts read, from earlier pieces: more is said
APART = 0.25  # between a step of the run and the one that stands for it: more is said
GAPS, IDLE, COPIES = "gaps", "device idle", "copies"
EDITS = {  # what changes each part of a step, and its head
    "matrices": ("scheme", "copies", "dtype"),
    "head": ("head", "dtype"),
    "attention": ("kv.dtype",),
    "gaps": ("graphs", "kernels"),
    "host": ("overlap", "graphs"),
}
MORE_ROWS = "more rows a step"
GRAPHS = "a fuller batch, whose steps are graphs, or --max-graph-batch"
TUNE = "a better kernel: `ridgeline kernels tune`"


@dataclass(frozen=True)
class DividedOp:
    """An op in all steps of a kind."""

    name: str
    part: str
    seconds: float
    least_s: float  # of that, at the ceiling it is nearer to
    share_of_ceiling: float | None
    verdict: Verdict


@dataclass(frozen=True)
class DividedKind:
    kind: StepKind
    typical: StepProfile | None  # a step as they were in the mean; None: not divided
    why_not: str = ""
    notes: tuple[str, ...] = ()

    @property
    def scale(self) -> float:
        """From a step that stands for the kind to all steps of the kind."""
        if self.typical is None:
            return 0.0
        division = self.typical.division
        at_work_s = division.busy_s + division.gaps_s
        return self.kind.device_s / at_work_s if at_work_s > 0 else 0.0

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of the run; they add up to the kind's. Empty where it was not divided."""
        if self.typical is None:
            return {}
        scaled = {name: s * self.scale for name, s in self.typical.division.parts.items()}
        return scaled | {"host": self.kind.idle_s}

    @property
    def ops(self) -> list[DividedOp]:
        """The longest first."""
        if self.typical is None:
            return []
        result = []
        for placed in self.typical.placed:
            share, seconds = placed.share_of_ceiling, placed.op.seconds * self.scale
            least_s = seconds * min(1.0, share or 0.0)
            part = placed.op.part
            result.append(DividedOp(placed.op.name, part, seconds, least_s, share, placed.verdict))
        return result


@dataclass(frozen=True)
class Loss:
    """Time of the run beyond what the ceilings allow."""

    where: str  # the kind of step
    what: str  # an op, or a kind of waiting
    part: str
    seconds: float
    least_s: float
    verdict: Verdict
    mend: str

    @property
    def lost_s(self) -> float:
        return self.seconds - self.least_s


def divided_kinds(
    subject: EngineSteps,
    kinds: Sequence[StepKind],
    hardware: Hardware,
    num_steps: int,
    progress: Progress,
) -> list[DividedKind]:
    total_s, covered_s = sum(kind.seconds for kind in kinds), 0.0
    result = []
    for number, kind in enumerate(kinds):
        progress("profiling kinds of steps", number, len(kinds))
        if covered_s >= DIVIDED_SHARE * total_s or number >= MOST_DIVIDED:
            result.append(DividedKind(kind, None, "too little of the run"))
            continue
        covered_s += kind.seconds
        try:
            result.append(_divided(subject, kind, hardware, num_steps))
        except RidgelineError as error:  # it does not fit beside nothing, as it did in the run
            result.append(DividedKind(kind, None, str(error)))
    progress("profiling kinds of steps", len(kinds), len(kinds))
    return result


def _divided(
    subject: EngineSteps, kind: StepKind, hardware: Hardware, num_steps: int
) -> DividedKind:
    typical = typical_step(subject, kind, hardware, num_steps)
    notes = []
    if kind.past_share > PAST_SHARE:
        notes.append(
            f"{kind.label}: {kind.past_share:.0%} of what prompts read is of earlier pieces or "
            "prefixes, which the step that was divided does not have"
        )
    division = typical.division
    alone_s, mean_s = division.busy_s + division.gaps_s, kind.device_s / len(kind.plans)
    if abs(mean_s / alone_s - 1.0) > APART:
        notes.append(
            f"{kind.label}: a step took {mean_s / alone_s:.2f} times as long in the run as when it "
            "was repeated alone; its parts are scaled"
        )
    return DividedKind(kind, typical, notes=tuple(notes))


def typical_step(
    subject: EngineSteps, kind: StepKind, hardware: Hardware, num_steps: int
) -> StepProfile:
    """One with the rows, the context and the prompts that steps of this kind had in the mean."""
    longest = subject.recipe.limits.filled().max_context
    rows, pieces = (max(1, round(n)) for n in (kind.mean_decode_rows, kind.mean_prompt_pieces))
    context = min(longest, max(2, round(kind.mean_context)))
    length = max(1, round(kind.mean_prompt_tokens))
    if kind.name == "decode":
        return profile_decode(
            subject, hardware, batch=rows, context=context, num_steps=num_steps, with_trace=False
        )
    few = max(3, num_steps // 4)
    if kind.name == "prompts":
        return profile_prefill(
            subject, hardware, batch=pieces, length=length, num_steps=few, with_trace=False
        )
    room = subject.engine.scheduler.token_budget - rows  # rounding may have gone beyond it
    return profile_mixed(
        subject, hardware, batch=rows, context=context, num_prompts=pieces,
        length=max(1, min(length, room // pieces)), num_steps=few, with_trace=False,
    )  # fmt: skip


def phases_of_kinds(kinds: Sequence[DividedKind]) -> list[PhaseTime]:
    """As predictions want it: steps with prompts, and all others."""
    result = list[PhaseTime]()
    for phase in ("prefill", "decode"):
        mine = [each for each in kinds if (each.kind.name == "decode") == (phase == "decode")]
        result += [_phase(phase, mine)] if mine else []
    return result


def _phase(phase: Phase, kinds: Sequence[DividedKind]) -> PhaseTime:
    """Parts of kinds that were not divided are those of the others."""
    num_steps = sum(len(each.kind.plans) for each in kinds)
    device_s = sum(each.kind.device_s for each in kinds)
    total_s = sum(each.kind.seconds for each in kinds)
    known = [each for each in kinds if each.typical is not None]
    parts: dict[str, float] = {}
    for each in known:
        for name, seconds in each.parts.items():
            parts[name] = parts.get(name, 0.0) + seconds
    known_s = sum(parts.values())
    division = {name: s / known_s * total_s / num_steps for name, s in parts.items()}
    launched = [
        (each.typical.division.num_kernels, len(each.kind.plans))
        for each in known
        if each.typical is not None
    ]
    counted = sum(steps for _, steps in launched)
    plans = [plan for each in kinds for plan in each.kind.plans]
    return PhaseTime(
        phase,
        num_steps,
        total_s / num_steps,
        mean_plan(plans),
        division,
        sum(kernels * steps for kernels, steps in launched) / counted if counted else None,
        device_s / num_steps,
    )


def losses(kinds: Sequence[DividedKind], advice: Sequence[Advice], *, on_cpu: bool) -> list[Loss]:
    """The largest first; waiting is lost as a whole."""
    result = []
    for each in kinds:
        where, parts = each.kind.label, each.parts
        for op in each.ops:
            mend = mend_of(op.name, op.part, op.verdict, advice, on_cpu)
            result.append(Loss(where, op.name, op.part, op.seconds, op.least_s, op.verdict, mend))
        waits: tuple[tuple[str, str, float, Verdict], ...] = (
            (IDLE, "host", each.kind.idle_s, "host"),
            (GAPS, "gaps", parts.get("gaps", 0.0), "overhead"),
            (COPIES, "copies", parts.get("copies", 0.0), "memory"),
        )
        for what, part, seconds, verdict in waits:
            mend = mend_of(what, part, verdict, advice, on_cpu)
            result.append(Loss(where, what, part, seconds, 0.0, verdict, mend))
    return sorted((loss for loss in result if loss.lost_s > 0), key=lambda loss: -loss.lost_s)


def mend_of(name: str, part: str, verdict: Verdict, advice: Sequence[Advice], on_cpu: bool) -> str:
    """The change that is expected to give the most of those that touch this part; where none is
    expected to pay, what is left.
    """
    edits = EDITS.get("head" if name == "head" else part, ())
    for each in advice:  # the best first
        if each.flags and any(edit in edits for edit in each.edit):
            return f"{each.flags} ({each.prediction.speedup:.2f}x in all)"
    if part == "gaps" and not on_cpu:
        return GRAPHS
    if part in ("gaps", "host"):
        return MORE_ROWS
    if part == "copies":
        return "less that goes to the device and back: drafts, grammars, log-probabilities"
    if part == "communication":
        return "fewer ranks"
    if verdict == "overhead":
        return MORE_ROWS if on_cpu else f"{MORE_ROWS}, or {TUNE}"
    return "a better kernel: none is known here" if on_cpu else TUNE
