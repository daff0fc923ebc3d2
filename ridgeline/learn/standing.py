"""How far a reader is: which lessons ran here and which exercises are solved, in the cache folder.

Losing it loses nothing but ticks, so a file that cannot be read counts as empty, and one that
cannot be written is a reason to go on.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from ridgeline.errors import RidgelineError
from ridgeline.formats.files import atomic_write
from ridgeline.hardware.paths import cache_dir


def standing() -> dict[str, list[str]]:
    """By lesson: "ran", "solved"."""
    try:
        document = json.loads(_path().read_text(encoding="utf-8"))
        return {str(name): [str(word) for word in words] for name, words in document.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def note(lesson: str, word: str) -> None:
    known = standing()
    if word in known.get(lesson, []):
        return
    known[lesson] = sorted({*known.get(lesson, []), word})
    with suppress(OSError, RidgelineError), atomic_write(_path()) as file:
        json.dump(known, file, indent=2)


def _path() -> Path:
    return cache_dir() / "learn.json"
