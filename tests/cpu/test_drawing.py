"""Drawings: where things are placed, what is escaped, and whether the colours can be told apart."""

from __future__ import annotations

import base64
import hashlib
import math
import re
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from html_tree import Node, tree

from ridgeline.cli.tables.plots import roofline_plot
from ridgeline.hardware.units import human_bytes
from ridgeline.profiling.drawing import (
    PALETTE,
    Bar,
    BarPart,
    Column,
    Dot,
    Interval,
    Markup,
    Rise,
    Roofs,
    Section,
    Series,
    WaterfallStep,
    curves,
    element,
    intervals,
    page,
    roofline,
    stacked_bars,
    table,
    times,
    waterfall,
)
from ridgeline.profiling.drawing.labels import spread
from ridgeline.profiling.drawing.page import FOLDER
from ridgeline.profiling.drawing.scales import (
    Scale,
    decades,
    even_ticks,
    log_ticks,
    spanning,
)
from ridgeline.server.page.routes import FOLDER as SERVER_FOLDER

HOSTILE = """</script></style><img src=x onerror=alert(1)>"'&"""


def share(text: str) -> float:
    assert text.endswith("%")
    return float(text[:-1])


# Markup and scales.


def test_text_is_text_and_markup_is_markup() -> None:
    made = element("p", "a < b", element("b", HOSTILE), None, class_="x", title=HOSTILE)
    node = tree(made).one("p")
    assert node.attributes == {"class": "x", "title": HOSTILE}
    assert node.one("b").text == HOSTILE
    assert not tree(made).all("img")
    assert element("a", hidden=True, href=None, rel=False) == "<a hidden></a>"
    assert element("br") == "<br>"
    assert element("td", data_name="n") == '<td data-name="n"></td>'


def test_places() -> None:
    log = Scale(1.0, 100.0, is_log=True)
    assert log.percent(10.0) == "50%"
    assert [log.share(value) for value in (0.0, 0.5, 1.0, 100.0, 1e9)] == [0, 0, 0, 1, 1]
    assert Scale(0.0, 8.0).pixels(2.0, 200.0, 0.0) == 150.0


@pytest.mark.parametrize(
    ("low", "high"), [(0.9, 1.3), (0.71, 4.2), (1.0, 16.0), (3e-4, 2.0), (1e3, 1e9), (0.99, 1.01)]
)
def test_ticks_are_few_round_and_inside(low: float, high: float) -> None:
    for ticks in (log_ticks(low, high), even_ticks(low, high)):
        assert 2 <= len(ticks) <= 8, ticks
        assert ticks == sorted(set(ticks))
        assert low * 0.999 <= ticks[0]
        assert ticks[-1] <= high * 1.001
    assert decades(0.2, 3000.0) == [1.0, 10.0, 100.0, 1000.0]


def test_a_scale_over_nothing_usable() -> None:
    assert spanning([], least=2.0).high > 1.0
    found = spanning([0.0, -1.0, math.nan, math.inf, 5.0], least=2.0)
    assert found.low < 5.0 < found.high


# The waterfall.


def rises(figure: Node) -> list[tuple[str, float, float]]:
    """Kind, left and right of each bar, in percent."""
    found = []
    for bar in figure.one("tbody").all("rect", "rise"):
        left = share(bar.attributes["x"])
        right = left + share(bar.attributes["width"])
        found.append((bar.attributes["class"].split()[1], left, right))
    return found


def rise(value: float) -> Rise:
    return Rise(value, value * 0.9, value * 1.1)


STEPS = (
    WaterfallStep("one", "fuse", "kept", True, rise(2.0), rise(2.5)),
    WaterfallStep("two", "quantize", "dropped", False, rise(1.5), rise(0.5)),
    WaterfallStep("three", "quantize", "kept", True, rise(3.0), rise(2.0)),
    WaterfallStep("four", "batch", "failed", False, rise(1.2), None),
)


