"""How many Triton kernels were compiled in a stretch of work, and what of its time that took: with
a cold cache it is most of a first start.

    with CompileTimes() as times:
        engine.generate(...)
    times.words()     # "31 kernels compiled in 14.2 s (prefill_kernel 3.1 s), 4 found in the cache"
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self


class CompileTimes:
    """Stretches do not overlap: the compiler tells one listener."""

    def __init__(self) -> None:
        self.compiled: list[tuple[float, str]] = []  # seconds and name of each kernel
        self.num_found = 0  # in the cache on disk

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

    def _heard(self, *, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
        if cache_hit:
            self.num_found += 1
        else:
            self.compiled.append((times.total / 1e6, str(src.name)))  # from microseconds

    @property
    def seconds(self) -> float:
        return sum(seconds for seconds, _ in self.compiled)

    def words(self) -> str:
        if not self.compiled:
            return f"no kernel compiled, {self.num_found} found in the cache"
        longest_s, name = max(self.compiled)
        return (
            f"{len(self.compiled)} kernels compiled in {self.seconds:.1f} s "
            f"({name} {longest_s:.1f} s), {self.num_found} found in the cache"
        )


def _compilation_knobs() -> Any:
    """None where Triton is not installed."""
    try:
        from triton import knobs
    except ImportError:
        return None
    return knobs.compilation
