"""What a terminal says of a climb: the headline, bars, notes; the same as the page."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import sample_climbs
from report_climbs import all_failed, hostile, in_terminal, words
from report_climbs import climb as climb

from ridgeline.ladder.outcome import RungOutcome
from ridgeline.ladder.reporting import summary
from ridgeline.ladder.reporting.report import report
from ridgeline.ladder.reporting.result import Climb
from ridgeline.ladder.reporting.words import busy_words, quiet_rungs


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
