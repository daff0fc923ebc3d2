"""From what was measured to what predictions are made from: the kinds of steps that a workload had,
with their times and their work, and the model as it was run.

    watch = StepWatch(engine.runner.device); engine.runner.watch = watch; …
    situation = situation_of(engine, hardware, phases_of(watch.steps), concurrency=16.0)
    predict(situation, {"scheme": "int8"})
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple, Protocol

from ridgeline.engine.execution.step_watch import WatchedStep, between_s
from ridgeline.engine.execution.work import cost_base
from ridgeline.engine.scheduling.step_plan import StepPlan
from ridgeline.hardware import Hardware
from ridgeline.models import Transformer
from ridgeline.models.cost import Chunk, MeanStep
from ridgeline.profiling.predicting.prediction import LoopName, Phase, PhaseTime, Situation
from ridgeline.recipe import Recipe


class ModelRun(Protocol):
    """What is asked of an engine: the model as it is run, and its recipe with nothing open."""

    @property
    def model(self) -> Transformer: ...

    @property
    def recipe(self) -> Recipe: ...


def situation_of(
    engine: ModelRun,
    hardware: Hardware,
    phases: Sequence[PhaseTime],
    *,
    loop: LoopName = "engine",
    concurrency: float = 1.0,
    prefix_share: float = 0.0,
) -> Situation:
    """`engine` may be anything with a model and a filled recipe, for the plain loop too."""
    base = cost_base(engine.model, engine.recipe, hardware)
    return Situation(
        base.config,
        engine.recipe,
        loop,
        hardware,
        base.bytes_per_weight,
        base.bytes_per_kv,
        tuple(phases),
        concurrency,
        prefix_share,
    )


def phases_of(steps: Sequence[WatchedStep]) -> tuple[PhaseTime, ...]:
    """Of an engine's steps, each from its beginning to the next one's. Steps with prompts are
    prefill steps, all others decode steps. On a GPU the device must be through with them.
    """
    spans: dict[Phase, list[_Span]] = {"prefill": [], "decode": []}
    for this, following in zip(steps, [*steps[1:], None], strict=True):
        end = this.ended if following is None else following.began
        whole_s, own_s = (max(0.0, between_s(this.began, to)) for to in (end, this.ended))
        spans[_kind(this.plan)].append(_Span(this.plan, whole_s, own_s))
    return tuple(
        PhaseTime(
            kind,
            len(result),
            fmean(span.seconds for span in result),
            mean_plan([span.plan for span in result]),
            device_s=fmean(min(span.seconds, span.device_s) for span in result),
        )
        for kind, result in spans.items()
        if result
    )


def chunks_of(plan: StepPlan) -> list[Chunk]:
    """What a step computed, sequence after sequence."""
    pairs = zip(plan.num_tokens, plan.first_positions, strict=True)
    return [Chunk(new, past) for new, past in pairs]


def mean_plan(plans: Sequence[StepPlan]) -> MeanStep:
    works = [mean_work(chunks_of(plan), len(plan.logit_tokens)) for plan in plans]
    names = ("rows", "tokens", "logit_rows", "pairs", "keys")
    return MeanStep(*(sum(getattr(w, name) for w in works) / len(works) for name in names))


def mean_work(chunks: Sequence[Chunk], logit_rows: int | None = None) -> MeanStep:
    """Of one step with these pieces of sequences."""
    pairs = sum(chunk.new * chunk.past + chunk.new * (chunk.new + 1) // 2 for chunk in chunks)
    rows, tokens = len(chunks), sum(chunk.new for chunk in chunks)
    keys = sum(chunk.total for chunk in chunks)
    return MeanStep(rows, tokens, rows if logit_rows is None else logit_rows, pairs, keys)


def _kind(plan: StepPlan) -> Phase:
    rows = plan.num_decode_rows + plan.num_draft_rows
    return "decode" if rows == len(plan.num_tokens) else "prefill"


class _Span(NamedTuple):
    """A step, until the next one begins."""

    plan: StepPlan
    seconds: float
    device_s: float  # until its own tokens
