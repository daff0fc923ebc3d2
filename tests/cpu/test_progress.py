"""A long run as one bar, or as lines where there is no terminal."""

from __future__ import annotations

import io

from rich.console import Console

from ridgeline.progress import OneBar, RunLines, Standing, part_words

RUNNING = Standing("weights in int8", "311 tokens/s, 1.42× the defaults", 72.0, 240.0, 3, 14, "40%")


def drawn(standing: Standing, width: int = 120) -> str:
    bar = OneBar()
    bar.show(standing)
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(bar)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_bar_has_the_time_and_the_best_so_far() -> None:
    text = drawn(RUNNING)
    assert text.count("\n") == 2  # the bar, and below it what is being done
    for words in ("1:12 of 4:00", "best 311 tokens/s, 1.42× the defaults", "int8 40%"):
        assert words in text
    assert "no answer yet" in drawn(Standing("measuring the machine"))


def test_the_bar_fits_a_narrow_terminal() -> None:
    text = drawn(Standing("a change with a long name " * 9, RUNNING.best, 72.0, 240.0), width=80)
    assert text.count("\n") == 2
    assert RUNNING.best in text
    assert "…" in text


def test_the_bar_is_that_of_the_budget_or_of_the_changes() -> None:
    assert Standing("", "", 120.0, 240.0, 1, 10).share == 0.5
    assert Standing("", "", 120.0, None, 9, 10).share == 0.9
    assert Standing("").share == 0.0
    assert drawn(Standing("", "", 60.0, 240.0)).startswith("━" * 5 + "─" * 15 + " ")
    assert drawn(Standing("", "", 900.0, 240.0)).startswith("━" * 20 + " ")


def test_lines_where_there_is_no_terminal() -> None:
    file = io.StringIO()
    lines = RunLines(file)
    lines("measuring ceilings", 0, 3)
    lines("measuring ceilings", 1, 3)  # the same: once
    lines.show(RUNNING)
    assert file.getvalue().splitlines() == [
        "        0:00  measuring ceilings",
        "1:12 of 4:00  weights in int8; best 311 tokens/s, 1.42× the defaults",
    ]


def test_how_far_a_part_has_come() -> None:
    assert [part_words(done, 4) for done in (0, 1, 4)] == ["", "25%", ""]
    assert part_words(0, 0) == ""
