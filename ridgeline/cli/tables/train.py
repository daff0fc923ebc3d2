"""How a training run is shown: a table on a terminal, lines elsewhere, and the result."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.table import Table

from ridgeline.cli.tables.train_plan import draw_plan, duration
from ridgeline.cli.terminal import Terminal
from ridgeline.hardware.units import human_bytes
from ridgeline.profiling.collective_rows import waiting_sentence
from ridgeline.progress import bar
from ridgeline.training.run import OnRow

LINE_EVERY_S = 10.0  # seconds between lines where there is no terminal
FIGURES = {  # of a row: the figure's name, and how it is written
    "loss": ("loss", ".4f"),
    "held_out_loss": ("held-out loss", ".4f"),
    "lr": ("lr", ".2e"),
    "gradient_norm": ("gradient norm", ".3g"),
    "lost_updates": ("lost updates", ".1%"),
    "tokens": ("tokens", ","),
    "tokens_per_s": ("tokens/s", ",.0f"),
    "mfu": ("MFU", ".1%"),
    "mfu_measured": ("of peak", ".1%"),
}
GAP = 3  # columns between figures


class RunView:
    """The newest figures of a run. rich draws it again several times a second."""

    def __init__(self) -> None:
        self._figures: dict[str, Any] = {}
        self._began = time.perf_counter()
        self._begun_at: float | None = None  # share done when this process began
        self._first_held_out: float | None = None

    def take(self, row: dict[str, Any]) -> None:
        self._figures |= row
        if self._begun_at is None:
            self._begun_at = row["done"]
        if self._first_held_out is None:
            self._first_held_out = row.get("held_out_loss")

    @property
    def done(self) -> float:
        return float(self._figures.get("done", 0.0))

    @property
    def remaining_s(self) -> float | None:
        """At the speed so far; None before there is one."""
        gained = self.done - (self._begun_at or 0.0)
        if gained <= 0:
            return None
        return (time.perf_counter() - self._began) * (1 - self.done) / gained

    def cells(self) -> dict[str, str]:
        figures = self._figures
        cells = {}
        for key, (name, style) in FIGURES.items():
            if figures.get(key) is not None:
                cells[name] = f"{figures[key]:{style}}"
            if key == "held_out_loss" and self._first_held_out not in (None, figures.get(key)):
                cells["at first"] = f"{self._first_held_out:{style}}"
        if figures.get("memory_bytes"):
            cells["memory"] = human_bytes(figures["memory_bytes"])
        return cells

    def heading(self) -> str:
        """`42%  step 7  1 min 20 s left`."""
        words = [f"{self.done:4.0%}", f"step {self._figures.get('step', 0):,}"]
        if self.remaining_s is not None and self.done < 1:
            words.append(f"{duration(self.remaining_s)} left")
        return "  ".join(words)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield bar(self.done).append(f" {self.heading()}")
        cells = self.cells()
        if not cells:
            return
        names, values = (max(map(len, each)) for each in (cells, cells.values()))
        across = max(1, (options.max_width + GAP) // (names + 1 + values + GAP))
        table = Table.grid(padding=(0, 1, 0, 0))
        for column in range(across):
            if column:
                table.add_column(width=GAP - 2)
            table.add_column(style="dim", no_wrap=True, min_width=names)
            table.add_column(justify="right", no_wrap=True, min_width=values)
        entries = list(cells.items())
        for start in range(0, len(entries), across):
            row: list[str] = []
            for name, value in entries[start : start + across]:
                row += [""] if row else []
                row += [name, value]
            table.add_row(*row)
        yield table

    def line(self) -> str:
        """Of a step; what was measured has lines of its own."""
        cells = self.cells()
        for name in ("held-out loss", "at first"):
            cells.pop(name, None)
        return ", ".join([self.heading(), *(f"{name} {value}" for name, value in cells.items())])


@contextmanager
def shown_run(terminal: Terminal) -> Iterator[OnRow]:
    """A callable for the rows of a run: a live table on a terminal, else a line on stderr now and
    then; nothing with --json.
    """
    view = RunView()
    if terminal.json:
        yield lambda row: None
        return
    if not terminal.shows_progress:
        yield lines(view)
        return
    with Live(view, console=Console(stderr=True), transient=True, refresh_per_second=4) as live:

        def draw(row: dict[str, Any]) -> None:
            if "warning" in row:
                live.console.print(f"warning: {row['warning']}", markup=False)
                return
            view.take(row)

        yield draw


def lines(view: RunView) -> OnRow:
    last = 0.0

    def write(row: dict[str, Any]) -> None:
        nonlocal last
        if "warning" in row:
            print(f"warning: {row['warning']}", file=sys.stderr, flush=True)
            return
        view.take(row)
        now = time.perf_counter()
        if "held_out_loss" in row:
            step, loss = row["step"], row["held_out_loss"]
            text = f"after step {step:,}" if step else "before the first step"
            print(f"held-out loss {loss:.4f} {text}", file=sys.stderr, flush=True)
        elif now - last >= LINE_EVERY_S:
            last = now
            print(view.line(), file=sys.stderr, flush=True)

    return write


def speed(result: dict[str, Any]) -> str:
    """Of a step, in the median, beside what was predicted."""
    text, predicted = f"{result['tokens_per_s']:,.0f} tokens/s", result["predicted_tokens_per_s"]
    if predicted is None:
        return text
    ratio = result["tokens_per_s"] / predicted
    return f"{text}, {ratio:.0%} of the {predicted:,.0f} that were predicted"


def render(result: dict[str, Any], console: Console) -> None:
    def say(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    if "dry_run" in result:
        draw_plan(result, console)
        return
    if "launch" in result:
        say(f"{result['title']}: {result['job']}, with {result['config']}")
        say(result["submitted"] or "start with:")
        for command in result["commands"] if result["submitted"] is None else ():
            say(f"  {command}")
        return
    if "adapter" in result:
        say(f"merged {result['adapter']} into its base, in {result['dtype']}")
        say(
            f"logits differ by {result['difference']:.3g} from those of base and adapter; "
            f"rounding explains {result['rounding']:.3g}, and the adapter changes them by "
            f"{result['effect']:.3g}"
        )
        say(f"model: {result['out']}")
        return
    verb = "interrupted after" if result["interrupted"] else "trained"
    steps = f"{result['steps']:,} step{'' if result['steps'] == 1 else 's'}"
    took, whole = duration(result["seconds"]), duration(result["wall_s"])
    say(f"{verb} {steps}, {result['tokens']:,} tokens in {took}; {whole} with the last checkpoint")
    if result["tokens_per_s"] is not None:
        say(f"speed: {speed(result)}")
    if result["communication"] is not None:
        say(f"communication: {waiting_sentence(result['communication'])}")
    before, after = result["held_out_loss_before"], result["held_out_loss"]
    if before is not None and after is not None:
        say(f"held-out loss: {after:.4f}, before {before:.4f}")
    if result["quarantine"] is not None:
        say(result["quarantine"])
    say(f"checkpoint: {result['checkpoint']}")
    say(f"report: {result['report']}")
    if result["num_saves"]:
        count, waited = result["num_saves"], f"{result['stall_s']:.2g} s"
        say(
            f"saved {count} times while it ran: steps waited {waited} ({result['stall_share']:.2%})"
        )
    if result["interrupted"]:
        say(f"go on: ridgeline train --out {shlex.quote(result['out'])} --resume")
    else:
        say(f"serve it: ridgeline serve {shlex.quote(result['checkpoint'])}")
