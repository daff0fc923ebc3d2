"""The report of a climb, as a page and in the terminal, and `ridgeline report`."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import sample_climbs
from html_tree import Node, tree
from rich.console import Console

from ridgeline.cli import main
from ridgeline.cli.tables.optimize import climb_table
from ridgeline.errors import OutputError, UsageError
from ridgeline.ladder.outcome import PeerFigures, RoofPoint, RungOutcome
from ridgeline.ladder.reporting import summary
from ridgeline.ladder.reporting.card import card
from ridgeline.ladder.reporting.comparing import NamedClimb, compare
from ridgeline.ladder.reporting.left_section import next_actions
from ridgeline.ladder.reporting.report import report, write_report
from ridgeline.ladder.reporting.result import Climb
from ridgeline.ladder.reporting.saved import load_climb
from ridgeline.ladder.reporting.words import busy_words, quiet_rungs
from ridgeline.profiling.predicting.accuracy import remember

HOSTILE = """</script></style><img src=x onerror=alert(1)>"'&[bold]"""


def one_rung() -> Climb:
    climb = sample_climbs.cpu()
    return replace(climb, rungs=climb.rungs[:1])


def all_failed() -> Climb:
    climb = sample_climbs.h200()
    rungs = [replace(each, status="failed", achieved=None, quality=None) for each in climb.rungs]
    return replace(climb, rungs=tuple(rungs), after=climb.before, total=None)


def no_ceilings() -> Climb:
    climb = sample_climbs.h200()
    return replace(climb, bandwidth=None, bandwidth_source=None, matrix_rates={})


def no_quality() -> Climb:
    climb = sample_climbs.h200()
    rungs = [replace(each, quality=None) for each in climb.rungs]
    return replace(climb, rungs=tuple(rungs), bounds={})


CLIMBS: dict[str, Callable[[], Climb]] = {
    "h200": sample_climbs.h200,
    "answer first": sample_climbs.answer_first,
    "cpu": sample_climbs.cpu,
    "empty": sample_climbs.empty,
    "one rung": one_rung,
    "all failed": all_failed,
    "no ceilings": no_ceilings,
    "no quality": no_quality,
}


@pytest.fixture(params=list(CLIMBS))
def climb(request: pytest.FixtureRequest) -> Climb:
    return CLIMBS[request.param]()


def in_terminal(climb: Climb, width: int = 120) -> str:
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    console.print(climb_table(climb))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def words(text: str) -> str:
    return " ".join(text.split())


# The page.


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


def texts_replaced(value: Any, text: str) -> Any:
    """Every text of a JSON document, but for the words that a field must have."""
    if isinstance(value, dict):
        return {
            (key if isinstance(each, dict | list | tuple) or key in FIELDS else text + key): (
                each if key in WORDS else texts_replaced(each, text)
            )
            for key, each in value.items()
        }
    if isinstance(value, list | tuple):
        return [texts_replaced(each, text) for each in value]
    return text if isinstance(value, str) else value


WORDS = {"status", "area", "goal", "loop", "bound", "task"}
FIELDS = set(re.findall(r'"(\w+)":', json.dumps(sample_climbs.h200().to_json()))) - {
    "torch",
    "cuda",
}


def hostile(text: str = HOSTILE) -> Climb:
    return Climb.from_json(texts_replaced(sample_climbs.h200().to_json(), text))


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


# In the terminal.


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_terminal_tells_the_same(climb: Climb, width: int) -> None:
    shown = in_terminal(climb, width)
    assert all(len(line) <= width for line in shown.splitlines())
    if width < 120:
        return
    text = words(shown)
    for rung in climb.rungs:
        assert rung.title in text
        assert rung.status in text
    for rung in summary.not_kept(climb):
        assert rung.reason[:40] in text
    assert climb.headline in text
    for section in ("The ladder", "Roofline", "Quality", "Repeat it"):
        assert section in text
    assert summary.shell(climb.command) in text


def test_bars_of_the_terminal_begin_where_others_end() -> None:
    lines = in_terminal(sample_climbs.h200()).splitlines()
    bars = [
        (line.index(found[0]), line.index(found[0]) + len(found[0]))
        for line in lines[
            lines.index("The ladder") : lines.index("Why it is not 100%, and what to do next")
        ]
        if (found := re.findall("█+", line)) and "achieved" not in line
    ]
    fuse, bf16, graphs = bars[:3]
    assert fuse[1] == pytest.approx(bf16[0], abs=1)
    assert bf16[1] == pytest.approx(graphs[0], abs=1)
    assert bars[-1][0] == fuse[0]  # all that was kept
    assert bars[-1][1] > 2 * (bars[-1][0]) / 3


