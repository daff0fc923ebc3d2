"""Progress reporting: a callable that takes a label, the amount done and the total.

Long-running functions call it from time to time; the caller decides how to show it.

    def load(path: Path, progress: Progress | None = None) -> Model: ...

    with shown(True) as progress:       # bars, where stderr is a terminal
        load(path, progress)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[str, int, int], None]


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
