"""Progress reporting: a callable that takes a label, the amount done and the total.

Long-running functions call it from time to time; the caller decides how to show it (cli/terminal.py
draws bars).

    def load(path: Path, progress: Progress | None = None) -> Model: ...
"""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
