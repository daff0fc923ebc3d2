"""What becomes of memory that this process frees on a CPU.

    keep_freed_memory()         # before the first step

glibc takes blocks of more than 32 MiB from the system one by one, and gives them back when they are
freed: the next step's pages are cleared again, a fault for each 4 KiB. Kept, they are used again.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
SINGLE_BYTES = 1 << 30  # blocks from here on still come and go one by one
SPARE_BYTES = 2**31 - 1  # at the end of the heap; more goes back


def keep_freed_memory() -> None:
    """6% of the CPU time of a small model's step went into pages, and less than 1% with this;
    of a proof of the 1B shape under `shard=2`, where each gather takes new memory, 58 and 29%
    (2026-11-19). Elsewhere than glibc there is nothing to set.
    """
    with suppress(OSError, AttributeError, TypeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, SINGLE_BYTES)
        libc.mallopt(M_TRIM_THRESHOLD, SPARE_BYTES)
