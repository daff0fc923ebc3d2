"""What a worker loads, and the file that holds its workload.

Spec(subject.path, None, "cpu", "engine", recipe, goal="latency", workload="climb/w.json")
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ridgeline.data.workload import Workload, WorkloadRequest
from ridgeline.formats.files import atomic_write
from ridgeline.ladder.outcome import Goal
from ridgeline.models import ModelConfig
from ridgeline.models.checkpoint import open_checkpoint
from ridgeline.models.families import describe
from ridgeline.models.shapes import describe_shape
from ridgeline.profiling.predicting.prediction import LoopName
from ridgeline.recipe import VERSION, Recipe, recipe_from


@dataclass(frozen=True)
class WorkerSpec:
    path: str | None  # of the model; one of the two
    shape: str | None
    device: str
    loop: LoopName
    recipe: Recipe
    goal: Goal
    workload: str  # a file of `write_workload`
    folder: str | None = None  # with calibrated codes, instead of the model
    num_pages: int | None = None  # at most
    build: bool = False  # whether CUDA kernels are built first

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"recipe": {"version": VERSION} | asdict(self.recipe)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> WorkerSpec:
        return cls(**{**document, "recipe": recipe_from(document["recipe"])})

    @property
    def config(self) -> ModelConfig:
        if self.shape is not None:
            return describe_shape(self.shape).config
        assert self.path is not None, "a subject is a path or a shape"
        return describe(open_checkpoint(Path(self.path))).config


def write_workload(workload: Workload, path: Path) -> None:
    with atomic_write(path) as file:
        json.dump(asdict(workload), file)


def read_workload(path: str) -> Workload:
    return workload_from(json.loads(Path(path).read_text(encoding="utf-8")))


def workload_from(document: Mapping[str, Any]) -> Workload:
    values = dict(document)
    requests = tuple(_request(each) for each in values.pop("requests"))
    return Workload(requests=requests, **values)


def _request(values: dict[str, Any]) -> WorkloadRequest:
    prompt = values["prompt"]
    return WorkloadRequest(
        **values
        | {
            "prompt": None if prompt is None else tuple(prompt),
            "block_hashes": tuple(values["block_hashes"]),
        }
    )
