"""How many Triton kernels were compiled in a stretch of work, and what of its time that took: with
a cold cache it is most of a first start.

    with CompileTimes() as times:
        engine.generate(...)
    times.words()     # "31 kernels compiled in 14.2 s"
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self


class CompileTimes:
    """Stretches do not overlap: the compiler tells one listener."""

    def __init__(self) -> None:
        self.num_compiled = 0
        self.num_found = 0  # in the cache on disk
        self.seconds = 0.0

    def __enter__(self) -> Self:
        knobs = _compilation_knobs()
        if knobs is not None:
            knobs.listener = self._heard
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        knobs = _compilation_knobs()
        if knobs is not None:
            knobs.listener = None

    def _heard(self, *, times: Any, cache_hit: bool, **_: Any) -> None:
        if cache_hit:
            self.num_found += 1
        else:
            self.num_compiled += 1
            self.seconds += times.total / 1e6  # they are in microseconds

    def words(self) -> str:
        return (
            f"{self.num_compiled} kernels compiled in {self.seconds:.1f} s, "
            f"{self.num_found} found in the cache"
        )


def _compilation_knobs() -> Any:
    """None where Triton is not installed."""
    try:
        from triton import knobs
    except ImportError:
        return None
    return knobs.compilation
