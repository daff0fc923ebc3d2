"""The section of a climb of training on what is learned: losses over paired seeds."""

from __future__ import annotations

from ridgeline.ladder.outcome import PairedLosses, RungOutcome
from ridgeline.ladder.reporting.result import Climb
from ridgeline.profiling.drawing import (
    Column,
    Interval,
    Markup,
    Section,
    Series,
    element,
    intervals,
    join,
    table,
    timeline,
    times,
)

NONE_ALTERS = (
    "No change that was faster alters what is learned, so no losses were compared: every change "
    "that was kept was held to the loss and the gradient norm of the same batch."
)


def losses_section(climb: Climb) -> Section:
    rungs = [(rung, rung.losses) for rung in climb.rungs if rung.losses is not None]
    if not rungs:
        return Section("quality", "What is learned", element("p", NONE_ALTERS, class_="soft"))
    first = rungs[0][1]
    intro = (
        f"Runs of {first.num_steps} steps from the same weights over the same data in the same "
        f"order, with {first.num_seeds} seeds, by the defaults and with the change. Compared is "
        "the mean of the last quarter of a run. Time to an equal loss counts steps and their "
        "seconds to the loss that both reach."
    )
    rows = [
        Interval(
            rung.title, paired.increase, paired.low, paired.high, rung.status,
            paired.problem is not None,
        )
        for rung, paired in rungs
    ]  # fmt: skip
    figure = intervals(rows, "Increase of the loss", read=_share, bound=first.bound)
    curves = [_curves(rung.title, paired) for rung, paired in rungs if paired.before]
    return Section("quality", "What is learned", join([figure, _times(rungs), *curves]), intro)


def _share(value: float) -> str:
    text = f"{100 * value:+.2g}%" if value else "0%"
    return text.replace("-", "−")


def _times(rungs: list[tuple[RungOutcome, PairedLosses]]) -> Markup:
    rows: list[list[Markup | str]] = [
        [
            rung.title,
            "" if rung.achieved is None else times(rung.achieved.value),
            "not known: it did not fall" if paired.equal_loss_gain is None
            else times(paired.equal_loss_gain),
            paired.problem or "inside the bound",
        ]
        for rung, paired in rungs
    ]  # fmt: skip
    columns = (
        Column("change"), Column("speed of a step", is_number=True),
        Column("to an equal loss, over the defaults", is_number=True), Column("bound"),
    )  # fmt: skip
    return table(columns, rows, "Time to an equal loss")


def _curves(title: str, paired: PairedLosses) -> Markup:
    series = [
        Series(name, tuple(enumerate(losses, 1)), series=number)
        for number, (name, losses) in enumerate(
            (("the defaults", paired.before), ("with it", paired.after))
        )
    ]
    return timeline(series, f"Loss, {title}", "step", "nats a token, mean of the seeds")
