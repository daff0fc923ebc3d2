"""How many Triton kernels were compiled in a stretch of work, and how long that took each: with a
cold cache it is most of a first start. Kernels that are compiled beside each other (launch.py) take
less of the stretch than they do together.

    with CompileTimes() as times:
        engine.generate(...)
    times.words()     # "31 kernels compiled, 14.2 s together (prefill_kernel 3.1 s), 4 found …"
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any, Self

_now: CompileTimes | None = None  # the stretch that is heard


def waited_s() -> float:
    """What compiling held up whoever opened the stretch that is heard, so far; 0 where none is."""
    return 0.0 if _now is None else _now.waited_s


class CompileTimes:
    """Stretches do not overlap: the compiler tells one listener, from any of its threads."""

    def __init__(self) -> None:
        self.compiled: list[tuple[float, str]] = []  # seconds and name of each kernel
        self.found: list[str] = []  # in the cache on disk
        self.waited_s = 0.0  # compiling in the thread of the work itself, not beside it
        self._thread = threading.get_ident()

    def __enter__(self) -> Self:
        global _now
        _now = self
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
        global _now
        _now = None
        knobs = _compilation_knobs()
        if knobs is not None:
            knobs.listener = None

    def _heard(self, *, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
        if cache_hit:
            self.found.append(str(src.name))
        else:
            seconds = times.total / 1e6  # from microseconds
            self.compiled.append((seconds, str(src.name)))
            if threading.get_ident() == self._thread:
                self.waited_s += seconds

    @property
    def seconds(self) -> float:
        return sum(seconds for seconds, _ in self.compiled)

    def words(self) -> str:
        found = f"{len(self.found)} found in the cache"
        if not self.compiled:
            return f"no kernel compiled, {found}"
        longest_s, name = max(self.compiled)
        return (
            f"{len(self.compiled)} kernels compiled, {self.seconds:.1f} s together "
            f"({name} {longest_s:.1f} s), {found}"
        )


def _compilation_knobs() -> Any:
    """None where Triton is not installed."""
    try:
        from triton import knobs
    except ImportError:
        return None
    return knobs.compilation