def test_each_bar_begins_where_the_kept_ones_ended() -> None:
    figure = tree(waterfall(STEPS, total=Rise(5.0, 4.9, 5.1)))
    one, kept, _, slower, three, kept_too, four, total = rises(figure)
    assert [each[0] for each in (one, kept, slower, total)] == [
        "predicted",
        "achieved",
        "lost",
        "total",
    ]
    assert kept[1] == one[1]
    assert slower[2] == pytest.approx(kept[2], abs=0.02)  # to the left: it was slower
    assert slower[1] < kept[1] + 1e-6 or slower[1] < slower[2]
    assert three[1] == pytest.approx(kept[2], abs=0.02)  # what was dropped moved nothing
    assert four[1] == pytest.approx(kept_too[2], abs=0.02)
    assert total[1] == pytest.approx(one[1], abs=0.02)
    assert total[2] == pytest.approx(kept_too[2], abs=0.05)  # 2.5 · 2.0
    doubling = kept_too[2] - kept_too[1]
    assert kept[2] - kept[1] == pytest.approx(doubling * math.log(2.5) / math.log(2.0), abs=0.05)


def test_the_waterfall_names_every_step_and_figure() -> None:
    text = tree(waterfall(STEPS)).text
    for wanted in ("one", "two", "three", "four", "kept", "dropped", "failed", "2.50×", "0.50×"):
        assert wanted in text
    assert "1.80 to 2.20" in text
    assert "measured and not kept" in text
    assert "measured and not kept" not in tree(waterfall(STEPS[:1])).text


def test_predictions_alone_begin_at_predictions() -> None:
    """What `profile` shows: nothing was achieved."""
    steps = [WaterfallStep(name, "", "possible", True, rise(2.0)) for name in "ab"]
    first, second = rises(tree(waterfall(steps)))
    assert second[1] == pytest.approx(first[2], abs=0.02)
    assert "achieved, with" not in tree(waterfall(steps)).text


def test_figures_that_cannot_be_drawn_are_still_told() -> None:
    odd = WaterfallStep(
        "odd", "", "dropped", False, Rise(0.0, 0.0, 0.0), Rise(math.inf, 1.0, math.inf)
    )
    figure = tree(waterfall([odd]))
    assert rises(figure) == []
    assert "0.00×" in figure.text
    assert tree(waterfall([])).one("tbody").children == []


def test_an_interval_that_says_little_hides_nothing() -> None:
    """It goes to the edge, open, and the bars keep their room."""
    unsure = WaterfallStep("unsure", "", "kept", True, Rise(1.1, 0.01, 90.0), rise(1.2))
    figure = tree(waterfall([unsure, STEPS[0]]))
    widths = [right - left for _, left, right in rises(figure)]
    assert max(widths) > 30
    whisker = figure.one("tbody").all("g", "whisker")[0]
    assert [whisker.children[0].attributes[key] for key in ("x1", "x2")] == ["0%", "100%"]
    assert len(whisker.children) == 1
    assert "0.01 to 90.00" in figure.text


def test_times() -> None:
    values = (0.714, 1.9, 12.34, 120.0, 1180.4)
    assert [times(value) for value in values] == ["0.71×", "1.90×", "12.3×", "120×", "1,180×"]


# The roofline.

ROOFS = Roofs(4e12, {"fp32": 5e13, "bf16": 7.4e14, "fp16": 7.5e14, "fp8": 1.4e15})


def points(figure: Node) -> dict[str, tuple[float, float]]:
    return {
        svg.one("g", "point").attributes["data-key"]: (
            share(svg.attributes["x"]),
            float(svg.attributes["y"]),
        )
        for svg in figure.one("svg", "plot").children
        if svg.all("g", "point")
    }


