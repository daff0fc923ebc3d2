"""The ladder of an answer, told from the plain loop: the fused loss, fused norms, bf16, attention,
and then what was chosen for this machine, each against the one before, in short rounds and in the
time that is left. What there is no time for is predicted, or says so.

    steps = ladder_to(answer)
    explained(climber, steps, budget)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from ridgeline.ladder.outcome import RungOutcome, Speedup
from ridgeline.ladder.training.climb import FAILURES, TrainClimber
from ridgeline.ladder.training.forms import TrainForm
from ridgeline.ladder.training.predicted import predicted_gain
from ridgeline.ladder.training.rungs import LEVEL_WORDS, computes_in_bf16, with_micro
from ridgeline.ladder.training.telling.words import changed_fields, in_words, one_line
from ridgeline.profiling.predicting.prediction import Area
from ridgeline.training.config import TrainConfig

ROUNDS = 3  # that explain; what is kept was measured in more


@dataclass(frozen=True)
class TrainLadderStep:
    name: str
    area: Area
    title: str
    form: TrainForm


def ladder_to(answer: TrainConfig, fits_whole: bool = True) -> list[TrainLadderStep]:
    """From the plain loop, which comes first, to the answer. It takes one sequence at a time, keeps
    everything (or, where that does not fit, what the answer keeps) and computes in fp32.
    """
    recomputation = "none" if fits_whole else answer.recomputation
    base = replace(
        with_micro(answer, 1), precision="fp32", recomputation=recomputation,
        fp8_weight_gradients="fp8", compile=False, graphs=False,
    )  # fmt: skip
    steps = [
        TrainLadderStep("plain", "fuse", "the plain loop", TrainForm(base, "plain")),
        TrainLadderStep("fused-loss", "fuse", "fused loss", TrainForm(base, "fused loss")),
        TrainLadderStep(
            "fused-ops", "fuse", "fused norms, activations, rotations and AdamW",
            TrainForm(base, plain_attention=True),
        ),
    ]  # fmt: skip
    if computes_in_bf16(answer):
        precision = "bf16" if answer.precision.startswith("fp8") else answer.precision
        base = replace(base, precision=precision)
        form = TrainForm(base, plain_attention=True)
        steps.append(TrainLadderStep("bf16", "tensor cores", f"compute in {precision}", form))
    elif answer.precision != "fp32":
        base = replace(base, precision=answer.precision)
        form, title = TrainForm(base, plain_attention=True), f"compute in {answer.precision}"
        steps.append(TrainLadderStep(answer.precision, "tensor cores", title, form))
    attention = "attention without its scores in memory"
    steps.append(TrainLadderStep("attention", "custom kernels", attention, TrainForm(base)))
    steps += _chosen(base, answer)
    return steps


def _chosen(base: TrainConfig, answer: TrainConfig) -> list[TrainLadderStep]:
    """What was chosen for the machine."""
    steps = []
    wider = replace(base, batch=answer.batch, recomputation=answer.recomputation)
    if wider != base:
        again = (
            "" if base.recomputation == answer.recomputation else LEVEL_WORDS[answer.recomputation]
        )
        title = f"micro-batch of {answer.batch.micro}" + (f", {again}" if again else "")
        steps.append(TrainLadderStep("micro-batch", "batch and memory", title, TrainForm(wider)))
    captured = replace(wider, graphs=answer.graphs)
    if captured != wider:
        title = "passes as CUDA graphs"
        steps.append(TrainLadderStep("graphs", "overhead", title, TrainForm(captured)))
    compiled = replace(captured, compile=answer.compile)
    if compiled != captured:
        title = "norms and activations by torch.compile"
        steps.append(TrainLadderStep("compile", "fuse", title, TrainForm(compiled)))
    if answer != compiled:
        title = f"products in {answer.precision}"
        steps.append(TrainLadderStep(answer.precision, "quantize", title, TrainForm(answer)))
    return steps


def measured_plain(climber: TrainClimber, steps: list[TrainLadderStep]) -> Speedup | None:
    """The answer over the plain loop, in a few short rounds; None where there is no time for it."""
    comparing, plain, answer = climber.comparing, steps[0].form, TrainForm(climber.best)
    if climber.is_stopped or comparing.expected_s(plain, answer, ROUNDS) > climber.budget.rest_s:
        return None
    try:
        return comparing.compare(plain, answer, ROUNDS, firm=True).speedup
    except FAILURES as error:
        climber.notes.append(f"the plain loop could not be measured: {one_line(error)}")
    return None


def explained(climber: TrainClimber, steps: list[TrainLadderStep]) -> list[RungOutcome]:
    """Outcomes of all steps behind the first; Ctrl-C ends the measuring, not the telling."""
    outcomes, problem = [], "the climb was stopped" if climber.is_stopped else None
    for before, step in pairwise(steps):
        outcome = _step(climber, before, step, problem)
        if climber.is_stopped and problem is None:
            problem = "the climb was stopped"
        outcomes.append(outcome)
    return outcomes


def _step(
    climber: TrainClimber, before: TrainLadderStep, step: TrainLadderStep, problem: str | None
) -> RungOutcome:
    job, comparing = climber.job, climber.comparing
    predicted = None
    if before.form.loop == step.form.loop == "train":
        predicted = predicted_gain(
            job.step_s, before.form.config, step.form.config, step.area, job.hardware.name
        )
    edit = changed_fields(before.form.config, step.form.config)
    achieved = None
    began = climber.budget.used_s
    if problem is None:
        expected_s = comparing.expected_s(before.form, step.form, ROUNDS)
        problem = "no time was left" if expected_s > climber.budget.rest_s else None
    if problem is None:
        try:
            achieved = comparing.compare(before.form, step.form, ROUNDS, firm=True).speedup
        except KeyboardInterrupt:
            climber.is_stopped, problem = True, "the climb was stopped"
        except FAILURES as error:
            problem = one_line(error)
    reason = f"not measured: {problem}" if achieved is None else in_words(achieved)
    return RungOutcome(
        step.name, step.area, step.title, edit, "kept", reason, predicted, achieved,
        seconds=climber.budget.used_s - began,
    )  # fmt: skip
