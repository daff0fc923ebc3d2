"""Scores from the logits that predict a prompt's tokens, without keeping the logits: each run of
rows is handed to a function while it is on the device, and only its result is kept.

    def likelihoods(first, logits_RV, tokens_R):
        return logits_RV.log_softmax(-1).gather(1, tokens_R[:, None])
    (found_TC,) = engine.score([tokens], likelihoods)       # a row for each token but the first

Letters: R rows that are made together, V vocabulary, C numbers that are kept of each, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# From the position of the first token, the logits_RV (fp32) that predict R tokens, and these
# tokens_R: the numbers [R, C] that are kept. Called in inference mode; tokens may come twice, if a
# request was preempted.
RowScore = Callable[[int, Tensor, Tensor], Tensor]


class Scoring:
    """One prompt's scores from the token `first` on."""

    def __init__(self, score: RowScore, first: int, length: int) -> None:
        self.score, self.first, self.length = score, first, length
        self._found_TC: Tensor | None = None
        self._is_there_T = torch.zeros(length - first, dtype=torch.bool)

    def take(self, position: int, part_RC: Tensor) -> None:
        """Scores of the tokens from `position` on, on the host."""
        if self._found_TC is None:
            self._found_TC = part_RC.new_empty(self.length - self.first, part_RC.shape[1])
        rows = slice(position - self.first, position - self.first + len(part_RC))
        self._found_TC[rows], self._is_there_T[rows] = part_RC, True

    @property
    def scores_TC(self) -> Tensor:
        assert self._found_TC is not None, "nothing was scored"
        assert bool(self._is_there_T.all()), "tokens were left out"
        return self._found_TC
