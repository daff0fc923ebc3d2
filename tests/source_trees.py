"""The syntax trees of all files of the package. Python would look through their million nodes for
garbage again and again while it makes more of them, which takes three times as long.
"""

from __future__ import annotations

import ast
import gc
from functools import cache
from pathlib import Path

import ridgeline

PACKAGE = Path(ridgeline.__file__).parent


@cache
def trees() -> dict[Path, ast.Module]:
    collects = gc.isenabled()
    gc.disable()
    made = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
    if collects:
        gc.freeze()
        gc.enable()
    return made
