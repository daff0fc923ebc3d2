"""Configs, speedups and errors of a climb of training, in words."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

from ridgeline.errors import RidgelineError
from ridgeline.formats.fields import dotted_fields
from ridgeline.ladder.outcome import Speedup
from ridgeline.training.config import TrainConfig


def changed_fields(before: TrainConfig, after: TrainConfig) -> Mapping[str, Any]:
    """Dotted, with their new values."""
    return {
        name: attrgetter(name)(after)
        for name in dotted_fields(TrainConfig)
        if attrgetter(name)(before) != attrgetter(name)(after)
    }


def changes_words(before: TrainConfig, after: TrainConfig) -> str:
    """`recomputation none, micro 8`."""
    changed = changed_fields(before, after).items()
    return ", ".join(f"{name.rpartition('.')[2]} {value}" for name, value in changed)


def in_words(speedup: Speedup) -> str:
    return f"{speedup.value:.2f}× ({speedup.low:.2f} to {speedup.high:.2f})"


def one_line(error: BaseException) -> str:
    first = (str(error).strip().splitlines() or [""])[0][:300]
    return first if isinstance(error, RidgelineError) else f"{type(error).__name__}: {first}"
