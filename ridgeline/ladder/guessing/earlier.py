"""What earlier climbs on this machine came to: the next one of the same model on a like workload
begins with their answer instead of a guess. Kept in a file of the user's cache folder, one line of
JSON for each climb; lines that cannot be read are skipped.

    remember_answer(EarlierAnswer(...))
    nearest_answer(known_answers(), like=EarlierAnswer(...))     # None: nothing is like it
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

from ridgeline.errors import OutputError, UsageError
from ridgeline.formats.line_store import append_lines, read_lines
from ridgeline.hardware.paths import cache_dir
from ridgeline.ladder.outcome import Goal
from ridgeline.recipe import Recipe, edited_at_once

# How unlike two workloads may be: the sum over prompt, output and requests at once of the
# logarithms of their ratios. One of the three may be twice as large, or each by a quarter.
LIKE = math.log(2.0)
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EarlierAnswer:
    device: str  # its name: "NVIDIA H200"
    model: str  # the architecture and its sizes, as one word (state.py `digest`)
    goal: Goal
    quality: bool  # whether answers were to be kept
    prompt_tokens: float  # of a request, in the mean
    output_tokens: float
    concurrency: float  # requests that are there at once
    edit: Mapping[str, Any]  # of the engine's defaults
    speedup: float  # over those
    first_was_last: bool  # whether what was tried first stayed the answer
    first_share: float  # of the answer's speed, that the first had
    from_earlier: bool = False  # whether that came from a climb before it
    created: str = ""  # UTC, ISO 8601; filled in by `remember_answer`

    def distance(self, other: EarlierAnswer) -> float:
        pairs = (
            (self.prompt_tokens, other.prompt_tokens),
            (self.output_tokens, other.output_tokens),
            (self.concurrency, other.concurrency),
        )
        return sum(abs(math.log(max(a, 1.0) / max(b, 1.0))) for a, b in pairs)

    def is_like(self, other: EarlierAnswer) -> bool:
        names = ("device", "model", "goal", "quality")
        same = all(getattr(self, name) == getattr(other, name) for name in names)
        return same and self.distance(other) <= LIKE


def store_path() -> Path:
    return cache_dir() / "accuracy" / "answers.jsonl"


def remember_answer(answer: EarlierAnswer, path: Path | None = None) -> None:
    """A disk that cannot be written costs a warning."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    line = json.dumps(asdict(replace(answer, created=answer.created or now)), allow_nan=False)
    try:
        append_lines(path or store_path(), [line])
    except (OSError, OutputError) as error:
        log.warning("%s; the next climb does not begin with this answer", error)


def known_answers(path: Path | None = None) -> list[EarlierAnswer]:
    """The oldest first."""
    path = path or store_path()
    try:
        lines = read_lines(path)
    except OSError as error:
        log.warning("cannot read %s (%s); no earlier answer is known", path, error.strerror)
        return []
    read = [_answer(line) for line in lines]
    if None in read:
        log.warning("%s: %d lines cannot be read and are skipped", path, read.count(None))
    return [each for each in read if each is not None]


def nearest_answer(known: Iterable[EarlierAnswer], like: EarlierAnswer) -> EarlierAnswer | None:
    """Of the most like workload; of equals the latest."""
    same = [each for each in known if each.is_like(like)]
    return min(reversed(same), key=like.distance, default=None)


@dataclass(frozen=True)
class FirstAnswerAccuracy:
    """How good it was to begin as climbs did."""

    num: int
    num_last: int  # where it stayed the answer
    num_from_earlier: int
    median_share: float  # of the answer's speed

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def first_answers(known: Sequence[EarlierAnswer]) -> FirstAnswerAccuracy | None:
    """None where no climb is known."""
    if not known:
        return None
    return FirstAnswerAccuracy(
        len(known),
        sum(each.first_was_last for each in known),
        sum(each.from_earlier for each in known),
        median(each.first_share for each in known),
    )


def _answer(line: bytes) -> EarlierAnswer | None:
    """None for a line that was cut off, edited, or written by another version."""
    try:
        values: Mapping[str, Any] = json.loads(line)
        answer = EarlierAnswer(**{each.name: values[each.name] for each in fields(EarlierAnswer)})
        numbers = ("prompt_tokens", "output_tokens", "concurrency", "speedup", "first_share")
        edited_at_once(Recipe(), answer.edit)
        is_whole = all(0 < getattr(answer, name) < math.inf for name in numbers)
        return answer if is_whole else None
    except (ValueError, TypeError, KeyError, AttributeError, UsageError):
        return None