def test_dots_lie_where_they_belong() -> None:
    dots = [
        Dot("slow", 0.5, 4e11, "21% of bandwidth", hollow=True, after="fast"),
        Dot("fast", 2.0, 6e12, "78% of bandwidth"),
        Dot("on the roof", 2.0, 8e12, "100% of bandwidth"),
        Dot("matrices", 3000.0, 9e14, "64% of the matrix rate", series=1),
    ]
    figure = tree(roofline(dots, ROOFS))
    found = points(figure)
    assert found["slow"][0] < found["fast"][0] == found["on the roof"][0] < found["matrices"][0]
    assert found["slow"][1] > found["fast"][1] > found["matrices"][1]  # upwards
    slope = next(line for line in figure.all("line", "roof"))
    x1, x2 = (share(slope.attributes[key]) for key in ("x1", "x2"))
    y1, y2 = (float(slope.attributes[key]) for key in ("y1", "y2"))
    on_roof = y1 + (found["on the roof"][0] - x1) / (x2 - x1) * (y2 - y1)
    assert found["on the roof"][1] == pytest.approx(on_roof, abs=0.5)
    assert figure.one("line", "became")
    flats = [text.text for text in figure.all("text", "halo")]
    assert any("fp16, bf16 750 TFLOP/s" in text for text in flats)  # nearly alike: one line
    assert any("4 TB/s" in text for text in flats)


def test_nothing_is_drawn_over_the_roof() -> None:
    """A limit that was measured too low is told, not shown as beaten."""
    over = Dot("too fast", 2.0, 16e12, "200% of bandwidth", hollow=True, after="matrices")
    dots = [over, Dot("on the roof", 2.0, 8e12, "100%"), Dot("matrices", 3000.0, 2e15, "143%")]
    figure = tree(roofline(dots, ROOFS))
    drawn = points(figure)
    assert drawn["too fast"] == drawn["on the roof"]
    highest = min(float(line.attributes["y1"]) for line in figure.all("line", "roof"))
    assert min(y for _, y in drawn.values()) >= highest
    lines = [row.text for row in figure.one("tbody").all("tr")]
    assert "16 TFLOP/s" in lines[0]  # as it was measured
    assert "above this roof" in lines[0]
    assert "above this roof" not in lines[1]
    plot = roofline_plot(dots, ROOFS)
    assert plot is not None
    lines = plot.plain.splitlines()
    first = {mark: [mark in line for line in lines].index(True) for mark in "●─"}
    assert first["●"] >= first["─"]


def test_every_dot_is_reached_and_told() -> None:
    dots = [Dot(f"kernel {index}", 2.0**index, 1e11, "5% of bandwidth") for index in range(12)]
    figure = tree(roofline(dots, ROOFS))
    focusable = figure.all("g", "point")
    assert len(focusable) == 12
    assert all(point.attributes["tabindex"] == "0" for point in focusable)
    assert all("5% of bandwidth" in point.attributes["aria-label"] for point in focusable)
    rows = figure.one("tbody").all("tr")
    assert [row.attributes["data-key"] for row in rows] == [dot.label for dot in dots]
    assert len(figure.all("text", "name")) <= 8


def test_names_do_not_run_into_each_other() -> None:
    dots = [Dot(f"kernel number {index}", 2.0, 1e12 * (1 + index / 50), "") for index in range(6)]
    names = tree(roofline(dots, ROOFS)).all("text", "name")
    lines = [float(name.attributes["y"]) + float(name.attributes["dy"]) for name in names]
    sides = [name.attributes["class"] for name in names]
    for one, other in combinations(range(len(names)), 2):
        assert sides[one] != sides[other] or abs(lines[one] - lines[other]) >= 13


def test_the_name_of_the_bandwidth_gives_way_to_dots() -> None:
    """It stands near the middle of the slope, unless a dot or its name does."""
    free = tree(roofline([], ROOFS)).all("text", "end")[-1]
    x = free.attributes["x"]
    middle = Dot("in the middle", 11.9, 4.76e13, "all of the bandwidth", weight=0.5)
    figure = tree(roofline([middle], ROOFS))
    moved = next(text for text in figure.all("text", "end") if text.text == "4 TB/s")
    assert free.text == "4 TB/s"
    assert abs(share(moved.attributes["x"]) - share(x)) > 3
    assert abs(share(moved.attributes["x"]) - points(figure)["in the middle"][0]) > 3


