"""The report's page in a real browser: widths, keyboard, light and dark, and without JavaScript."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import sample_climbs
from page_server import FLAGS, find_browser
from report_climbs import hostile, no_ceilings
from test_drawing import H200

from ridgeline.ladder.reporting.comparing import NamedClimb, compare, write_comparison
from ridgeline.ladder.reporting.report import write_report
from ridgeline.profiling.drawing import Column, Dot, Roofs, Section, page, roofline, table

pytestmark = pytest.mark.slow

Open = Callable[..., Any]
WIDE = {"width": 1320, "height": 900}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = find_browser()
    if path is None:
        pytest.skip("no Chromium here; `make browser` installs one where it can")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as running:
        started = running.chromium.launch(executable_path=path, args=list(FLAGS))
        yield started
        started.close()


def wide_table() -> str:
    """As many columns as a profile has."""
    columns = [
        Column("op"),
        *(Column(f"number {index}", True) for index in range(6)),
        Column("why"),
    ]
    row = ["layers.*.mlp.gate_up", *("105 GFLOP/s" for _ in range(6)), "between kernels: launches"]
    sections = [Section("ops", "Ops", table(columns, [row] * 3, "Ops"))]
    return page("Wide", "a table", "Wide", "As wide as it gets", sections)


def many_ops() -> str:
    """As many points as a profile has, along the slope and in heaps."""
    dots = [
        Dot(f"layers.*.mlp.gate_up + op {index} ({phase})", first * 1.4**index,
            min(8e14, 3e12 * first * 1.4**index) * 0.9, "90%", number, weight=0.1)
        for number, (phase, first) in enumerate((("decode", 0.6), ("prefill", 40.0)))
        for index in range(9)
    ]  # fmt: skip
    drawn = roofline(dots, Roofs(4.2e12, H200))
    return page("Ops", "ops", "Ops", "Many", [Section("roofline", "Under the roofline", drawn)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("reports")
    write_report(sample_climbs.h200(), found / "h200.html")
    write_report(replace(sample_climbs.h200(), matrix_rates=H200), found / "roofs.html")
    write_report(sample_climbs.cpu(), found / "cpu.html")
    write_report(sample_climbs.answer_first(), found / "answer.html")
    write_report(sample_climbs.crowded(), found / "crowded.html")
    write_report(sample_climbs.empty(), found / "empty.html")
    write_report(no_ceilings(), found / "bare.html")
    write_report(hostile(), found / "hostile.html")
    write_report(hostile("long" * 40), found / "long.html")
    (found / "ops.html").write_text(many_ops(), encoding="utf-8")
    both = compare(
        NamedClimb("a", sample_climbs.crowded()), NamedClimb("long" * 40, sample_climbs.h200())
    )
    write_comparison(both, found / "both.html")
    (found / "wide.html").write_text(wide_table(), encoding="utf-8")
    return found


@pytest.fixture
def show(browser: Any, folder: Path) -> Iterator[Open]:
    """Opens a report; at the end nothing may have gone wrong, or been asked for elsewhere."""
    problems: list[str] = []
    asked: list[str] = []
    contexts: list[Any] = []

    def show(name: str = "h200", **options: Any) -> Any:
        contexts.append(browser.new_context(**{"viewport": WIDE, **options}))
        page = contexts[-1].new_page()
        page.set_default_timeout(8000)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda line: problems.append(line.text))
        page.on("dialog", lambda dialog: problems.append(dialog.message))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"file://{folder}/{name}.html")
        return page

    yield show
    for context in contexts:
        context.close()
    assert problems == []
    assert all(url.startswith(("file://", "data:")) for url in asked)


def picture(page: Any, name: str) -> None:
    """Kept where RIDGELINE_PICTURES names a folder, for people to look at; drawn in any case."""
    folder = os.environ.get("RIDGELINE_PICTURES")
    path = {"path": Path(folder) / f"report-{name}.png"} if folder else {}
    assert len(page.screenshot(full_page=True, **path)) > 20_000


@pytest.mark.parametrize(
    "name", ["h200", "answer", "crowded", "empty", "bare", "hostile", "long", "wide", "both"]
)
def test_nothing_scrolls_sideways(show: Open, name: str) -> None:
    shown = show(name)
    shown.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    for width in (320, 390, 768, 962, 1220, 1320):
        shown.set_viewport_size({"width": width, "height": 800})
        assert shown.evaluate("document.documentElement.scrollWidth") == width


def test_a_phone(show: Open) -> None:
    page = show(viewport={"width": 390, "height": 800})
    assert page.locator(".waterfall td.outcome").first.is_visible()
    assert page.locator(".roofline text.name").first.is_hidden()  # the table has the marks
    picture(page, "phone")


@pytest.mark.parametrize("width", [390, 962, 1320])
def test_names_of_rates_do_not_touch(show: Open, width: int) -> None:
    page = show("roofs", viewport={"width": width, "height": 900})
    read = "each => { const b = each.getBBox(); return [b.x, b.y, b.y + b.height]; }"
    boxes = [name.evaluate(read) for name in page.locator(".roofline text.rate").all()]
    assert len(boxes) == len(H200)
    for (_, _, bottom), (_, top, _) in pairwise(boxes):
        assert bottom <= top
    plot = page.locator(".roofline svg.plot").first.bounding_box()
    assert all(-plot["width"] < left < 0 for left, _, _ in boxes)  # from its right edge


def test_a_point_shows_its_figures(show: Open) -> None:
    page = show()
    dot = page.locator(".roofline .point").nth(2)
    assert page.locator("#tip").is_hidden()
    dot.hover()
    assert page.inner_text("#tip") == "decode, after: 5.4 TFLOP/s, 78.0% of the bandwidth"
    assert page.locator(".roofline tr.lit th").inner_text().strip() == "decode, after"
    place, own = page.locator("#tip").bounding_box(), dot.bounding_box()
    assert place["x"] >= 0
    assert place["x"] + place["width"] <= WIDE["width"]
    assert place["y"] + place["height"] <= own["y"] + own["height"] / 2  # above it
    page.mouse.move(0, 0)
    assert page.locator("#tip").is_hidden()


def test_the_keyboard_goes_from_point_to_point(show: Open) -> None:
    page = show()
    page.locator(".roofline .point").first.focus()
    labels = [page.inner_text("#tip")]
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "ArrowRight"):
        page.keyboard.press(key)
        labels.append(page.inner_text("#tip"))
    assert [label.partition(":")[0] for label in labels] == [
        "decode, before",
        "prefill, before",
        "decode, after",
        "prefill, after",
        "decode, before",
    ]
    ring = "getComputedStyle(document.activeElement.querySelector('.reach')).strokeWidth"
    assert page.evaluate(ring) == "2px"
    page.keyboard.press("Escape")
    assert page.locator("#tip").is_hidden()


def test_tab_reaches_every_control_once(show: Open) -> None:
    page = show()
    reached = []
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement === document.body"):
            break
        name = "e.id || e.getAttribute('aria-label') || e.textContent"
        reached.append(page.evaluate(f"(e => {name})(document.activeElement)"))
    assert reached[:2] == ["Skip to the report", "theme"]
    assert sum("TFLOP/s" in each or "GFLOP/s" in each for each in reached) == 1  # a stop a plot
    assert sum(", batch 1:" in each for each in reached) == 2
    assert reached.count("Copy") == 2
    assert "fused kernels in the engine" in reached  # opens


def test_light_and_dark(show: Open) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    dark, light = show(color_scheme="dark"), show(color_scheme="light")
    assert dark.evaluate(ground) == "rgb(19, 21, 25)"
    assert light.evaluate(ground) == "rgb(251, 250, 247)"
    picture(dark, "dark")
    picture(light, "light")
    for expected in ("Theme: light", "Theme: dark"):
        light.click("#theme")
        assert light.inner_text("#theme") == expected
    assert light.evaluate(ground) == dark.evaluate(ground)
    light.reload()
    assert light.inner_text("#theme") == "Theme: dark"


def test_without_javascript_all_can_be_read(show: Open) -> None:
    page = show(java_script_enabled=False)
    assert page.locator("#theme").is_hidden()
    page.locator("summary", has_text="not apply here").click()  # it is folded, and opens
    text = page.inner_text("main")
    for rung in sample_climbs.h200().rungs:
        assert rung.title in text
    assert page.locator(".roofline .point title").count() == 4  # the browser's own hint
    page.locator("summary", has_text="weights in fp8").click()
    assert page.get_by_text("8.1 instead of 16.1 GB of weights a step").is_visible()


# Texts of a drawing that lie on each other, or are cut off at the side of the page.
CROSSING = """() => [...document.querySelectorAll('svg')]
  .filter((svg) => !svg.parentElement.closest('svg'))
  .flatMap((svg) => {
    const shown = [...svg.querySelectorAll('text')]
      .map((text) => [text.textContent, text.getBoundingClientRect()])
      .filter(([, box]) => box.width > 0);
    const cut = shown.filter(([, box]) => box.left < 0 || box.right > innerWidth + 0.5)
      .map(([text]) => `${text} is cut off`);
    return cut.concat(shown.flatMap(([text, one], index) => shown.slice(index + 1)
      .filter(([, other]) => one.left < other.right - 1 && other.left < one.right - 1
        && one.top < other.bottom - 3 && other.top < one.bottom - 3)
      .map(([other]) => `${text} crosses ${other}`)));
  })"""


@pytest.mark.parametrize("width", [390, 710, 962, 1220])
@pytest.mark.parametrize("name", ["h200", "roofs", "answer", "crowded", "cpu", "ops", "both"])
def test_labels_do_not_cross(show: Open, name: str, width: int) -> None:
    assert show(name, viewport={"width": width, "height": 900}).evaluate(CROSSING) == []


OUTSIDE = """() => [...document.querySelectorAll('.plot, td .cell-chart')].flatMap((plot) => {
  const box = plot.getBoundingClientRect();
  return [...plot.querySelectorAll('.mark, .rise')].filter((mark) => {
    const own = mark.getBoundingClientRect();
    return own.left < box.left - 8 || own.right > box.right + 8
      || own.top < box.top - 8 || own.bottom > box.bottom + 8;
  }).map((mark) => mark.outerHTML);
})"""


@pytest.mark.parametrize("width", [390, 1320])
def test_points_and_bars_are_inside_their_plots(show: Open, width: int) -> None:
    page = show(viewport={"width": width, "height": 800})
    assert page.locator(".mark").count() > 40
    assert page.evaluate(OUTSIDE) == []


def test_a_script_that_is_not_ours_does_not_run(browser: Any, folder: Path) -> None:
    """Even where one got into the file."""
    text = (folder / "cpu.html").read_text(encoding="utf-8")
    bad = "<script>document.title = 'owned'</script><img src=x onerror=\"document.title='owned'\">"
    (folder / "owned.html").write_text(text.replace("</main>", bad + "</main>"), encoding="utf-8")
    page = browser.new_page()
    page.goto(f"file://{folder}/owned.html")
    assert page.locator("img").count() == 1
    assert page.title().startswith("demo on")
    page.close()
