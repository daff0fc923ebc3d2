"""The report of a climb, as a page and in the terminal, and `ridgeline report`."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import sample_climbs
from html_tree import Node, tree
from report_climbs import HOSTILE, hostile, in_terminal, words
from report_climbs import climb as climb

from ridgeline.errors import OutputError
from ridgeline.ladder.outcome import RoofPoint
from ridgeline.ladder.reporting import summary
from ridgeline.ladder.reporting.left_section import next_actions
from ridgeline.ladder.reporting.report import report, write_report
from ridgeline.ladder.reporting.result import Climb


def test_it_is_a_whole_document(climb: Climb) -> None:
    document = tree(report(climb))
    assert climb.model in document.one("head").one("title").text
    for landmark in ("header", "nav", "main", "footer", "h1"):
        assert len(document.all(landmark)) == 1
    assert document.one("html").attributes["lang"] == "en"
    ids = [node.attributes["id"] for node in document.all() if "id" in node.attributes]
    assert len(ids) == len(set(ids))
    for section in document.one("main").all("section"):
        assert section.attributes["aria-labelledby"] in ids
    for link in document.one("nav").all("a"):
        assert link.attributes["href"].removeprefix("#") in ids


def test_it_asks_nobody_for_anything(climb: Climb) -> None:
    html = report(climb)
    for node in tree(html).all():
        for key in ("src", "href", "action", "srcset", "data", "poster"):
            target = node.attributes.get(key, "#")
            assert target.startswith(("#", "data:image/svg+xml,")), (node.name, target)
        assert node.name not in ("iframe", "object", "embed", "img", "base", "form")
        assert not any(key.startswith("on") for key in node.attributes)
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|import\(", html)


def test_every_picture_has_words(climb: Climb) -> None:
    for svg in tree(report(climb)).all("svg"):
        if svg.attributes.get("role") in ("img", "group"):
            assert svg.attributes["aria-label"]
        elif "x" not in svg.attributes:  # those with a place are parts of another
            assert svg.attributes["aria-hidden"] == "true"


def test_every_rung_is_named_with_its_reason(climb: Climb) -> None:
    text = tree(report(climb)).one("main").text
    for rung in climb.rungs:
        assert rung.title in text
        assert rung.status in text
        assert words(rung.reason) in text
        if rung.predicted is not None and rung.status != "not applicable":
            assert f"{rung.predicted.low:.2f} to {rung.predicted.high:.2f}" in text
            assert rung.predicted.why in text
        if rung.achieved is not None:
            assert f"{rung.achieved.low:.2f} to {rung.achieved.high:.2f}" in text


def test_all_that_was_promised_is_there() -> None:
    """The issue's list, one by one."""
    climb = sample_climbs.h200()
    document = tree(report(climb))
    sections = {node.attributes.get("id", ""): node for node in document.all("section")[1:]}
    assert " ".join(sections) == "ladder left roofline batch memory quality dropped repeat"
    assert len(sections["ladder"].one("tbody").all("tr")) == len(summary.measured(climb)) + 1
    marks = sections["roofline"].one("svg", "plot").all("path", "mark")
    assert [("hollow" in mark.attributes["class"]) for mark in marks] == [True, True, False, False]
    assert len(sections["batch"].all("svg", "plot")) == 2
    assert len(sections["batch"].all("g", "point")) == 4 * 9
    assert [bar.text for bar in sections["memory"].all("p", "bar-name")] == [
        "before 48.6 GiB",
        "after 109 GiB",
    ]
    assert len(sections["quality"].all("g", "whisker")) == 2 * 4
    assert "allowed 0.02" in sections["quality"].text
    assert "allowed +2%" in sections["quality"].text
    assert len(sections["dropped"].all("li")) == 5
    commands = [node.text for node in sections["repeat"].all("div", "command")]
    assert commands[0].startswith("ridgeline optimize meta-llama/Llama-3.1-8B-Instruct")
    assert commands[1] == "ridgeline serve llama-fast"
    for wanted in ("NVIDIA H200", "2.11.0+cu130", "580.95.05", "4.21 TB/s, measured", "sm_90"):
        assert wanted in sections["repeat"].text
    assert document.one("h1").text == "11.4× the speed: 311 output tokens/s instead of 27.3"
    assert sample_climbs.SAMPLE in document.one("ul", "notes").text
    assert document.one("button").attributes.get("hidden") == ""  # a script shows it


def section_of(climb: Climb, name: str) -> Node:
    sections = tree(report(climb)).all("section")
    return next(node for node in sections if node.attributes.get("id") == name)


def test_it_leads_with_the_gain_over_the_defaults() -> None:
    document = tree(report(sample_climbs.answer_first()))
    assert document.one("h1").text.startswith("1.42× the speed of the defaults: 311")
    rows = [row.text for row in document.one("dl", "comparisons").all("div")]
    assert rows == [
        "over the defaults1.42×311 instead of 219 output tokens/s",
        "over the plain loop11.2×predicted in part",
        "of the hardware limit78.0%before: 55.0%",
    ]


