"""Where cached things live: the one place that reads the environment for it.

`RIDGELINE_CACHE`, else `XDG_CACHE_HOME`/ridgeline, else `~/.cache/ridgeline`. Nothing is created
here.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from ridgeline.errors import UsageError


def cache_dir() -> Path:
    """The folder for measured ceilings, fetched models and tuned choices; it need not exist yet."""
    own = os.environ.get("RIDGELINE_CACHE")
    if own:
        path = Path(own).expanduser().absolute()
        if path.exists() and not path.is_dir():
            raise UsageError(f"RIDGELINE_CACHE={own} is a file; set it to a folder")
        return path
    shared = os.environ.get("XDG_CACHE_HOME")
    if shared:
        return Path(shared).expanduser().absolute() / "ridgeline"
    try:
        return Path.home() / ".cache" / "ridgeline"
    except RuntimeError:  # a container without HOME and without an entry for this user
        return Path(tempfile.gettempdir()) / f"ridgeline-{os.getuid()}"
