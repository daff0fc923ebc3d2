"""Where a climb stands: a recipe, the loop that runs it, and the checkpoint it is run from. An edit
leads from one state to the next.

    state = applied(baseline("cpu"), {"loop": "engine", "kernels": "fused"})
    state.key                       # the same for the same state
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ridgeline.data.workload import Workload
from ridgeline.hardware import Hardware
from ridgeline.models import ModelConfig
from ridgeline.profiling.predicting.prediction import LoopName
from ridgeline.recipe import VERSION, Recipe, edited_at_once, recipe_from
from ridgeline.version import __version__

NOT_OF_WEIGHTS = ("kv", "limits", "graphs", "overlap")  # fields that weights do not depend on
RecipeEdit = Mapping[str, Any]  # dotted recipe fields and their values; "loop"; "folder"


@dataclass(frozen=True)
class ClimbState:
    recipe: Recipe
    loop: LoopName
    folder: str | None = None  # a checkpoint with calibrated codes, instead of the model

    def to_json(self) -> dict[str, Any]:
        recipe = {"version": VERSION} | asdict(self.recipe)
        return {"recipe": recipe, "loop": self.loop, "folder": self.folder}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> ClimbState:
        return cls(recipe_from(document["recipe"]), document["loop"], document["folder"])

    @property
    def key(self) -> str:
        return digest(self.to_json())

    @property
    def weights_key(self) -> str:
        """The same for states whose weights are the same: they differ in limits, pages, and how
        steps are launched.
        """
        plain = Recipe()
        same = {name: getattr(plain, name) for name in NOT_OF_WEIGHTS}
        return replace(self, recipe=replace(self.recipe, **same)).key


def baseline(device: str, dtype: Any = "fp32") -> ClimbState:
    """The plain loop, with everything off that is a rung: nothing in it is left to "auto" that
    would choose a faster way.
    """
    on_cpu = device == "cpu"
    plain = Recipe(dtype=dtype, kernels="reference", graphs=False, overlap=False)
    return ClimbState(replace(plain, tuned=on_cpu), "naive")


def applied(state: ClimbState, edit: RecipeEdit) -> ClimbState:
    fields = {name: value for name, value in edit.items() if name not in ("loop", "folder")}
    return ClimbState(
        edited_at_once(state.recipe, fields),
        edit.get("loop", state.loop),
        edit.get("folder", state.folder),
    )


@dataclass(frozen=True)
class ClimbSubject:
    """What is optimized: a checkpoint, or a shape with random weights."""

    name: str  # as the user gave it
    path: Path | None
    shape: str | None
    config: ModelConfig
    device: str  # "cpu" or "cuda:0"

    @property
    def has_random_weights(self) -> bool:
        return self.path is None

    def identity(self) -> list[Any]:
        """Changes when the weights do, as far as files tell."""
        if self.path is None:
            return ["shape", self.shape]
        files = sorted(self.path.iterdir()) if self.path.is_dir() else [self.path]
        weights = [file for file in files if file.suffix in (".safetensors", ".gguf", ".json")]
        facts = [(file.name, file.stat()) for file in weights]
        return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in facts]


def setting(subject: ClimbSubject, workload: Workload, hardware: Hardware, more: RecipeEdit) -> str:
    """All besides the states that a measurement depends on, as one word."""
    machine = [hardware.summary(), dict(hardware.versions)]
    return digest([subject.identity(), asdict(workload), *machine, __version__, dict(more)])


def digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
