"""What a stretch of work spent in Triton's compiler, as the compiler tells it."""

from __future__ import annotations

from threading import Thread
from types import SimpleNamespace
from typing import Any

from triton import knobs

from ridgeline.bench.engine import setup_s
from ridgeline.kernels.compile_times import CompileTimes, waited_s


def told(name: str, microseconds: int, cache_hit: bool = False) -> None:
    """As triton.compile does."""
    listener: Any = knobs.compilation.listener
    about: dict[str, Any] = {"metadata": {}, "metadata_group": {}, "cache_hit": cache_hit}
    times = SimpleNamespace(total=microseconds)
    listener(src=SimpleNamespace(name=name), times=times, **about)


def test_what_was_compiled_and_what_was_found() -> None:
    with CompileTimes() as times:
        told("prefill_kernel", 2_000_000)
        told("finish_kernel", 500_000)
        told("prefill_kernel", 900, cache_hit=True)
    assert times.seconds == 2.5
    assert times.words() == (
        "2 kernels compiled, 2.5 s together (prefill_kernel 2.0 s), 1 found in the cache"
    )
    assert knobs.compilation.listener is None


def test_a_warm_start_says_so() -> None:
    with CompileTimes() as times:
        told("finish_kernel", 900, cache_hit=True)
    assert times.words() == "no kernel compiled, 1 found in the cache"


def test_what_the_work_waited_for_is_no_time_of_its_steps() -> None:
    """Kernels that are compiled beside it by other threads are not waited for here: those of steps
    that are captured, whose time the graphs count.
    """
    engine: Any = SimpleNamespace(runner=SimpleNamespace(graphs=SimpleNamespace(setup_s=3.0)))
    assert waited_s() == 0.0
    with CompileTimes() as times:
        told("prefill_kernel", 2_000_000)
        told("finish_kernel", 900, cache_hit=True)
        beside = Thread(target=told, args=("skinny_kernel", 4_000_000))
        beside.start()
        beside.join()
        assert times.seconds == 6.0
        assert waited_s() == 2.0
        assert setup_s(engine) == 5.0
    assert waited_s() == 0.0
