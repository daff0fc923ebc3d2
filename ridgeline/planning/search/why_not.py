"""Why not otherwise? The questions that a plan raises (no pipeline? another `tensor`? nothing
computed again?), each answered by a search of its own: what the best such setting costs, or what of
it does not fit and the smallest change, planned again, with which it would.

    for each in why_nots(result, pool, fitted): print(each.question, each.reason, each.remedy)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

from ridgeline.errors import RidgelineError
from ridgeline.hardware.units import human, human_bytes
from ridgeline.models.training_cost import LEVELS
from ridgeline.parallel.bubbles import fits_pipeline
from ridgeline.parallel.degrees import can_share
from ridgeline.parallel.layout import Layout
from ridgeline.planning.clusters.cluster import GpuPool
from ridgeline.planning.memory.ledger import StepLedger, heaviest_of, least_bytes, usable_bytes
from ridgeline.planning.search.best import Plan, SearchResult, milder
from ridgeline.planning.search.space import Core
from ridgeline.planning.training.constants import Fitted
from ridgeline.planning.training.setup import TrainSetup
from ridgeline.planning.training.step import StepEstimate, estimate_step

MOST_LEDGERS = 40  # a question
MOST_ESTIMATES = 8
LARGE = 0.01  # of a step, from which on a part is named
Asks = Callable[[TrainSetup], bool]
Found = tuple[StepEstimate, TrainSetup]


@dataclass(frozen=True)
class WhyNot:
    question: str  # "no pipeline"
    setup: TrainSetup  # the best such setting that fits, or the smallest, which does not
    slower: float | None  # 0.1: its step takes 10% longer; None: it does not fit
    reason: str
    remedy: str  # the smallest change with which it fits; "" where it does


def why_nots(result: SearchResult, pool: GpuPool, fitted: Fitted) -> tuple[WhyNot, ...]:
    if not result.plans:
        return ()
    best = result.plans[0]
    answers = (
        _answer(question, asks, result, best, pool, fitted)
        for question, asks in _questions(best.setup)
    )
    return tuple(each for each in answers if each is not None)


def _questions(best: TrainSetup) -> Iterator[tuple[str, Asks]]:
    layout = best.layout
    if layout.pipeline > 1:
        yield "no pipeline", lambda setup: setup.layout.pipeline == 1
        for other in (layout.pipeline // 2, layout.pipeline * 2):
            if other > 1:
                yield f"pipeline={other}", _is("pipeline", other)
    else:
        yield "a pipeline", lambda setup: setup.layout.pipeline > 1
    for tensor in (1, 2, 4, 8):
        if tensor != layout.tensor:
            yield f"tensor={tensor}", _is("tensor", tensor)
    if layout.pipeline > 1:
        for schedule in ("1f1b", "interleaved", "zero-bubble"):
            if schedule != layout.schedule:
                yield f"schedule={schedule}", _is("schedule", schedule)
    lighter = LEVELS[: LEVELS.index(best.recomputation)]
    if lighter:
        yield (
            f"less recomputation than {best.recomputation}",
            lambda setup: setup.recomputation in lighter,
        )
    yield f"a micro-batch of {2 * best.micro}", lambda setup: setup.micro == 2 * best.micro
    if layout.context == 1:
        yield "sequences cut over ranks", lambda setup: setup.layout.context > 1
    if layout.expert > 1:
        yield "experts whole on each rank", _is("expert", 1)


def _is(axis: str, value: object) -> Asks:
    return lambda setup: getattr(setup.layout, axis) == value


def _answer(
    question: str, asks: Asks, result: SearchResult, best: Plan, pool: GpuPool, fitted: Fitted
) -> WhyNot | None:
    """None: no legal setting is such a one."""
    cores = [(bound, core) for bound, core in result.cores if asks(core.setup)]
    if not cores:
        return None
    known = [(estimate, setup) for estimate, setup in result.fitting if asks(setup)]
    best_known = min(known, key=lambda each: each[0].step_s, default=None)
    fastest = _best_of(cores, best_known, pool, fitted)
    if fastest is not None:
        estimate, setup = fastest
        slower = estimate.step_s / best.estimate.step_s - 1
        return WhyNot(question, setup, slower, _grown(estimate, best.estimate), "")
    least = smallest([core for _, core in cores])
    ledger, free = heaviest_of(least), usable_bytes(pool)
    return WhyNot(question, least, None, shortage(ledger, free), _remedy(least, pool))


def _best_of(
    cores: list[tuple[float, Core]], best: Found | None, pool: GpuPool, fitted: Fitted
) -> Found | None:
    """Of those that fit, in the order of their bounds; the smallest is tried in any case."""
    free = usable_bytes(pool)
    ledgers = estimates = 0
    for bound, core in cores:
        if best is not None and bound >= best[0].step_s:
            return best
        if least_bytes(core.setup) > free:
            continue
        for setup in core.splits():
            ledgers += 1
            if heaviest_of(setup).peak_bytes > free:
                break
            estimates += 1
            best = _faster(best, (estimate_step(setup, pool, fitted), setup))
        if ledgers >= MOST_LEDGERS or estimates >= MOST_ESTIMATES:
            break
    least = smallest([core for _, core in cores])
    if best is None and heaviest_of(least).peak_bytes <= free:
        best = estimate_step(least, pool, fitted), least
    return best


def _faster(best: Found | None, other: Found) -> Found:
    return other if best is None or other[0].step_s < best[0].step_s else best


def smallest(cores: list[Core]) -> TrainSetup:
    """With most recomputation, the smallest passes, and weights cut over all copies."""
    core = min(
        cores,
        key=lambda core: (
            core.setup.micro_tokens,
            -LEVELS.index(core.setup.recomputation),
            -core.setup.layout.tensor * core.setup.layout.pipeline,
            core.setup.layout.schedule != "1f1b",
        ),
    )
    return next(core.splits())


def _grown(estimate: StepEstimate, best: StepEstimate) -> str:
    """Which parts make it slower."""
    longer = {name: value - best.parts[name] for name, value in estimate.parts.items()}
    shown = sorted(longer.items(), key=lambda part: -part[1])[:2]
    words = [
        f"{human(value, 's')} more of {name}"
        for name, value in shown
        if value > LARGE * best.step_s
    ]
    return ", ".join(words) or "much the same in every part"


def shortage(ledger: StepLedger, free: int) -> str:
    """`needs 93.1 GiB of 73.0, 44.6 GiB of it activations`."""
    heaviest = ledger.heaviest
    largest = max(heaviest.items, key=lambda item: item.num_bytes)
    where = f" on device {heaviest.device} of the pipeline" if len(ledger.stages) > 1 else ""
    return (
        f"needs {human_bytes(heaviest.num_bytes)} of {human_bytes(free)}{where}, "
        f"{human_bytes(largest.num_bytes)} of it {largest.name}"
    )


def _remedy(setup: TrainSetup, pool: GpuPool) -> str:
    """The smallest change that was planned again and fits: of the setting, of another axis, of the
    number of GPUs.
    """
    free = usable_bytes(pool)
    for words, changed in chain(milder(setup), _other_axes(setup, pool)):
        try:
            if heaviest_of(changed).peak_bytes <= free:
                return words
        except RidgelineError:
            continue
    return "nothing up to 64 devices a copy helps"


def more_gpus(setup: TrainSetup, pool: GpuPool) -> int | None:
    """So many times two that it fits, with each copy's weights cut over all of them: as it is, or
    without a pipeline, whose stages stay whole. None: never.
    """
    fitting = (n for n in (16, 8, 4, 2, 1) if n <= pool.node.domain and can_share(setup.model, n))
    tensor = next(fitting)
    for factor in (2, 4, 8, 16, 32, 64, 128, 256):
        size = setup.layout.size * factor
        longer = replace(setup.layout, shard=setup.layout.shard * factor)
        for layout in (longer, Layout(tensor=tensor, shard=max(1, size // tensor))):
            own = replace(setup, layout=layout, batch=setup.batch * factor)
            if layout.size == size and heaviest_of(own).peak_bytes <= usable_bytes(pool):
                return size
    return None


def _other_axes(setup: TrainSetup, pool: GpuPool) -> Iterator[tuple[str, TrainSetup]]:
    """More ranks to a copy of the model, so that each has less of it; as many GPUs."""
    layout, copies = setup.layout, setup.layout.replicate * setup.layout.shard
    for factor in (2, 4, 8, 16, 32):
        if copies % factor:
            return
        for axis in ("tensor", "pipeline"):
            size = getattr(layout, axis) * factor
            if axis == "tensor" and (size > pool.domain or not can_share(setup.model, size)):
                continue
            changed = replace(layout, shard=copies // factor, replicate=1, **{axis: size})
            own = replace(setup, layout=changed)
            if axis == "pipeline" and (
                size > setup.model.num_layers or not fits_pipeline(changed, own.num_micro)
            ):
                continue
            yield f"{axis}={size}", own
