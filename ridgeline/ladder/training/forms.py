"""TrainForm: a way of running training steps that is timed. What `train` can run is a config; below
it are the rungs of the ladder that nobody can order: the plain loop, and the step without parts of
what makes it fast.

    TrainForm(config)                               # as `train` runs it
    TrainForm(config, loop="plain")                 # training/naive.py
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ridgeline.training.config import TrainConfig
from ridgeline.training.config_file import VERSION as CONFIG_VERSION
from ridgeline.training.config_file import parse_config

# plain: training/naive.py; fused loss: the same without logits of all rows; train: the real step
Loop = Literal["plain", "fused loss", "train"]


@dataclass(frozen=True)
class TrainForm:
    config: TrainConfig  # nothing is left to "auto"
    loop: Loop = "train"
    plain_attention: bool = False  # by its definition, every score written out

    def to_json(self) -> dict[str, Any]:
        return {
            "config": {"version": CONFIG_VERSION} | asdict(self.config),
            "loop": self.loop,
            "plain_attention": self.plain_attention,
        }

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> TrainForm:
        config = parse_config(document["config"], "a form")
        return TrainForm(config, document["loop"], document["plain_attention"])


@dataclass(frozen=True)
class StepNumbers:
    """What a step computed, of the weights as they are at the beginning."""

    loss: float
    gradient_norm: float | None  # None: the plain loop does not tell
