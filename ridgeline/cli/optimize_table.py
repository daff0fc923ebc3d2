"""A climb in the terminal: what report.html shows, in tables.

console.print(climb_table(climb))
"""

from __future__ import annotations

from rich.console import RenderableType

from ridgeline.ladder.outcome import Climb


def climb_table(climb: Climb) -> RenderableType:
    """All of it, for `console.print`; nothing in it is read as rich's markup."""
    raise NotImplementedError
