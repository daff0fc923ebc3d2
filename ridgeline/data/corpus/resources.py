"""What a build takes of a machine: memory of each process, and how many processes fit.

num_workers(None, memory_gib=1.0, cores=8)        # 1
"""

from __future__ import annotations

from ridgeline.errors import UsageError

GIB = 1 << 30
# As processes were seen to take with units of 64 MB, the most of every stage; what they share of
# libraries counts once, in the builder's (2026-11-19, x86: 1.38 GiB with two workers on 209 MB of
# text, 0.72 with one in the builder's own process; 0.99 on 469 MB before parts were made smaller).
BUILDER_BYTES = int(0.3 * GIB)
WORKER_BYTES = int(0.65 * GIB)


def num_workers(wanted: int | None, memory_gib: float | None, cores: int) -> int:
    """UsageError where the memory given has no room for them."""
    if memory_gib is None:
        return wanted or cores
    fitting = int((memory_gib * GIB - BUILDER_BYTES) // WORKER_BYTES)
    least = (BUILDER_BYTES + WORKER_BYTES * (wanted or 1)) / GIB
    if fitting < (wanted or 1):
        raise UsageError(
            f"--memory {memory_gib:g} has no room for {wanted or 1} worker"
            f"{'s' if (wanted or 1) > 1 else ''}; give {least:.2g} or more"
        )
    return wanted or min(cores, fitting)
