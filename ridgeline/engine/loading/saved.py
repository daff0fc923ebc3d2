"""What lies beside a checkpoint's weights: a recipe, a tokenizer, values for sampling."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ridgeline.data import Tokenizer
from ridgeline.data.generation_config import FILE_NAME as GENERATION_FILE
from ridgeline.data.generation_config import GenerationConfig
from ridgeline.engine.requests.request import Sampling
from ridgeline.errors import ConfigError, UsageError
from ridgeline.recipe import FILE_NAME, Recipe

log = logging.getLogger(__name__)


class Beside(NamedTuple):
    """What a request needs to know of a model, beside its weights."""

    tokenizer: Tokenizer | None = None
    generation: GenerationConfig = GenerationConfig()

    @property
    def eos_ids(self) -> Sequence[int]:
        """The tokens that end an output."""
        return self.generation.eos_ids if self.tokenizer is None else self.tokenizer.eos_ids

    @property
    def default_sampling(self) -> Sampling:
        return Sampling(**self.generation.sampling)


def saved_recipe(path: Path) -> Recipe | None:
    folder = path if path.is_dir() else path.parent
    return Recipe.load(folder) if (folder / FILE_NAME).is_file() else None


def tokenizer_of(path: Path) -> Tokenizer | None:
    """A checkpoint that was saved without runs on token ids."""
    if path.is_dir() and not any(path.glob("tokenizer*")) and not any(path.glob("*.gguf")):
        log.info("%s has no tokenizer: prompts are token ids", path)
        return None
    return Tokenizer.load(path)


def generation_of(path: Path) -> GenerationConfig:
    """Which tokens end a text, and values for sampling, which are checked here."""
    generation = GenerationConfig.load(path)
    try:
        Sampling(**generation.sampling)
    except UsageError as error:
        raise ConfigError(f"{path / GENERATION_FILE}: {error}") from error
    return generation


def beside(path: Path) -> Beside:
    return Beside(tokenizer_of(path), generation_of(path))