def test_numbers_below_an_axis_stand_apart() -> None:
    batches = [(float(batch), 300.0) for batch in range(1, 65)]
    figure = tree(curves([Series("after", batches)], "Throughput", "batch", "tokens/s"))
    places = [share(text.attributes["x"]) for text in figure.all("text", "middle")]
    assert len(places) > 5
    assert all(after - before > 8 for before, after in pairwise(places))


H200 = {"int8": 1979e12, "fp8": 1460e12, "fp16": 989e12, "bf16": 795e12, "tf32": 414e12,
        "fp32": 50.9e12}  # fmt: skip


def test_names_of_near_rates_stand_apart() -> None:
    """Each is one line high, in the order of the rates, with a line from the end of its flat."""
    figure = tree(
        roofline([Dot("prefill", 900.0, 7e14, "88% of the matrix rate")], Roofs(4e12, H200))
    )
    names = figure.all("text", "rate")
    assert [name.text.split()[0] for name in names] == list(H200)
    lines = [float(name.attributes["y"]) for name in names]
    assert all(below - above >= 14 for above, below in pairwise(lines))
    assert lines[0] > 10
    flats = [float(line.attributes["y1"]) for line in figure.all("line", "roof")[1:]]
    assert any(below - above < 12 for above, below in pairwise(flats))  # or nothing was to be done
    leaders = figure.all("line", "leader")
    assert [float(line.attributes["y1"]) for line in leaders] == flats
    ends = [float(line.attributes["y2"]) for line in leaders]
    assert ends == pytest.approx([line - 4 for line in lines], abs=0.11)
    assert max(abs(end - flat) for end, flat in zip(ends, flats, strict=True)) < 12
    room = -float(leaders[0].attributes["x1"])
    assert points(figure)["prefill"][0] / 100 * 760 < 760 - room - 8  # dots stay clear of them


def test_labels_are_moved_as_little_as_possible() -> None:
    assert spread([10.0, 40.0, 80.0], 14.0, 0.0, 100.0) == [10.0, 40.0, 80.0]
    assert spread([30.0, 34.0], 14.0, 0.0, 100.0) == [25.0, 39.0]
    assert spread([1.0, 2.0, 50.0], 14.0, 0.0, 100.0) == [0.0, 14.0, 50.0]
    assert spread([50.0, 98.0, 99.0], 14.0, 0.0, 100.0) == [50.0, 86.0, 100.0]
    assert spread([5.0] * 4, 14.0, 0.0, 20.0) == [0.0, 14.0, 28.0, 42.0]  # no room: in order


def test_heavier_dots_are_larger() -> None:
    def size(weight: float) -> float:
        figure = tree(roofline([Dot("a", 1.0, 1e12, "", weight=weight)], ROOFS))
        path = figure.one("g", "point").one("path")
        return float(path.attributes["transform"].removeprefix("scale(").removesuffix(")"))

    assert size(0.01) < size(0.1) < size(0.6)


@pytest.mark.parametrize(
    "roofs",
    [None, Roofs(0.0, {"bf16": 1e14}), Roofs(1e12, {}), Roofs(math.inf, {"bf16": math.nan})],
)
def test_without_ceilings_dots_are_shown_and_no_roof(roofs: Roofs | None) -> None:
    figure = tree(roofline([Dot("decode", 0.5, 4e11, "unknown")], roofs))
    assert "not known" in figure.text
    assert not figure.all("line", "roof")
    assert len(points(figure)) == 1
    assert not tree(roofline([], roofs)).all("svg")
    odd = [Dot("zero", 0.0, 1e11, "told"), Dot("inf", 1.0, math.inf, "told")]
    assert tree(roofline(odd, roofs)).text.count("told") == 2


