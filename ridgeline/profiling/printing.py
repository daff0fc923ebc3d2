"""Results that print themselves: `print(result)` shows the table that rich consoles show.

print(ridgeline.profile(module, x))   # a ModuleProfile, which is a PrintedResult
"""

from __future__ import annotations

import io
import shutil

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

USUAL_WIDTH = 100  # columns, where output goes to a file
MIN_WIDTH, MAX_WIDTH = 60, 140


class PrintedResult:
    """Subclasses say what their table is; a `repr` stays one short line."""

    def table(self) -> RenderableType:
        """For `rich.print`."""
        raise NotImplementedError

    def __rich__(self) -> RenderableType:
        return self.table()

    def __str__(self) -> str:
        return plain_text(self.table())


def plain_text(renderable: RenderableType, width: int | None = None) -> str:
    """Without colours; as wide as the terminal where no width is given."""
    if width is None:
        columns = shutil.get_terminal_size((USUAL_WIDTH, 24)).columns
        width = min(max(columns, MIN_WIDTH), MAX_WIDTH)
    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False)
    with console.capture() as captured:
        console.print(renderable)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def plain_table(title: str) -> Table:
    """Columns apart by two spaces, without lines."""
    return Table(
        title=title, title_justify="left", title_style="bold", header_style="dim", box=None,
        pad_edge=False, padding=(0, 2, 0, 0),
    )  # fmt: skip


def safe_text(text: object, style: str = "") -> Text:
    """Text that comes from files: neither rich's markup nor what a terminal takes for a command."""
    shown = "".join(
        char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in str(text)
    )
    return Text(shown, style=style)
