"""Climbs that reports are drawn from, odd ones among them, and what a terminal shows of one."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import sample_climbs
from rich.console import Console

from ridgeline.cli.tables.optimize import climb_table
from ridgeline.ladder.reporting.result import Climb

HOSTILE = """</script></style><img src=x onerror=alert(1)>"'&[bold]"""


def one_rung() -> Climb:
    climb = sample_climbs.cpu()
    return replace(climb, rungs=climb.rungs[:1])


def all_failed() -> Climb:
    climb = sample_climbs.h200()
    rungs = [replace(each, status="failed", achieved=None, quality=None) for each in climb.rungs]
    return replace(climb, rungs=tuple(rungs), after=climb.before, total=None)


def no_ceilings() -> Climb:
    climb = sample_climbs.h200()
    return replace(climb, bandwidth=None, bandwidth_source=None, matrix_rates={})


def no_quality() -> Climb:
    climb = sample_climbs.h200()
    rungs = [replace(each, quality=None) for each in climb.rungs]
    return replace(climb, rungs=tuple(rungs), bounds={})


CLIMBS: dict[str, Callable[[], Climb]] = {
    "h200": sample_climbs.h200,
    "answer first": sample_climbs.answer_first,
    "cpu": sample_climbs.cpu,
    "empty": sample_climbs.empty,
    "one rung": one_rung,
    "all failed": all_failed,
    "no ceilings": no_ceilings,
    "no quality": no_quality,
}


@pytest.fixture(params=list(CLIMBS))
def climb(request: pytest.FixtureRequest) -> Climb:
    return CLIMBS[request.param]()


def in_terminal(climb: Climb, width: int = 120) -> str:
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    console.print(climb_table(climb))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def words(text: str) -> str:
    return " ".join(text.split())


def texts_replaced(value: Any, text: str) -> Any:
    """Every text of a JSON document, but for the words that a field must have."""
    if isinstance(value, dict):
        return {
            (key if isinstance(each, dict | list | tuple) or key in FIELDS else text + key): (
                each if key in WORDS else texts_replaced(each, text)
            )
            for key, each in value.items()
        }
    if isinstance(value, list | tuple):
        return [texts_replaced(each, text) for each in value]
    return text if isinstance(value, str) else value


WORDS = {"status", "area", "goal", "loop", "bound", "task"}


FIELDS = set(re.findall(r'"(\w+)":', json.dumps(sample_climbs.h200().to_json()))) - {
    "torch",
    "cuda",
}


def hostile(text: str = HOSTILE) -> Climb:
    return Climb.from_json(texts_replaced(sample_climbs.h200().to_json(), text))