def test_why_it_is_not_at_the_limit_and_what_to_do_next() -> None:
    climb = sample_climbs.h200()
    section = section_of(climb, "left")
    bar = section.one("svg", "stack").attributes["aria-label"]
    assert bar == (
        "time in steps: the hardware's limit 78.0%, matrices (decode) 12.0%, gaps (decode) 6.0%, "
        "matrices (prefill) 2.1%, the rest 1.9%"
    )
    assert "2.2 ms of a decode step, 1.8 ms would do" in section.text
    assert "Allow weights in int4, groups of 128, if you can" in section.text
    assert "--max-kl 0.045 --max-ppl-increase 0.043" in section.text
    assert "4 requests at once instead of 1" in section.text
    assert "prefix cache" not in section.text  # nothing is expected of it
    shown = words(in_terminal(climb))
    assert "gaps (decode) 6.0%" in shown
    assert "--max-kl 0.045" in shown


def test_what_had_no_time_is_the_first_thing_to_do() -> None:
    climb = sample_climbs.h200()
    prefix = climb.rungs[-1]
    assert prefix.predicted is not None
    promising = replace(prefix, predicted=replace(prefix.predicted, speedup=1.4))
    steps = next_actions(replace(climb, rungs=(*climb.rungs[:-1], promising)))
    assert steps[0].text == "Go on: prefix cache had no time"
    assert steps[0].gain == "1.40× predicted"
    assert steps[0].how.endswith("--out llama-fast --resume")


def test_what_misses_the_bound_by_far_is_not_advised() -> None:
    climb = sample_climbs.h200()
    rungs = [
        replace(each, quality=None if each.quality is None else replace(each.quality, mean_kl=0.5))
        for each in climb.rungs
    ]
    steps = next_actions(replace(climb, rungs=tuple(rungs)))
    assert not any("Allow" in step.text for step in steps)


def test_nothing_left_to_do_is_said() -> None:
    climb = replace(sample_climbs.h200(), rungs=(), next_steps=())
    assert "what is left is in the kernels" in section_of(climb, "left").text


def test_where_the_limit_is_not_known_nothing_is_said_of_it() -> None:
    climb = replace(sample_climbs.h200(), gap=())
    section = section_of(climb, "left")
    assert section.one("h2").text == "What to do next"
    assert not section.all("svg")
    assert "not 100%" not in in_terminal(climb)
    assert "What to do next" in in_terminal(climb)


def test_what_does_not_apply_is_folded() -> None:
    section = section_of(sample_climbs.answer_first(), "dropped")
    folded = section.one("details", "folded")
    assert "open" not in folded.attributes
    assert folded.one("summary").text == "4 changes do not apply here; nothing was run for them"
    assert len(folded.all("li")) == 4
    assert len(section.all("li")) == 4 + 4  # those that were run or not reached stay open


def test_hostile_names_stay_text() -> None:
    climb = hostile()
    assert climb.model == climb.rungs[0].title == climb.command[0] == HOSTILE
    assert HOSTILE + "torch" in climb.versions
    document = tree(report(climb))
    assert len(document.all("script")) == len(document.all("style")) == 1
    assert not document.all("img")
    assert not [k for node in document.all() for k in node.attributes if k.startswith("on")]
    assert document.one("main").text.count("alert(1)") > 40
    assert "alert(1)" not in document.one("script").text


@pytest.mark.parametrize("value", [0.0, -1.0, 1e-300, 1e300, math.inf, math.nan])
def test_odd_figures_do_not_stop_it(value: float) -> None:
    climb = sample_climbs.h200()
    rung = climb.rungs[0]
    assert rung.predicted is not None
    assert rung.achieved is not None
    rung = replace(
        rung,
        predicted=replace(rung.predicted, speedup=value, low=value, high=value),
        achieved=replace(rung.achieved, value=value, low=value, high=value),
    )
    point = RoofPoint("decode, after", value, value, value, "memory")
    point_of_curve = replace(climb.after.curve[0], output_tokens_per_s=value)
    after = replace(climb.after, roof=(point,), curve=(point_of_curve,))
    climb = replace(climb, rungs=(rung, *climb.rungs[1:]), after=after, bandwidth=value)
    assert rung.title in tree(report(climb)).one("main").text
    assert rung.title in words(in_terminal(climb))


def test_it_is_written_whole_or_not_at_all(tmp_path: Path, climb: Climb) -> None:
    path = tmp_path / "new" / "report.html"
    write_report(climb, path)
    assert path.read_text(encoding="utf-8") == report(climb)
    assert len(path.read_bytes()) < 400_000
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot write"):
        write_report(climb, tmp_path / "file" / "report.html")
    assert [each.name for each in path.parent.iterdir()] == ["report.html"]
