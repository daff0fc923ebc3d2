"""What a piece of code allocates on the CPU at its peak, as torch's own allocator reports it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch.profiler import ProfilerActivity, profile

from ridgeline.products import PIECE, scratch


class Allocations(NamedTuple):
    peak_bytes: int  # above what was allocated before
    kept_bytes: int  # still allocated at the end, what is returned included
    result: Any


def allocations(call: Callable[[], Any]) -> Allocations:
    """Run it under the profiler and add up every allocation and release in order of time, without
    the scratch that products keep: a plan has it in another item.
    """
    for use in ("x", "weight", "result"):
        scratch(use, PIECE)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        result = call()
    assert found.profiler is not None
    events = found.profiler.kineto_results.events()
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    live = peak = 0
    for _, change in sorted(changes, key=lambda entry: entry[0]):
        live += change
        peak = max(peak, live)
    return Allocations(peak, live, result)
