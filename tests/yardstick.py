"""How fast this core is now, for bounds on time that Python takes.

Others that share a core make everything on it two or three times slower, for minutes: a bound in
seconds holds for a core at rest, and is told apart from that by work of known size.
"""

from __future__ import annotations

import time

AT_REST_S = 0.4e-3  # for the additions below, by a 2.5 GHz core


def slowness() -> float:
    """What everything takes now, in times of what it takes a core at rest."""
    return min(_additions_s() for _ in range(5)) / AT_REST_S


def _additions_s() -> float:
    start, total = time.perf_counter(), 0
    for number in range(10_000):
        total += number
    return time.perf_counter() - start
