"""What a climb has measured already, in its folder: a climb that was stopped goes on from there.

Each entry is kept under all that it depends on (state.py `setting`, the two states), so that
another model, workload, device or version measures anew. Failures are not kept: they may pass.

    finished = Finished(Path("climb/finished.json"))
    finished.put(key, {"outcome": …}); finished.get(key)
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from ridgeline.formats.files import atomic_write

SCHEMA = 1
log = logging.getLogger(__name__)


class Finished:
    def __init__(self, path: Path | None) -> None:
        """None: nothing is kept."""
        self.path = path
        self.entries: dict[str, Any] = {}
        if path is not None and path.is_file():
            self.entries = _read(path)

    def get(self, key: str) -> dict[str, Any] | None:
        return self.entries.get(key)

    def put(self, key: str, entry: dict[str, Any]) -> None:
        self.entries[key] = entry
        if self.path is not None:
            with atomic_write(self.path) as file:
                json.dump({"schema": SCHEMA, "entries": self.entries}, file, indent=1)


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["schema"] == SCHEMA:
            return dict(document["entries"])
        log.warning("%s is of another version; everything is measured anew", path)
    except (OSError, ValueError, TypeError, KeyError) as error:
        log.warning("%s is not readable (%s); measuring anew", path, type(error).__name__)
    return {}