def test_a_terminal_obeys_nothing_that_it_is_shown() -> None:
    text = in_terminal(hostile("\x1b]0;owned\x07\x1b[31m[bold]x[/bold]\x9b2J"))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "\x9b" not in text
    assert "[bold]x[/bold]" in text


# Words.


def test_headlines() -> None:
    climb = sample_climbs.h200()
    assert climb.headline == "11.4× the speed: 311 output tokens/s instead of 27.3"
    alone = replace(climb, total=None)  # figures of other rounds are not divided by each other
    assert alone.headline.startswith("About 11.4× the speed, by the changes kept")
    assert "not measured in the same rounds" in " ".join(summary.facts(alone))
    assert sample_climbs.empty().headline.startswith("Nothing was tried")
    assert all_failed().headline.startswith("Nothing was kept")


def test_a_wide_interval_softens_the_headline() -> None:
    climb = sample_climbs.h200()
    assert climb.total is not None
    wide = replace(climb, total=replace(climb.total, low=9.1, high=14.2))
    expected = "About 11.4× the speed, between 9.10 and 14.20×: 311 output tokens/s instead of 27.3"
    assert wide.headline == expected
    assert expected in in_terminal(wide)
    assert expected in words(report(wide))
    lost = replace(climb, total=replace(climb.total, low=0.93, high=14.2))
    assert lost.headline.startswith("Not faster beyond noise: 311 output tokens/s instead of 27.3")


def test_a_share_above_the_limit_is_told() -> None:
    """Also of a climb that was written before ceilings held."""
    climb = sample_climbs.cpu()
    point = replace(climb.after.roof[0], share=1.248, bound="compute")
    figures = replace(climb.after.figures, share_of_limit=1.248)
    climb = replace(climb, after=replace(climb.after, figures=figures, roof=(point,)))
    for text in (words(report(climb)), words(in_terminal(climb))):
        assert "above 100% of the limit: the workload, after 125%, decode, after 125%" in text
        assert "124.8%, above it" in text
    for text in (words(report(sample_climbs.cpu())), words(in_terminal(sample_climbs.cpu()))):
        assert "above 100%" not in text


def noisy(outcomes: tuple[RungOutcome, ...], factor: float) -> list[RungOutcome]:
    """The first round of each twice, or so, as fast as the others."""
    result = []
    for rung in outcomes:
        came = rung.achieved
        if came is not None:
            rounds = (came.before[0] * factor, *came.before[1:])
            rung = replace(rung, achieved=replace(came, before=rounds, after=rounds))
        result.append(rung)
    return result


def test_what_a_noisy_machine_made_of_a_rung_is_not_remembered() -> None:
    rungs = sample_climbs.cpu().rungs
    assert busy_words(rungs) is None
    assert quiet_rungs(rungs) == list(rungs)
    busy = noisy(rungs, 1.6)
    assert "not remembered" in (busy_words(busy) or "")
    assert quiet_rungs(busy) == []
    one = [*noisy(rungs[:1], 1.6), *rungs[1:]]
    assert busy_words(one) is None
    assert quiet_rungs(one) == list(rungs[1:])


@pytest.mark.parametrize(
    ("before", "after"), [(14.65, 47.94), (14.749, 47.85), (0.0123, 1.9), (99.96, 1234.5), (3, 2)]
)
def test_a_headline_divides(before: float, after: float) -> None:
    """Whatever the paired rounds say: the ratio is that of the two rates in the same line."""
    climb = sample_climbs.h200()
    sides = [
        replace(side, figures=replace(side.figures, output_tokens_per_s=rate))
        for side, rate in ((climb.before, before), (climb.after, after))
    ]
    climb = replace(climb, before=sides[0], after=sides[1])
    ratio, last, first = re.findall(r"[\d,.]+", climb.headline)
    quotient = float(last.replace(",", "")) / float(first.replace(",", ""))
    digits = 2 if quotient < 10 else 1 if quotient < 100 else 0
    assert float(ratio) == pytest.approx(quotient, abs=0.5 * 10**-digits + 1e-9)
    assert climb.to_json()["speedup"] == pytest.approx(after / before)
    assert "paired rounds" in " ".join(summary.facts(climb))
    assert climb.headline in in_terminal(climb)
    assert climb.headline in str(climb)


def test_a_climb_prints_itself() -> None:
    text = str(hostile("\x1b]0;owned\x07\x1b[31m[bold]x[/bold]\x9b2J"))
    assert not {"\x1b", "\x07", "\x9b"} & set(text)
    climb = sample_climbs.h200()
    assert all(rung.title[:20] in str(climb) for rung in climb.rungs)
    assert repr(climb).startswith("<Climb of ")


