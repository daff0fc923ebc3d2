"""How good predictions were: what was predicted and achieved is kept over runs, in a file of the
user's cache folder, so that the next prediction can say how far off they usually are.

    remember([Outcome("quantize", "int8", 1.9, 2.05, "NVIDIA H200", "demo")])
    interval_factor("quantize").factor       # 1.14: four of five were within this factor

One line of JSON for each; lines that cannot be read are skipped and counted. Who makes predictions
(gains.py) takes the factor from here; the ladder remembers what came of them.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from ridgeline.errors import OutputError
from ridgeline.formats.line_store import append_lines, read_lines
from ridgeline.hardware.paths import cache_dir

CLOSE = 0.2  # of what was achieved: "within ±20%"
COVERAGE = 0.8  # share of the outcomes that an interval is to hold
DEFAULT_FACTOR = 1.3  # while there is no history; a guess, and said to be one
LEAST_FACTOR = 1.03  # measurements differ by that much themselves
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PredictionOutcome:
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

    def __post_init__(self) -> None:
        for name in ("predicted", "achieved", "low", "high"):
            value = getattr(self, name)
            if value is None and name in ("low", "high"):
                continue
            if not (isinstance(value, int | float) and 0 < value < math.inf):
                raise ValueError(f"{name} is {value!r}; give a positive number")
        for name in ("area", "rung", "device", "model", "created"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} is {getattr(self, name)!r}; give a text")

    @property
    def error(self) -> float:
        """How far the prediction was above what came, as a share of that: 0.1 is 10% too high."""
        return self.predicted / self.achieved - 1.0

    @property
    def is_close(self) -> bool:
        return abs(self.error) <= CLOSE + 1e-9

    @property
    def held(self) -> bool | None:
        """Whether its interval held what came; None where none was given."""
        if self.low is None or self.high is None:
            return None
        return self.low <= self.achieved <= self.high


@dataclass(frozen=True)
class KnownAccuracy:
    outcomes: tuple[PredictionOutcome, ...]  # oldest first
    num_broken: int  # lines that could not be read


@dataclass(frozen=True)
class Factor:
    """A prediction's interval is from `speedup / factor` to `speedup * factor`."""

    factor: float
    num_outcomes: int  # it rests on; 0: the default
    basis: str  # in words


@dataclass(frozen=True)
class Accuracy:
    """How far off predictions were, of one area or of all."""

    area: str
    num: int
    median_error: float  # of the sizes, whichever the direction
    bias: float  # median with its sign: above zero, predictions were too high
    share_close: float  # within ±20%
    share_held: float | None  # of those with an interval; None where none had one

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def store_path() -> Path:
    return cache_dir() / "accuracy" / "predictions.jsonl"


def remember(outcomes: Iterable[PredictionOutcome], path: Path | None = None) -> None:
    """Adds to the file, which keeps the latest. A disk that cannot be written costs a warning."""
    path, now = path or store_path(), datetime.now(UTC).isoformat(timespec="seconds")
    stamped = [replace(each, created=each.created or now) for each in outcomes]
    try:
        append_lines(path, [json.dumps(asdict(each), allow_nan=False) for each in stamped])
    except (OSError, OutputError) as error:
        log.warning("%s; how good these predictions were is not remembered", error)


def known_errors(
    area: str | None = None, device: str | None = None, path: Path | None = None
) -> KnownAccuracy:
    """Those of an area and a device, where given."""
    path = path or store_path()
    try:
        lines = read_lines(path)
    except OSError as error:
        log.warning("cannot read %s (%s); no earlier prediction is known", path, error.strerror)
        return KnownAccuracy((), 0)
    read = [_outcome(line) for line in lines]
    num_broken = read.count(None)
    if num_broken:
        log.warning("%s: %d lines cannot be read and are skipped", path, num_broken)
    return KnownAccuracy(
        tuple(
            each
            for each in read
            if each is not None and area in (None, each.area) and device in (None, each.device)
        ),
        num_broken,
    )


def interval_factor(area: str, device: str | None = None, path: Path | None = None) -> Factor:
    """From the errors of this area, on this device where there are enough of them, or anywhere; a
    stated default otherwise.
    """
    own = known_errors(area, path=path).outcomes
    here = [each for each in own if each.device == device]
    for outcomes, where in ((here, f" on {device}"), (own, "")):
        factor = factor_of(outcomes)
        if factor is not None:
            source = f"the last {len(outcomes)} predictions of {area}{where}"
            return Factor(factor, len(outcomes), source)
    why = f"only {len(own)} predictions" if own else "no prediction"
    return Factor(DEFAULT_FACTOR, 0, f"a default; {why} of {area} measured so far")


def factor_of(outcomes: Sequence[PredictionOutcome]) -> float | None:
    """The factor that at least COVERAGE of outcomes stay within, if the next is like those before:
    of n distances the ⌈(n + 1) · coverage⌉-th, which four at least have. None for fewer.
    """
    distances = sorted(abs(math.log(each.achieved / each.predicted)) for each in outcomes)
    rank = math.ceil((len(distances) + 1) * COVERAGE)
    if rank > len(distances):
        return None
    return max(LEAST_FACTOR, math.exp(distances[rank - 1]))


def accuracy_of(outcomes: Sequence[PredictionOutcome], area: str) -> Accuracy:
    errors = [each.error for each in outcomes]
    held = [each.held for each in outcomes if each.held is not None]
    return Accuracy(
        area,
        len(outcomes),
        median(map(abs, errors)),
        median(errors),
        sum(each.is_close for each in outcomes) / len(outcomes),
        sum(held) / len(held) if held else None,
    )


def accuracy_by_area(outcomes: Sequence[PredictionOutcome]) -> list[Accuracy]:
    """In the order in which areas were first met."""
    areas = dict.fromkeys(each.area for each in outcomes)
    return [accuracy_of([o for o in outcomes if o.area == area], area) for area in areas]


def _outcome(line: bytes) -> PredictionOutcome | None:
    """None for a line that was cut off, edited, or written by another version."""
    try:
        values: Mapping[str, Any] = json.loads(line)
        return PredictionOutcome(
            **{each.name: values[each.name] for each in fields(PredictionOutcome)}
        )
    except (ValueError, TypeError, KeyError):
        return None