# Bars, curves, intervals, tables.


def test_parts_add_up_on_one_scale() -> None:
    bars = [
        Bar("before", [BarPart("weights", 60.0), BarPart("pages", 20.0)]),
        Bar(
            "after",
            [BarPart("weights", 20.0, "codes"), BarPart("pages", 75.0), BarPart("graphs", 5.0)],
        ),
    ]
    figure = tree(stacked_bars(bars, lambda value: f"{value:g} B", whole="in all"))
    widths = [
        [share(part.attributes["width"]) for part in svg.all("rect", "part")]
        for svg in figure.all("svg", "stack")
    ]
    assert widths == [[60.0, 20.0], [20.0, 75.0, 5.0]]
    lefts = [
        share(part.attributes["x"]) for part in figure.all("svg", "stack")[1].all("rect", "part")
    ]
    assert lefts == [0.0, 20.0, 95.0]
    looks = [
        part.attributes["class"] for part in figure.all("rect") if "data-key" in part.attributes
    ]
    assert looks[0] == looks[2]  # weights
    assert "80 B" in figure.text
    assert "100 B" in figure.text
    assert "codes" in figure.text
    alike = tree(stacked_bars(bars, str, are_shares=True)).all("svg", "stack")
    assert [share(part.attributes["width"]) for part in alike[0].all("rect", "part")] == [
        75.0,
        25.0,
    ]
    assert tree(stacked_bars([], human_bytes)).one("figure")
    assert not tree(stacked_bars([Bar("b", [BarPart("x", 0.0)])], str)).all("svg", "stack")


def test_many_bars_have_a_line_each() -> None:
    """A column each would leave no room for what the parts are."""
    parts = [BarPart("weights", 3.0, "codes and scales"), BarPart("KV", 1.0)]
    bars = [Bar(f"step {number}", parts[: 1 + number % 2]) for number in range(5)]
    figure = tree(stacked_bars(bars, lambda value: f"{value:g} B", whole="in all"))
    legend, lines = figure.all("table")
    assert len(legend.all("tr")) == 1 + 2
    assert "codes and scales" in legend.text
    assert [row.text for row in lines.all("tr")[1:3]] == ["step 03 B–3 B", "step 13 B1 B4 B"]


def test_small_parts_take_no_colour_from_large_ones() -> None:
    small = [BarPart(f"small {number}", 0.1) for number in range(9)]
    figure = tree(
        stacked_bars([Bar("b", [BarPart("weights", 500.0), *small, BarPart("KV", 400.0)])], str)
    )
    drawn = figure.one("svg", "stack").all("rect", "part")
    assert [part.attributes["data-key"] for part in drawn] == ["weights", "KV"]
    assert len({part.attributes["class"] for part in drawn}) == 2
    assert len(figure.all("rect", "none")) == 9
    assert "small 8" in figure.text
    many = tree(stacked_bars([Bar("b", [BarPart(str(n), 10.0 - n) for n in range(10)])], str))
    looks = [part.attributes["class"] for part in many.one("svg", "stack").all("rect", "part")]
    assert len(looks) == len(set(looks)) == 7


def test_curves_go_through_their_points() -> None:
    series = [
        Series("before", [(1, 10.0), (2, 20.0), (4, 30.0)], series=1, hollow=True),
        Series("after", [(4, 300.0), (1, 100.0), (2, 200.0), (8, 0.0)]),
    ]
    figure = tree(curves(series, "Throughput", "batch", "tokens/s"))
    lines = [line for line in figure.one("svg", "plot").children if line.name == "line"]
    own = [line.attributes for line in lines if "line" in line.attributes["class"].split()]
    assert len(own) == 4
    for one, following in pairwise(own[2:]):
        assert (one["x2"], one["y2"]) == (following["x1"], following["y1"])
    labels = [point.attributes["aria-label"] for point in figure.all("g", "point")]
    assert "after, batch 4: 300" in labels
    assert len(labels) == 6  # zero has no place on such an axis
    cells = [cell.text for cell in figure.one("tbody").all("td")]
    assert cells[-2:] == ["–", "0"]
    assert "Not measured" in tree(curves([], "Throughput", "batch", "tokens/s")).text


