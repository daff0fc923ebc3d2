"""How good predictions were: what was predicted and achieved is kept over runs, in a file of the
user's cache folder, so that the next prediction can say how far off they usually are.

    remember([Outcome("quantize", "int8", 1.9, 2.05, "NVIDIA H200", "demo")])
    interval_factor("quantize").factor       # 1.14: most were within this factor of what came

One line of JSON for each; lines that cannot be read are skipped and counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Outcome:
    """One prediction that was measured. Speedups, end to end."""

    area: str  # of the ladder: "quantize"
    rung: str  # "int8"
    predicted: float
    achieved: float
    device: str  # its name: "NVIDIA H200"
    model: str
    low: float | None = None  # of the interval that was predicted
    high: float | None = None
    created: str = ""  # UTC, ISO 8601; filled in by `remember`

    @property
    def error(self) -> float:
        """How far the prediction was above what came, as a share of that: 0.1 is 10% too high."""
        return self.predicted / self.achieved - 1.0


@dataclass(frozen=True)
class Known:
    outcomes: tuple[Outcome, ...]  # oldest first
    num_broken: int  # lines that could not be read


@dataclass(frozen=True)
class Factor:
    """A prediction's interval is from `speedup / factor` to `speedup * factor`."""

    factor: float
    num_outcomes: int  # it rests on; 0: the default
    basis: str  # in words


def remember(outcomes: Iterable[Outcome], path: Path | None = None) -> None:
    """Adds to the file, which keeps the latest. A disk that cannot be written costs a warning."""
    raise NotImplementedError


def known_errors(
    area: str | None = None, device: str | None = None, path: Path | None = None
) -> Known:
    """Those of an area and a device, where given."""
    raise NotImplementedError


def interval_factor(area: str, device: str | None = None, path: Path | None = None) -> Factor:
    """From the errors of this area, on this device where there are enough of them, or anywhere; a
    stated default otherwise.
    """
    raise NotImplementedError
