"""`Bench`: what the search asks of whoever measures. bench_processes.py does it in processes; tests
do it with numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ridgeline.ladder.measuring.observation import Observation
from ridgeline.ladder.outcome import Quality, Speedup
from ridgeline.ladder.state import ClimbState

Enough = Callable[[Speedup], bool]  # whether the rounds so far decide


class Bench(Protocol):
    """Measures. Raises WorkerError where a state cannot be run."""

    def open(self, state: ClimbState) -> Observation:
        """Load it and run it; it is the best so far."""

    def look(self, state: ClimbState) -> Observation:
        """At the steps of one that is loaded: what they are made of."""

    def observed(self, state: ClimbState) -> Observation:
        """What is known of one that is loaded, without a look at its steps."""

    def compare(self, before: ClimbState, after: ClimbState, enough: Enough) -> Speedup:
        """In rounds that take turns, until it is enough; `after` stays loaded."""

    def keep(self, state: ClimbState) -> Observation:
        """`state` was compared, and is the best now; what it was held against is let go, and its
        steps are looked at.
        """

    def drop(self, state: ClimbState) -> None:
        """Let it go."""

    def judge(self, state: ClimbState) -> Quality:
        """Against the unmodified model."""

    def calibrated(self, state: ClimbState) -> ClimbState:
        """The same scheme with codes found on data, from a checkpoint of its own."""
