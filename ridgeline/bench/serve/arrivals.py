"""When requests arrive: as a trace has them, at a rate, or whenever one of so many clients is free.

Arrivals.of_trace(workload, rate=2.0)      # its own pattern, at two a second on average
Arrivals.at_rate(10.0, num=500, seed=1)    # Poisson: as from many people who do not know of
                                           # each other
Arrivals.of_clients(64, num=500)           # each waits for its answer before it asks again
"""

from __future__ import annotations

import random
from typing import Literal, NamedTuple

from ridgeline.data.workload import Workload
from ridgeline.errors import UsageError

Pattern = Literal["trace", "poisson", "fixed"]
PATTERNS: tuple[Pattern, ...] = ("trace", "poisson", "fixed")


class Arrivals(NamedTuple):
    times: tuple[float, ...]  # seconds, ascending from 0
    description: str
    num_clients: int | None = None

    @property
    def rate(self) -> float | None:
        """Requests a second; None where clients wait for each other, or all come at once."""
        if self.num_clients is not None or self.times[-1] == 0:
            return None
        return (len(self.times) - 1) / self.times[-1]

    @classmethod
    def of_trace(
        cls, workload: Workload, rate: float | None = None, num: int | None = None
    ) -> Arrivals:
        """The trace's own times, over and over until there are `num`; sped up to a rate."""
        own = [request.arrival_s for request in workload.requests]
        count = len(own) if num is None else num
        period = own[-1] + own[-1] / max(len(own) - 1, 1)
        times = [own[i % len(own)] + i // len(own) * period for i in range(count)]
        if rate is None:
            return cls(tuple(times), "as in the trace")
        _check_rate(rate)
        if times[-1] == 0:
            raise UsageError(
                f"workload {workload.name} has no arrival times; use --arrivals poisson or fixed"
            )
        factor = rate * times[-1] / (count - 1)
        return cls(tuple(time / factor for time in times), f"as in the trace, at {rate:g}/s")

    @classmethod
    def at_rate(
        cls, rate: float, num: int, pattern: Pattern = "poisson", seed: int = 0
    ) -> Arrivals:
        """`fixed` has equal gaps, `poisson` gaps that know nothing of each other. The latter are
        scaled so that a probe has the rate it is named after.
        """
        _check_rate(rate)
        draw = random.Random(seed)
        gaps = [draw.expovariate(1.0) if pattern == "poisson" else 1.0 for _ in range(num - 1)]
        scale = len(gaps) / sum(gaps) / rate if gaps else 0.0
        times, now = [0.0], 0.0
        for gap in gaps:
            now += gap * scale
            times.append(now)
        return cls(tuple(times), f"{pattern} at {rate:g}/s")

    @classmethod
    def of_clients(cls, num_clients: int, num: int) -> Arrivals:
        if num_clients < 1:
            raise UsageError(f"--concurrency is {num_clients}; give at least 1")
        return cls((0.0,) * num, f"{num_clients} clients, one request each at a time", num_clients)


def _check_rate(rate: float) -> None:
    if not 0 < rate < float("inf"):
        raise UsageError(f"--rate is {rate:g}; give requests a second, above 0")
