"""A climb from its folder: `report show`, two side by side, the card, `report accuracy`."""

from __future__ import annotations

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
from html_tree import tree
from report_climbs import HOSTILE, hostile, words
from report_climbs import climb as climb

from ridgeline.cli import main
from ridgeline.errors import UsageError
from ridgeline.ladder.outcome import PeerFigures
from ridgeline.ladder.reporting import summary
from ridgeline.ladder.reporting.card import card
from ridgeline.ladder.reporting.comparing import NamedClimb, compare
from ridgeline.ladder.reporting.report import report
from ridgeline.ladder.reporting.result import Climb
from ridgeline.ladder.reporting.saved import load_climb
from ridgeline.profiling.predicting.accuracy import remember


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