def test_intervals_and_their_bound() -> None:
    rows = [
        Interval("int8", 0.004, 0.003, 0.005, "kept"),
        Interval("int4", 0.04, 0.03, 0.05, "dropped", is_outside=True),
        Interval("one window", 0.001, None, None),
    ]
    figure = tree(intervals(rows, "mean KL", read=lambda value: f"{value:g}", bound=0.02))
    bounds = {line.attributes["x1"] for line in figure.all("line", "bound")}
    assert len(bounds) == 1
    places = [
        share(svg.attributes["x"])
        for chart in figure.one("tbody").all("svg", "cell-chart")
        for svg in chart.children
        if svg.name == "svg"
    ]
    assert places[0] < share(bounds.pop()) < places[1]
    assert len(figure.all("g", "whisker")) == 2
    assert len(figure.all("tr", "outside")) == 1
    assert "0.003 to 0.005" in figure.text
    gains = [Interval("a", 1.5, 1.2, 1.9), Interval("b", 1.0, 0.9, 1.1)]
    made = tree(intervals(gains, "gain", read=str, origin=1.0, ends_name="expected"))
    marks = [svg for svg in made.one("tbody").all("svg") if svg.attributes.get("y") == "50%"]
    assert min(share(svg.attributes["x"]) for svg in marks) < 10  # the axis does not begin at zero
    assert "expected" in made.one("thead").text
    low = intervals([Interval("x", -0.1, -0.2, 0.0)], "ppl", read=str)
    assert tree(low).one("tbody")
    assert tree(intervals([], "none", read=str, bound=0.0)).one("tbody").children == []


def test_a_table_names_its_rows_and_columns() -> None:
    made = tree(table([Column("kernel"), Column("time", True)], [("a<b", "1 s")], "Kernels"))
    assert [head.attributes["scope"] for head in made.all("th")] == ["col", "col", "row"]
    assert made.one("td").attributes == {"class": "number", "data-name": "time"}
    assert made.one("caption").text == "Kernels"
    with pytest.raises(ValueError):
        table([Column("kernel")], [("a", "too many")], "Kernels")


def test_nothing_from_outside_becomes_markup() -> None:
    bad, ten = HOSTILE, Rise(1.0, 0.9, 1.1)
    made = [
        waterfall([WaterfallStep(bad, bad, bad, True, ten, ten, bad)]),
        roofline([Dot(bad, 1.0, 1e12, bad)], Roofs(1e12, {bad: 1e14}, bad), title=bad),
        curves([Series(bad, [(1, 2.0)])], bad, bad, bad, read=lambda _: bad),
        stacked_bars([Bar(bad, [BarPart(bad, 1.0, bad)])], lambda _: bad, whole=bad),
        intervals([Interval(bad, 1.0, 0.5, 1.5, bad)], bad, read=lambda _: bad, bound=1.0),
        table([Column(bad)], [[bad]], bad, keys=[bad]),
    ]
    for html in made:
        assert isinstance(html, Markup)
        nodes = tree(html).all()
        assert not {node.name for node in nodes} & {"img", "script", "style"}
        assert not [key for node in nodes for key in node.attributes if key.startswith("on")]
        assert HOSTILE in tree(html).text


# The page.


