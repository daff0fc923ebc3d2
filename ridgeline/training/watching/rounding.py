"""Updates that rounding throws away: measured in every step, and a run that loses too many stops.

A weight of 1.0 in bf16 moves by 1/256 or not at all: with a usual learning rate most updates are
smaller, and rounded to the nearest they are gone. The loss still falls for a while, by the few that
are large enough.

    lost = LostUpdates(config)
    lost.add(result.lost_share)         # NumericsError beyond optimizer.max_lost
"""

from __future__ import annotations

from collections import deque

from ridgeline.errors import NumericsError
from ridgeline.training.config import TrainConfig
from ridgeline.training.stepping.precision import PRECISIONS

WINDOW = 10  # steps whose mean is judged: a first step, or one of few tokens, says little


class LostUpdates:
    def __init__(self, config: TrainConfig) -> None:
        self._precision = config.precision
        self._bound = config.optimizer.max_lost
        self._shares: deque[float] = deque(maxlen=WINDOW)

    def add(self, share: float) -> None:
        """Stochastic rounding leaves most weights where they are in any one step, and is right in
        the mean: its share is shown and not judged.
        """
        self._shares.append(share)
        format = PRECISIONS[self._precision].format
        if format.stochastic_weight or len(self._shares) < WINDOW:
            return
        mean = sum(self._shares) / WINDOW
        if mean > self._bound:
            raise NumericsError(
                f"rounding threw away {mean:.0%} of the updates of the last {WINDOW} steps "
                f"(max_lost {self._bound:.0%}): {self._remedy()}"
            )

    def _remedy(self) -> str:
        if PRECISIONS[self._precision].format.weight == "bf16":
            return "use --precision bf16, which keeps exact fp32 weights beside the bf16 ones"
        return "they are too small for fp32 itself; use a larger --lr, or a smaller --weight-decay"
