"""What a verb may show besides its result: progress bars on stderr, and a console for people on
stdout.

Progress is drawn only when stdout and stderr are both terminals and `--json` was not given, so that
pipes and logs stay clean; a run of minutes writes a line for each thing it does instead. Lower
layers know nothing of it: they take a callable `progress(label, done, total)`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from ridgeline.progress import Progress, RunLines, WholeRun, bars, one_bar


class PipeConsole(Console):
    """rich ends the process with code 1 when the reader goes away; `main` ends it quietly."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


class Terminal:
    def __init__(self, json: bool = False) -> None:
        self.json = json
        self.console = PipeConsole(stderr=False, highlight=False, soft_wrap=False)
        self.shows_progress = not json and sys.stdout.isatty() and sys.stderr.isatty()

    @contextmanager
    def progress(self) -> Iterator[Progress]:
        """Yield a callable that draws one bar per label; each disappears with the block."""
        if not self.shows_progress:
            yield lambda label, done, total: None
            return
        with bars() as update:
            yield update

    @contextmanager
    def whole_run(self) -> Iterator[WholeRun]:
        """Yield what shows a long run as one: a bar, or lines on stderr where there is no terminal;
        with `--json` nothing.
        """
        if self.shows_progress:
            with one_bar() as bar:
                yield bar
        else:
            yield WholeRun() if self.json else RunLines(sys.stderr)
