"""Where the time of a climb went: seconds by what a worker was asked for.

with ledger.timing("load"): ...
ledger.seconds      # {"loading": 12.1, "rounds": 40.2}
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

NAMES = {
    "build": "building CUDA C++",
    "load": "loading",
    "warm": "compiling and capturing",
    "round": "rounds",
    "phases": "looking at steps",
    "curve": "curves over the batch",
    "highest_rate": "searching the highest rate",
    "prove": "proving the highest rate",
    "peer": "the peer",
    "judge": "quality",
    "calibrate": "finding codes on data",
    "write": "writing the checkpoint",
    "drop": "letting go of recipes",
}  # by what is asked for


class TimeLedger:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds: Counter[str] = Counter()

    @contextmanager
    def timing(self, do: str) -> Iterator[None]:
        """What a worker is asked for; failures take time too."""
        began = self._clock()
        try:
            yield
        finally:
            self._seconds[NAMES[do]] += self._clock() - began  # type: ignore[assignment]

    @property
    def seconds(self) -> dict[str, float]:
        """The largest first."""
        return dict(self._seconds.most_common())
