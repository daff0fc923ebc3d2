"""How long work tells of its progress: a callable that takes a label, what is done and the total.

Whoever works calls it now and then; whoever shows it decides how (cli/terminal.py draws bars).

    def load(path: Path, progress: Progress | None = None) -> Model: ...
"""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