def test_predictions_that_are_remembered() -> None:
    climb = sample_climbs.cpu()
    found = summary.predictions(climb)
    assert [each.rung for each in found] == ["engine", "bf16", "int8"]  # graphs were not measured
    assert [each.is_close for each in found] == [True, False, True]
    assert found[0].device == "Intel Xeon Platinum 8488C"
    assert summary.predictions_in_words(climb).startswith("2 of 3 predictions came within ±20%")
    assert summary.predictions_in_words(sample_climbs.empty()) == ""


def test_what_changed_in_the_recipe() -> None:
    found = {
        row.name: (row.before, row.after) for row in summary.changed_fields(sample_climbs.h200())
    }
    assert found["loop"] == ("naive", "engine")
    assert found["kv.dtype"] == ("fp32", "bf16")
    assert found["scheme"] == ("not set", "fp8")
    assert found["graphs"] == ("no", "yes")
    assert "kv.page_size" not in found


# Files and commands.


def save_climb(climb: Climb, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "climb.json"
    path.write_text(json.dumps(climb.to_json()), encoding="utf-8")
    return path


def test_a_climb_comes_back_from_its_folder(tmp_path: Path, climb: Climb) -> None:
    path = save_climb(climb, tmp_path / "out")
    assert load_climb(tmp_path / "out") == load_climb(path) == climb


def edited(change: Callable[[dict[str, Any]], Any]) -> str:
    document = json.loads(json.dumps(sample_climbs.cpu().to_json()))
    change(document)
    return json.dumps(document)


BAD = {
    "no JSON": ("{", "cannot be read as JSON"),
    "a list": ("[1]", "holds no climb"),
    "nothing": ("{}", "missing"),
    "another schema": (edited(lambda d: d.update(schema=7)), "schema 7"),
    "unknown key": (edited(lambda d: d.update(modle="x")), "modle"),
    "a text for a number": (edited(lambda d: d.update(seconds="long")), "climb.seconds"),
    "no number": (edited(lambda d: d["before"]["figures"].update(output_tokens_per_s=math.nan)),
                  "climb.before.figures.output_tokens_per_s"),
    "a wrong word": (edited(lambda d: d["rungs"][0].update(status="won")), "allowed are kept"),
    "rungs that are none": (edited(lambda d: d.update(rungs=5)), "is no climb"),
    "a rung that is none": (edited(lambda d: d.update(rungs=["x"])), "is no climb"),
    "a number for an object": (edited(lambda d: d.update(versions=3)), "climb.versions"),
    "a truth for a number": (edited(lambda d: d.update(seconds=True)), "climb.seconds"),
}  # fmt: skip


@pytest.mark.parametrize("case", list(BAD))
def test_a_file_that_is_no_climb_is_refused(case: str, tmp_path: Path) -> None:
    text, expected = BAD[case]
    (tmp_path / "climb.json").write_text(text)
    with pytest.raises(UsageError, match=re.escape(expected)):
        load_climb(tmp_path)


def test_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_climb(sample_climbs.cpu(), tmp_path)
    page = tmp_path / "page.html"
    assert main(["report", "show", str(tmp_path), "--html", str(page)]) == 0
    shown = capsys.readouterr().out
    assert "3.14× the speed" in shown
    assert page.read_text(encoding="utf-8") == report(sample_climbs.cpu())
    assert main(["report", "show", str(tmp_path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert Climb.from_json(document["climb"]) == sample_climbs.cpu()
    assert main(["report", "show", str(tmp_path / "nothing")]) == 2
    assert "optimize" in capsys.readouterr().err
    assert main(["report", "show", str(tmp_path), "--html", str(tmp_path)]) == 2
    assert "give a file" in capsys.readouterr().err


def saved(climb: Climb, folder: Path) -> Path:
    folder.mkdir()
    (folder / "climb.json").write_text(json.dumps(climb.to_json()))
    return folder


def test_two_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = sample_climbs.h200(), sample_climbs.answer_first()
    faster = replace(second.after.figures, output_tokens_per_s=420.0)
    recipe = {**second.after.recipe, "scheme": "int4-g128"}
    second = replace(
        second, after=replace(second.after, figures=faster, recipe=recipe), workload="chat"
    )
    a, b, html = saved(first, tmp_path / "a"), saved(second, tmp_path / "b"), tmp_path / "both.html"
    assert main(["report", "compare", str(a), str(b), "--html", str(html)]) == 0
    shown = words(capsys.readouterr().out)
    assert "1.35× the speed" in shown
    assert main(["report", "compare", str(a), str(b), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["headline"] == (
        f"{b} has 1.35× the speed of {a}: 420 output tokens/s instead of 311"
    )
    assert document["notes"] == [f"not the same workload: {first.workload} in {a}, chat in {b}"]
    assert document["recipe"] == [{"name": "scheme", "first": "fp8", "second": "int4-g128"}]
    changes = {row["name"]: (row["first"], row["second"]) for row in document["changes"]}
    assert changes["weights in fp8"] == ("kept, 1.63×", "not tried")
    assert changes["weights in fp8 + twice as many requests at once"][1] == "kept, 1.42×"
    page = tree(html.read_text())
    assert page.one("h1").text == document["headline"]
    throughput = page.all("svg", "plot")[0]
    names = {
        point.attributes["data-tip"].partition(",")[0] for point in throughput.all("g", "point")
    }
    assert names == {f"…{str(path)[-27:]}" for path in (a, b)}  # both on one axis


def test_two_that_are_no_climbs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = saved(sample_climbs.cpu(), tmp_path / "a")
    assert main(["report", "compare", str(a), str(tmp_path / "none")]) == 2
    assert "there is no" in capsys.readouterr().err
    assert main(["report", "compare", str(a), str(a), "--html", str(tmp_path)]) == 2
    assert "is a folder" in capsys.readouterr().err


def test_rates_of_other_things_are_not_divided() -> None:
    module = replace(sample_climbs.cpu(), unit="calls/s")
    both = compare(NamedClimb("a", sample_climbs.cpu()), NamedClimb("b", module))
    assert "have no ratio" in both.headline


# The card.


def texts(svg: str) -> list[str]:
    return [
        node.text or "" for node in ElementTree.fromstring(svg).iter() if node.tag.endswith("}text")
    ]


def test_the_card_has_what_is_to_be_shared() -> None:
    shown = texts(card(sample_climbs.answer_first()))
    for wanted in (
        "meta-llama/Llama-3.1-8B-Instruct",
        "1.42×",
        "over the defaults",
        "311 instead of 219 output tokens/s",
        "over the plain loop",
        "78.0%",
        "Mean KL 0.0061 nats, perplexity +0.42%: inside the bound",
    ):
        assert wanted in shown
    assert any("NVIDIA H200" in text for text in shown)


def test_a_card_has_no_addresses() -> None:
    peer = PeerFigures("http://inner.host:8000", "model", output_tokens_per_s=240.0)
    shown = texts(card(replace(sample_climbs.answer_first(), peer=peer)))
    assert "over the peer" in shown
    assert "1.30×" in shown
    assert not any("inner.host" in text for text in shown)


def test_a_card_is_xml_whatever_stands_in_it(climb: Climb) -> None:
    root = ElementTree.fromstring(card(climb))
    assert (root.attrib["width"], root.attrib["height"]) == ("1200", "630")
    nasty = texts(card(hostile("\x00\x1b[31m<&" + HOSTILE)))
    assert any("<img src=x" in text for text in nasty)  # as text
    assert not any("\x1b" in text for text in nasty)


def test_lines_of_a_card_fit() -> None:
    for text in ElementTree.fromstring(card(sample_climbs.crowded())).iter():
        if text.tag.endswith("}text") and "text-anchor" not in text.attrib:
            wide = 0.5 * float(text.attrib["font-size"]) * len(text.text or "")
            assert float(text.attrib["x"]) + wide <= 1200 - 64


def test_the_card_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, path = saved(sample_climbs.cpu(), tmp_path / "a"), tmp_path / "card.svg"
    assert main(["report", "show", str(folder), "--card", str(path)]) == 0
    assert f"card: {path}" in capsys.readouterr().out.replace("\n", "")
    assert "over the beginning" in texts(path.read_text())


def test_accuracy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["report", "accuracy"]) == 0
    assert "no predictions recorded yet" in capsys.readouterr().out
    for _ in range(4):
        remember(summary.predictions(sample_climbs.cpu()))
    (tmp_path / "accuracy" / "predictions.jsonl").open("a").write("broken\n")
    assert main(["report", "accuracy"]) == 0
    shown = capsys.readouterr().out
    row = next(line.split() for line in shown.splitlines() if line.startswith("tensor cores"))
    assert row == ["tensor", "cores", "4", "54.9%", "+54.9%", "0%", "0%", "÷×", "1.55"]
    assert "1 lines" in shown
    assert main(["report", "accuracy", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["num"] == 12
    assert [each["area"] for each in document["areas"]] == [
        "fuse",
        "tensor cores",
        "quantize",
        "all",
    ]
    assert document["areas"][-1]["share_close"] == pytest.approx(2 / 3)
