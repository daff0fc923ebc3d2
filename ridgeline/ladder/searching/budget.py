"""How long a climb may take, and how much of it is left: time goes to the rungs with the largest
predicted gain.

    budget = Budget(parse_duration("10m"))
    budget.fits(rung_s=25.0)     # so many rungs still fit
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ridgeline.errors import UsageError

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
FINISH_SHARE, LEAST_FINISH_S = 0.15, 10.0  # kept for the last comparison, curves and the report


def parse_duration(text: str) -> float:
    """`90s`, `10m`, `1.5h` in seconds."""
    result = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text.strip())
    if result is None or float(result[1]) <= 0:
        raise UsageError(f"--budget is {text!r}; give a time as 90s, 10m or 1h")
    return float(result[1]) * UNITS[result[2]]


@dataclass
class Budget:
    seconds: float | None  # None: as long as it takes
    clock: Callable[[], float] = time.monotonic
    began: float = field(default=0.0)
    finish_s: float = LEAST_FINISH_S  # that the end of the climb takes, as far as is known

    def __post_init__(self) -> None:
        self.began = self.clock()

    @property
    def used_s(self) -> float:
        return self.clock() - self.began

    @property
    def left_s(self) -> float:
        """For rungs: the end of the climb has its part."""
        if self.seconds is None:
            return float("inf")
        kept = max(FINISH_SHARE * self.seconds, self.finish_s)
        return self.seconds - kept - self.used_s

    def keep_for_the_end(self, seconds: float) -> None:
        """At least so much, though not more than half of it all."""
        if self.seconds is not None:
            self.finish_s = max(self.finish_s, min(seconds, self.seconds / 2))

    @property
    def rest_s(self) -> float:
        """For all that is to come."""
        return float("inf") if self.seconds is None else max(0.0, self.seconds - self.used_s)

    @property
    def is_spent(self) -> bool:
        return self.left_s <= 0

    def fits(self, rung_s: float) -> int | None:
        """Rungs that there is time for, if each takes so long; None: any number."""
        if self.seconds is None:
            return None
        return max(0, int(self.left_s // max(rung_s, 1e-3)))


PLAIN_LOOP = 1.5  # times what the first state took: loading the plain loop, and three rounds
MOST_FOR_PLAIN = 0.125  # of the budget: what only explains must not cost the search more


def plain_loop_s(budget: Budget, opening_s: float) -> float:
    """That is kept for measuring the plain loop beside the answer; 0 where it would take a budget
    too much, and is measured only in time that is left.
    """
    needed = PLAIN_LOOP * opening_s
    if budget.seconds is None or needed > MOST_FOR_PLAIN * budget.seconds:
        return 0.0
    return needed


FIRST_RUNG_S = 25.0  # taken until one was measured
LATEST = 4  # rungs that the next is expected to be like


@dataclass
class RungTimes:
    """What a rung takes, by those that were measured: comparing, and judging its answers."""

    first_judging_s: float = 0.0  # expected of the first, where the original is run too
    comparing: list[float] = field(default_factory=list)
    judging: list[float] = field(default_factory=list)
    once_s: float = 0.0  # of the last rung, what is done only once

    def judged(self, seconds: float) -> None:
        """Half of the first went into the original, which is kept for others."""
        is_first = not self.judging
        self.once_s = seconds / 2 if is_first else 0.0
        self.judging.append(seconds / 2 if is_first else seconds)

    def took(self, seconds: float, was_judged: bool) -> None:
        judging = self.judging[-1] + self.once_s if was_judged else 0.0
        self.comparing.append(max(0.0, seconds - judging))
        self.once_s = 0.0

    def expected(self, is_judged: bool) -> float:
        seconds = _mean(self.comparing) if self.comparing else FIRST_RUNG_S
        if not is_judged:
            return seconds
        return seconds + (_mean(self.judging) if self.judging else self.first_judging_s)


def _mean(seconds: list[float]) -> float:
    latest = seconds[-LATEST:]
    return sum(latest) / len(latest)
