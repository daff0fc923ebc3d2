"""The report of a climb: one HTML file that needs no network.

write_report(climb, Path("out/report.html"))
"""

from __future__ import annotations

from pathlib import Path

from ridgeline.ladder.outcome import Climb


def write_report(climb: Climb, path: Path) -> None:
    """Whole or not at all; OutputError where the file cannot be written."""
    raise NotImplementedError
