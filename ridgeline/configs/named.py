"""Finds a named config: `configs:NAME` is one of training.py (of corpus.py for a recipe),
`FILE.py:NAME` one of the user's own, `FILE.json` one that a run, a build or `optimize --train` has
written.

named_run("configs:finetune_demo")
named_recipe("configs:web_english")
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from ridgeline.configs import corpus, training
from ridgeline.data.corpus.recipe import CorpusRecipe, load_recipe
from ridgeline.errors import UsageError, near_matches
from ridgeline.training.config import TrainConfig
from ridgeline.training.config_file import load_config

OWN = "configs"
Config = TypeVar("Config")


def is_named_run(text: str) -> bool:
    file, colon, _ = text.rpartition(":")
    return text.endswith(".json") or (bool(colon) and (file == OWN or file.endswith(".py")))


def named_run(text: str) -> TrainConfig:
    """The config that the function returns, or that the file holds."""
    if text.endswith(".json"):
        return load_config(Path(text))
    return named_config(text, (training,), (TrainConfig,))


def named_recipe(text: str) -> CorpusRecipe:
    """The recipe that the function returns, or that the file or the corpus holds."""
    if text.endswith((".json", ".toml")) or Path(text).is_dir():
        return load_recipe(Path(text))
    if ":" not in text:
        hint = near_matches(text, functions_of(corpus))
        raise UsageError(
            f"{text!r} is no recipe; give configs:NAME, FILE.py:NAME, or a .toml or .json{hint}"
        )
    return named_config(text, (corpus,), (CorpusRecipe,))


def named_config(text: str, own: Sequence[ModuleType], kinds: tuple[type[Config], ...]) -> Config:
    """What the function returns, one of these kinds; `own` are the modules of `configs:`."""
    file, _, name = text.rpartition(":")
    modules = own if file == OWN else [_imported(Path(file))]
    functions = {key: each for module in modules for key, each in functions_of(module).items()}
    if name not in functions:
        hint = near_matches(name, functions)
        there = ", ".join(functions) or "none"
        raise UsageError(f"{file} has no function {name!r}; it has {there}{hint}")
    try:
        config = functions[name]()
    except TypeError as error:
        raise UsageError(f"{text} must be a function without arguments: {error}") from error
    if not isinstance(config, kinds):
        allowed = " or a ".join(kind.__name__ for kind in kinds)
        raise UsageError(f"{text} returned a {type(config).__name__}; it must return a {allowed}")
    return config


def functions_of(module: ModuleType) -> dict[str, Any]:
    """Those that it defines itself."""
    return {
        key: value
        for key, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__
    }


def _imported(file: Path) -> ModuleType:
    if not file.is_file():
        raise UsageError(f"there is no file {str(file)!r}; give FILE.py:NAME")
    spec = spec_from_file_location(file.stem, file)
    assert spec is not None, file
    assert spec.loader is not None, file
    module = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (SyntaxError, ImportError) as error:
        raise UsageError(f"{file} cannot be imported: {error}") from error
    return module
