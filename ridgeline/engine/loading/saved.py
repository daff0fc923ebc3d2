"""What lies beside a checkpoint's weights: a recipe, a tokenizer."""

from __future__ import annotations

import logging
from pathlib import Path

from ridgeline.data import Tokenizer
from ridgeline.recipe import FILE_NAME, Recipe

log = logging.getLogger(__name__)


def saved_recipe(path: Path) -> Recipe | None:
    folder = path if path.is_dir() else path.parent
    return Recipe.load(folder) if (folder / FILE_NAME).is_file() else None


def tokenizer_of(path: Path) -> Tokenizer | None:
    """A checkpoint that was saved without runs on token ids."""
    if path.is_dir() and not any(path.glob("tokenizer*")) and not any(path.glob("*.gguf")):
        log.info("%s has no tokenizer: prompts are token ids", path)
        return None
    return Tokenizer.load(path)
