"""How long something took, held against a limit in the second tier alone: `make test-all` asks for
it (RIDGELINE_TEST_CLOCK=1), `make test` does not, so that a busy machine fails no contributor.

    with within(5):
        engine.close()
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

IS_CHECKED = os.environ.get("RIDGELINE_TEST_CLOCK") == "1"


@contextmanager
def within(seconds: float, at_least: float = 0.0) -> Iterator[None]:
    start = time.monotonic()
    yield
    check_elapsed(time.monotonic() - start, seconds, at_least)


def check_elapsed(elapsed: float, seconds: float, at_least: float = 0.0) -> None:
    """For a stretch that no `with` fits around."""
    if IS_CHECKED:
        assert at_least <= elapsed < seconds
