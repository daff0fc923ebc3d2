"""Changes one after the other as a waterfall: each row begins where the kept ones before it ended,
and shows what was predicted beside what was achieved, with their intervals. Logarithmic, because
speedups multiply.

    waterfall([Step("weights in int8", "quantize", "kept", True, Rise(1.9, 1.6, 2.3),
                    Rise(2.05, 2.0, 2.1))])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ridgeline.profiling.drawing.markup import Markup, element, join
from ridgeline.profiling.drawing.plots import cell_axis, cell_chart, cell_grid, whisker
from ridgeline.profiling.drawing.scales import Scale, is_drawable, spanning

SYMBOLS = {
    "kept": "✓",
    "dropped": "×",
    "failed": "!",
    "not applicable": "–",
    "not reached": "…",
}
THICK = 9  # pixels of a bar
ALL_KEPT = "all kept, paired rounds"
REACH = 1.6  # times beyond the bars: further ends of intervals are cut off
APART = 6.5  # of a bar's middle from the row's


@dataclass(frozen=True)
class Rise:
    """How many times faster, with an interval."""

    value: float
    low: float
    high: float

    @property
    def is_drawable(self) -> bool:
        return is_drawable(self.value, self.low, self.high)

    def __str__(self) -> str:
        return f"{times(self.value)} ({self.ends})"

    @property
    def ends(self) -> str:
        return f"{end_of(self.low)} to {end_of(self.high)}"


@dataclass(frozen=True)
class WaterfallStep:
    title: str
    group: str  # small, above the title; "" for none
    outcome: str  # a word or two: "kept", "dropped"
    counts: bool  # whether what follows begins where this one ended
    predicted: Rise | None = None
    achieved: Rise | None = None
    detail: Markup | str = ""  # shown when the row is opened


def times(value: float) -> str:
    """1.9 is `1.90×`, 12.34 is `12.3×`, 1180.4 is `1,180×`."""
    if 1000 <= value < 1e7:
        return f"{value:,.0f}×"
    return f"{value:.3g}×" if value >= 10 else f"{value:.2f}×"


def end_of(value: float) -> str:
    """Of an interval."""
    return f"{value:.2f}" if value < 1000 else times(value).rstrip("×")


def waterfall(
    steps: Sequence[WaterfallStep], *, total: Rise | None = None, total_name: str = ALL_KEPT
) -> Markup:
    """A figure with a row for each step, those without figures included, and one for the total."""
    starts = waterfall_starts(steps)
    scale = waterfall_scale(steps, starts, total)
    ticks = scale.ticks()
    rows = [_row(step, start, scale, ticks) for step, start in zip(steps, starts, strict=True)]
    if total is not None:
        rows.append(_total(total, total_name, scale, ticks))
    head = element(
        "tr",
        element("th", "change", scope="col"),
        element("th", cell_axis(scale, ticks, _tick), scope="col", class_="chart"),
        element("th", "predicted", scope="col", class_="number"),
        element("th", "achieved", scope="col", class_="number"),
        element("th", "", scope="col"),
    )
    caption = element("caption", "Speed as a multiple of the beginning, change by change")
    table = element("table", caption, element("thead", head), element("tbody", *rows))
    return element("figure", _legend(steps), table, class_="chart-table waterfall")


def _tick(value: float) -> str:
    return f"{value:g}×"


def waterfall_starts(steps: Sequence[WaterfallStep]) -> list[float]:
    """Where each row begins: what the ones before it that count came to, those that were not
    measured by what is predicted of them.
    """
    result, reached = [], 1.0
    for step in steps:
        result.append(reached)
        rise = step.achieved or step.predicted
        if step.counts and rise is not None and rise.is_drawable:
            reached *= rise.value
    return result


def waterfall_scale(
    steps: Sequence[WaterfallStep], starts: Sequence[float], total: Rise | None
) -> Scale:
    """Over all bars. Intervals widen it by REACH at most: one that says little hides nothing."""
    values, ends = [1.0], [1.0]
    for step, start in zip(steps, starts, strict=True):
        for rise in (step.predicted, step.achieved):
            if rise is not None and rise.is_drawable:
                values.append(start * rise.value)
                ends += [start * rise.low, start * rise.high]
    if total is not None and total.is_drawable:
        values.append(total.value)
        ends += [total.low, total.high]
    low, high = min(values) / REACH, max(values) * REACH
    return spanning([*values, *(min(high, max(low, end)) for end in ends)], least=1.5, room=1.06)


def _row(step: WaterfallStep, start: float, scale: Scale, ticks: Sequence[float]) -> Markup:
    group = element("small", step.group, class_="group") if step.group else None
    if step.detail:
        title = element(
            "details", element("summary", step.title), element("div", step.detail, class_="detail")
        )
    else:
        title = element("span", step.title, class_="title")
    text = [f"{step.title}, {step.outcome}"]
    text += [f"predicted {step.predicted}"] if step.predicted else []
    text += [f"achieved {step.achieved}"] if step.achieved else []
    symbol = SYMBOLS.get(step.outcome, "·")
    look = step.outcome.replace(" ", "-")
    chart = cell_chart(_bars(step, start, scale, ticks), "; ".join(text))
    return element(
        "tr",
        element("th", group, title, scope="row"),
        element("td", chart, class_="chart"),
        _figures(step.predicted, "predicted"),
        _figures(step.achieved, "achieved"),
        element("td", element("span", symbol, aria_hidden="true"), " ", step.outcome,
                class_=f"outcome {look}"),
        class_=look,
    )  # fmt: skip


def _bars(step: WaterfallStep, start: float, scale: Scale, ticks: Sequence[float]) -> Markup:
    x = scale.percent(start)
    drawn = cell_grid(scale, ticks)
    drawn += element("line", class_="start", x1=x, x2=x, y1=0, y2="100%")
    if step.predicted is not None and step.predicted.is_drawable:
        drawn += _bar(step.predicted, start, scale, -APART, "predicted")
    if step.achieved is not None and step.achieved.is_drawable:
        drawn += _bar(step.achieved, start, scale, APART, "achieved" if step.counts else "lost")
    return drawn


def _bar(rise: Rise, start: float, scale: Scale, offset: float, look: str) -> Markup:
    """From where the row begins to where it leads, to the left for what is slower."""
    ends = sorted((scale.share(start), scale.share(start * rise.value)))
    square = element(
        "rect", class_=f"rise {look}", x=f"{100 * ends[0]:.2f}%", y="50%",
        width=f"{100 * (ends[1] - ends[0]):.2f}%", height=THICK, rx=1.5,
        transform=f"translate(0 {offset - THICK / 2})",
    )  # fmt: skip
    return square + whisker(scale, start * rise.low, start * rise.high, offset, look)


def _figures(rise: Rise | None, name: str) -> Markup:
    if rise is None:
        return element("td", "–", class_="number none", data_name=name)
    value, ends = element("b", times(rise.value)), element("small", rise.ends)
    return element("td", value, " ", ends, class_="number", data_name=name)


def _total(total: Rise, name: str, scale: Scale, ticks: Sequence[float]) -> Markup:
    drawn = cell_grid(scale, ticks)
    if total.is_drawable:
        drawn += _bar(total, 1.0, scale, 0, "total")
    return element(
        "tr",
        element("th", name, scope="row"),
        element("td", cell_chart(drawn, f"In all {total}"), class_="chart"),
        element("td", "", class_="number none"),
        _figures(total, "measured"),
        element("td", ""),
        class_="total",
    )


def _legend(steps: Sequence[WaterfallStep]) -> Markup:
    words = {"predicted": "predicted, with the interval expected"}
    if any(step.achieved for step in steps):
        words["achieved"] = "achieved, with its 95% interval"
    if any(step.achieved and not step.counts for step in steps):
        words["lost"] = "measured and not kept"
    items = []
    for look, text in words.items():
        square = element("rect", class_=f"rise {look}", x=1, y=2, width=20, height=THICK, rx=1.5)
        key = element("svg", square, class_="key wide", viewBox="0 0 22 13", aria_hidden="true")
        items.append(element("li", key, " ", text))
    return element("ul", join(items), class_="legend")
