"""How a model wants to be sampled, as the files beside its weights say: which tokens end a text
(generation_config.json and config.json, `eos_token_id`), and values for sampling
(generation_config.json).

    generation = GenerationConfig.load(Path("Qwen3-0.6B"))
    generation.eos_ids, generation.sampling         # (151645, 151643), {"temperature": 0.6, …}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ridgeline.errors import ConfigError

FILE_NAME = "generation_config.json"
# Fields of that file that are options of `Sampling`, with their types.
SAMPLING = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
}


@dataclass(frozen=True)
class GenerationConfig:
    eos_ids: tuple[int, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)  # options of `Sampling`

    @classmethod
    def load(cls, path: Path) -> GenerationConfig:
        """Of a folder; a GGUF file has none."""
        if not path.is_dir():
            return cls()
        return cls(tuple(dict.fromkeys(end_ids_of(path))), _sampling_of(path / FILE_NAME))


def end_ids_of(folder: Path) -> list[int]:
    """The `eos_token_id` of both files: one id or a list."""
    end_ids: list[int] = []
    for name in (FILE_NAME, "config.json"):
        config = read_object(folder / name)
        value = config.get("eos_token_id")
        if value is None and isinstance(config.get("text_config"), dict):
            value = config["text_config"].get("eos_token_id")
        ids = value if isinstance(value, list) else [value] if value is not None else []
        for token_id in ids:
            if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
                raise ConfigError(
                    f"{folder / name} has eos_token_id {value!r}; expected a token id or a "
                    "list of them"
                )
        end_ids.extend(ids)
    return end_ids


def _sampling_of(path: Path) -> dict[str, Any]:
    config = read_object(path)
    values: dict[str, Any] = {}
    for name, kind in SAMPLING.items():
        value = config.get(name)
        if value is None:
            continue
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or kind(value) != value:
            raise ConfigError(f"{path} has {name} {value!r}; expected a number")
        values[name] = kind(value)
    if values.get("top_k", 0) < 0:  # some files say -1 for all
        values["top_k"] = 0
    return values


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file, or an empty one where there is no file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError, OSError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a JSON {type(value).__name__}; expected an object")
    return value
