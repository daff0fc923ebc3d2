"""Perplexity of a text, measured through the engine as it serves: with its recipe's pages, KV
dtype, kernels and prompt chunks.

Log-probabilities are fp32 (log-softmax of the logits), their sums fp64. Letters: R rows, V
vocabulary, T tokens.

    engine = Engine("demo", Recipe(kv=KV(dtype="int8")))
    result = perplexity(engine, cut(text, engine.tokenizer, 2048))
    print(result.perplexity.value, result.perplexity.low, result.perplexity.high)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ridgeline.engine import Engine
from ridgeline.engine.sampling.choosing import nan_message
from ridgeline.errors import NumericsError
from ridgeline.progress import Progress
from ridgeline.quality.intervals import Estimate, SampleRows, estimate
from ridgeline.quality.windows import Windows


@dataclass(frozen=True)
class Perplexity:
    """Of one text under one model. Arrays have an entry for each window."""

    log_likelihoods: NDArray[np.float64]  # natural logarithms
    num_tokens: NDArray[np.float64]  # that were scored
    num_bytes: int  # of their text

    @property
    def total(self) -> float:
        return float(self.log_likelihoods.sum())

    @property
    def perplexity(self) -> Estimate:
        rows = np.stack([self.log_likelihoods, self.num_tokens], axis=1)
        return estimate(rows, lambda sums: np.exp(-sums[..., 0] / sums[..., 1]))

    @property
    def bits_per_byte(self) -> float | None:
        """Comparable between tokenizers; None where the tokens have no text."""
        return -self.total / math.log(2) / self.num_bytes if self.num_bytes else None

    def to_json(self) -> dict[str, object]:
        return {
            "perplexity": self.perplexity.to_json(),
            "bits_per_byte": self.bits_per_byte,
            "log_likelihood": self.total,
            "num_tokens": int(self.num_tokens.sum()),
            "num_bytes": self.num_bytes,
            "num_windows": len(self.num_tokens),
        }


def perplexity(engine: Engine, windows: Windows, progress: Progress | None = None) -> Perplexity:
    scores = engine.score(windows.tokens, chosen_logprobs, progress=progress)
    return from_logprobs([rows[:, 0] for rows in scores], windows)


def from_logprobs(logprobs: list[Tensor], windows: Windows) -> Perplexity:
    """From the log-probability of each scored token, a tensor for each window."""
    check_numbers(logprobs)
    sums = np.array([float(part_T.double().sum()) for part_T in logprobs])
    return Perplexity(sums, np.array(windows.num_scored, dtype=np.float64), sum(windows.num_bytes))


def chosen_logprobs(first: int, logits_RV: Tensor, tokens_R: Tensor) -> Tensor:
    """Each token's log-probability [R, 1]: a RowScore (engine/sampling/scoring.py)."""
    chosen_R1 = logits_RV.gather(1, tokens_R[:, None])
    return chosen_R1 - torch.logsumexp(logits_RV, dim=1, keepdim=True)


def check_numbers(scores: list[Tensor]) -> None:
    """A model that computes NaN has no perplexity."""
    for rows in scores:
        wrong = (~rows.isfinite()).reshape(len(rows), -1).any(1).nonzero()
        if len(wrong):
            raise NumericsError(nan_message(int(wrong[0]) + 1))


def increase(original: Perplexity, changed: Perplexity) -> Estimate:
    """How much higher the changed model's perplexity is, as a share: 0.02 is 2%. Paired: both were
    measured on the same windows.
    """
    parts = [original.log_likelihoods, changed.log_likelihoods, original.num_tokens]
    rows: SampleRows = np.stack(parts, axis=1)
    return estimate(rows, lambda sums: np.expm1((sums[..., 0] - sums[..., 1]) / sums[..., 2]))
