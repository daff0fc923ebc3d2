"""`OptimizedModule`: what `ridgeline.optimize(module, inputs)` gives. Called like the original,
with the outcomes of the climb that led to it.

    fast = ridgeline.optimize(module, x, max_error=0.02)
    y = fast(x)
    print(fast)                       # what was tried, kept and dropped, and why
    fast.report("report.html")
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import RenderableType
from torch import nn

from ridgeline.ladder.modules.forms.building import Built
from ridgeline.ladder.outcome import RungOutcome, Speedup
from ridgeline.ladder.reporting.report import write_report
from ridgeline.ladder.reporting.result import Climb
from ridgeline.profiling.modules.form import ModuleForm
from ridgeline.profiling.modules.result import ModuleProfile
from ridgeline.profiling.printing import PrintedResult


class OptimizedModule(PrintedResult):
    """Runs a changed copy; attributes that it has not itself are read from that copy."""

    def __init__(self, built: Built, climb: Climb, profile: ModuleProfile) -> None:
        self._built = built
        self.climb = climb
        self.profile = profile  # of the module as it was given

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        return self._built(*args, **keywords)

    def __repr__(self) -> str:
        return f"<OptimizedModule of {self.climb.model}: {self.climb.headline}>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"OptimizedModule has no attribute {name!r}")
        return getattr(self._built.module, name)

    @property
    def module(self) -> nn.Module:
        """The copy, changed; its calls go without what the form switches around them."""
        return self._built.module

    @property
    def form(self) -> ModuleForm:
        return self._built.form

    @property
    def rungs(self) -> tuple[RungOutcome, ...]:
        return self.climb.rungs

    @property
    def speedup(self) -> Speedup | None:
        """Over the original, measured at the end; None where nothing was kept."""
        return self.climb.total

    def table(self) -> RenderableType:
        """For `rich.print`: what was tried, predicted, achieved, kept and dropped, and why."""
        return self.climb.table()

    def report(self, path: str | Path) -> Path:
        """One self-contained HTML file."""
        write_report(self.climb, Path(path))
        return Path(path)
