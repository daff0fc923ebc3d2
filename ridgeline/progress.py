"""Progress reporting: a callable that takes a label, the amount done and the total.

Long-running functions call it from time to time; the caller decides how to show it.

    def load(path: Path, progress: Progress | None = None) -> Model: ...

    with shown(True) as progress:       # bars, where stderr is a terminal
        load(path, progress)

A run of many parts that has a budget and a best so far is shown as a whole, with one bar or, where
there is no terminal, a line for each thing it does:

    with one_bar() as whole:
        whole.show(Standing("weights in int8", "311 tokens/s, 1.42× the defaults", 72.0, 240.0))
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.text import Text

Progress = Callable[[str, int, int], None]
BAR = 20  # columns


@dataclass(frozen=True)
class Standing:
    """Where a run of many parts stands."""

    doing: str
    best: str = ""  # so far, in words; "" while there is none
    used_s: float = 0.0
    budget_s: float | None = None
    num_done: int = 0  # things that were to be tried
    num_all: int = 0
    part: str = ""  # how far what it is doing has come: "40%"

    @property
    def share(self) -> float:
        """Of the time that there is, or else of what is to be tried."""
        if self.budget_s is not None:
            return self.used_s / self.budget_s
        return self.num_done / max(1, self.num_all)

    @property
    def time_words(self) -> str:
        """`1:12 of 4:00`."""
        used = clock_words(self.used_s)
        return used if self.budget_s is None else f"{used} of {clock_words(self.budget_s)}"


class WholeRun:
    """Shows a run as a whole. It is a `Progress` too: what its parts tell is what it is doing."""

    def __call__(self, label: str, done: int, total: int) -> None:
        self.show(Standing(label, part=part_words(done, total)))

    def show(self, standing: Standing) -> None:
        """Nothing, where nobody looks."""


class RunLines(WholeRun):
    """A line for each new thing that a run is doing."""

    def __init__(self, file: TextIO) -> None:
        self._file, self._last = file, ""

    def show(self, standing: Standing) -> None:
        if standing.doing == self._last:
            return
        self._last = standing.doing
        words = [f"{standing.time_words:>12}  {standing.doing}"]
        words += [f"best {standing.best}"] if standing.best else []
        print("; ".join(words), file=self._file, flush=True)


def part_words(done: int, total: int) -> str:
    """Empty where it says nothing: at the beginning and at the end."""
    return f"{done / total:.0%}" if 0 < done < total else ""


def clock_words(seconds: float) -> str:
    minutes, rest = divmod(int(max(0.0, seconds)), 60)
    return f"{minutes}:{rest:02d}"


@contextmanager
def one_bar() -> Iterator[WholeRun]:
    """One bar on stderr for the whole run: of its budget, or else of what is to be tried. It
    disappears with the block.
    """
    from rich.console import Console
    from rich.live import Live

    drawn = OneBar()
    with Live(drawn, console=Console(stderr=True), transient=True, refresh_per_second=4):
        yield drawn


class OneBar(WholeRun):
    """rich draws it again several times a second: the clock goes on while nothing is told."""

    def __init__(self) -> None:
        self.show(Standing("starting"))

    def show(self, standing: Standing) -> None:
        self._standing, self._began = standing, time.monotonic() - standing.used_s

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        now = replace(self._standing, used_s=time.monotonic() - self._began)
        line = bar(now.share)
        best = f"best {now.best}" if now.best else "no answer yet"
        line.append(f"  {now.time_words}").append(f"  {best}", "bold")
        for text in (line, Text(f"{now.doing} {now.part}".rstrip(), "dim")):
            text.truncate(options.max_width, overflow="ellipsis")
            yield text


def bar(share: float) -> Text:
    from rich.text import Text

    filled = round(BAR * min(1.0, max(0.0, share)))
    return Text().append("━" * filled, "green").append("─" * (BAR - filled), "dim")


@contextmanager
def bars() -> Iterator[Progress]:
    """Draws one bar per label on stderr; they disappear with the block."""
    from rich.console import Console
    from rich.progress import BarColumn, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = [
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    ]
    with Bars(*columns, console=Console(stderr=True), transient=True) as drawn:
        tasks: dict[str, TaskID] = {}

        def update(label: str, done: int, total: int) -> None:
            if label not in tasks:
                tasks[label] = drawn.add_task(label, total=total)
            drawn.update(tasks[label], completed=done, total=total)

        yield update


@contextmanager
def shown(progress: Progress | bool | None) -> Iterator[Progress | None]:
    """What a caller's `progress` stands for: a callable for itself, True for bars on a terminal."""
    if progress is True and sys.stderr.isatty():
        with bars() as drawn:
            yield drawn
    else:
        yield None if isinstance(progress, bool) else progress