def test_the_page_allows_its_own_script_and_nothing_else() -> None:
    body = element("p", "text")
    made = tree(page("T", "about", "eyebrow", "Headline", [Section("one", "One", body, "intro")]))
    script = made.one("script")
    digest = base64.b64encode(hashlib.sha256(script.raw.encode()).digest()).decode()
    policy = next(m.attributes["content"] for m in made.all("meta") if "http-equiv" in m.attributes)
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert made.one("title").text == "T"
    assert [made.one(name).name for name in ("header", "nav", "main", "footer", "h1")]
    assert made.one("nav").one("a").attributes["href"] == "#one"
    with pytest.raises(AssertionError):
        page("T", "", "", "", [Section('x" onclick="', "One", body)])


# Colours.


def colours(folder_file: str, which: int) -> dict[str, str]:
    pairs = re.findall(r"--([a-z0-9-]+): light-dark\((#\w+), (#\w+)\)", folder_file)
    return {pair[0]: pair[1 + which] for pair in pairs}


STYLE = PALETTE.read_text()


@pytest.mark.parametrize("file", [FOLDER / "style.css", SERVER_FOLDER / "page.css"])
def test_both_pages_take_their_colours_from_one_palette(file: Path) -> None:
    text = file.read_text()
    assert not re.findall(r"#[0-9a-fA-F]{3,8}\b(?!\w)", text)
    names = set(re.findall(r"var\(--([a-z0-9-]+)\)", text))
    assert names - {"own"} <= colours(STYLE, 0).keys()  # own: of the element, one of the others


def linear(colour: str) -> list[float]:
    parts = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    return [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]


def luminance(rgb: list[float]) -> float:
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), rgb, strict=True))


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(linear(one)), luminance(linear(other))))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("which", [0, 1], ids=["light", "dark"])
def test_text_and_marks_stand_out(which: int) -> None:
    found = colours(STYLE, which)
    for text in ("ink", "soft", "warn", "good", "strong", "one", "two"):
        assert contrast(found[text], found["ground"]) >= 4.5, text
    for text in ("ink", "soft"):
        for ground in ("raised", "mine"):
            assert contrast(found[text], found[ground]) >= 4.5, (text, ground)
    for mark in ("three", "four", "five", "six"):
        assert contrast(found[mark], found["ground"]) >= 3.0, mark


# How a colour looks to people without one kind of cone (Viénot, Brettel and Mollon, 1999).
BLINDNESS = {
    "none": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.11238, 0.88762, 0), (0.11238, 0.88762, 0), (0.00401, -0.00401, 1)),
    "deuteranopia": ((0.29275, 0.70725, 0), (0.29275, 0.70725, 0), (-0.02234, 0.02234, 1)),
}


def lab(rgb: list[float]) -> tuple[float, float, float]:
    to_xyz = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    white = (0.9505, 1.0, 1.089)
    xyz = [sum(a * b for a, b in zip(row, rgb, strict=True)) for row in to_xyz]
    f = [
        (v / w) ** (1 / 3) if v / w > 0.008856 else 7.787 * v / w + 16 / 116
        for v, w in zip(xyz, white, strict=True)
    ]
    return 116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])


def difference(one: str, other: str, kind: str) -> float:
    seen = [
        [min(1, max(0, sum(a * b for a, b in zip(row, linear(c), strict=True)))) for row in matrix]
        for matrix in (BLINDNESS[kind],)
        for c in (one, other)
    ]
    return math.dist(lab(seen[0]), lab(seen[1]))


@pytest.mark.parametrize("kind", list(BLINDNESS))
@pytest.mark.parametrize("which", [0, 1], ids=["light", "dark"])
def test_colours_can_be_told_apart(kind: str, which: int) -> None:
    """Before and after, kept and failed; and parts beside each other in a bar."""
    found = colours(STYLE, which)
    assert difference(found["one"], found["two"], kind) > 40
    assert difference(found["one"], found["ink"], kind) > 25
    parts = ["one", "part-1", "three", "part-3", "four", "part-5", "part-6"]
    for one, other in pairwise(parts):
        assert difference(found[one], found[other], kind) > 20, (one, other)
