"""The rungs of a climb in the terminal, readable at 80 columns: a row each, and why the others were
not kept.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from ridgeline.ladder.outcome import RungOutcome, Speedup
from ridgeline.profiling.predicting.prediction import Prediction
from ridgeline.profiling.printing import plain_table, safe_text

STYLES = {"kept": "green", "dropped": "yellow", "failed": "red"}


def rungs_table(rungs: Sequence[RungOutcome]) -> Table:
    table = plain_table("The ladder")
    table.add_column("change")
    table.add_column("outcome", no_wrap=True)
    for name in ("predicted", "achieved", "error"):
        table.add_column(name, justify="right", no_wrap=True)
    for rung in rungs:
        style = STYLES.get(rung.status, "dim")
        cells = (rung.title, rung.status, _predicted(rung.predicted), _achieved(rung.achieved))
        table.add_row(*map(safe_text, cells), _error(rung), style=style)
    return table


def reasons_table(rungs: Sequence[RungOutcome]) -> Table:
    table = plain_table("Not kept, and why")
    table.show_header = False
    table.add_column("change", ratio=2)
    table.add_column("reason", ratio=3)
    for rung in rungs:
        table.add_row(safe_text(rung.title), safe_text(f"{rung.status}: {rung.reason}"))
    return table


def _predicted(prediction: Prediction | None) -> str:
    return "" if prediction is None else f"{prediction.speedup:.2f}×"


def _achieved(speedup: Speedup | None) -> str:
    if speedup is None:
        return ""
    return f"{speedup.value:.2f}× ({speedup.low:.2f}–{speedup.high:.2f})"


def _error(rung: RungOutcome) -> str:
    """What the change does to the answers: KL divergence of a model, relative error of a module."""
    if rung.quality is not None:
        return f"{rung.quality.mean_kl:.1e} KL"
    return "" if rung.difference is None else f"{rung.difference.relative_error:.1e}"
