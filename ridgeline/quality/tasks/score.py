"""A task's score: whether each question was answered correctly, and the share with its interval;
for two models on the same questions the paired difference.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ridgeline.data import Tokenizer
from ridgeline.engine import Engine
from ridgeline.errors import UsageError
from ridgeline.quality.intervals import Estimate, mean_of, share_of

AlsoKnown = float | str | dict[str, float]


@dataclass(frozen=True)
class TaskScore:
    metric: str
    right: NDArray[np.float64]  # 1 or 0 for each question
    also: dict[str, AlsoKnown] = field(default_factory=dict)  # what else is known

    @property
    def share(self) -> Estimate:
        return share_of(self.right)

    def to_json(self) -> dict[str, object]:
        return {
            "metric": self.metric,
            "score": self.share.to_json(),
            "num_questions": len(self.right),
            **self.also,
        }


def difference(original: TaskScore, changed: TaskScore) -> Estimate:
    """How much more the changed model answers right, as a share of all questions; paired."""
    return mean_of(changed.right - original.right)


def tokenizer_for(engine: Engine) -> Tokenizer:
    if engine.tokenizer is None:
        raise UsageError(
            "the model has no tokenizer, which scoring text needs; add tokenizer.json to its folder"
        )
    return engine.tokenizer
