"""How far a changed model's next-token distributions are from the original's, on the same text.

Exact, over the whole vocabulary: KL(original || changed) at every scored token, in fp64. Two
engines run the text in one process, a few windows at a time; only the original's logits for these
windows are kept, in their own dtype, on the changed model's device (`KEPT_BYTES` at most, or one
window). Where all windows fit, the original runs once for any number of changed models. Both
perplexities are reported too. Letters: R rows, V vocabulary, T tokens of a window.

    original = Original(Engine("demo"), windows, KEPT_BYTES)
    divergence = original.compare(Engine("demo", Recipe(dtype="bf16")))
    print(divergence.mean_kl, divergence.p99_kl, divergence.changed_share, divergence.increase)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ridgeline.engine import Engine
from ridgeline.engine.sampling.scoring import RowScore
from ridgeline.errors import UsageError
from ridgeline.models import ModelConfig, Transformer
from ridgeline.progress import Progress
from ridgeline.quality.intervals import Estimate, mean_of
from ridgeline.quality.perplexity import (
    Perplexity,
    check_numbers,
    chosen_logprobs,
    from_logprobs,
    increase,
)
from ridgeline.quality.windows import Windows, check_vocabulary

TokenGroups = tuple[tuple[int, ...], ...]  # windows that are kept at the same time
KEPT_BYTES = 2**30
ROWS_AT_ONCE = (
    16  # on a CPU: their fp64 stays in its caches, 15 s become 5 for 7,252 rows of 49,152
)


@dataclass(frozen=True)
class Divergence:
    original: Perplexity
    changed: Perplexity
    kl: tuple[NDArray[np.float64], ...]  # of each scored token, an array for each window
    is_changed: tuple[NDArray[np.float64], ...]  # 1 where the likeliest token is another one

    @property
    def mean_kl(self) -> Estimate:
        return self._mean(self.kl)

    @property
    def p99_kl(self) -> float:
        return float(np.quantile(np.concatenate(self.kl), 0.99))

    @property
    def max_kl(self) -> float:
        return float(np.concatenate(self.kl).max())

    @property
    def changed_share(self) -> Estimate:
        return self._mean(self.is_changed)

    @property
    def increase(self) -> Estimate:
        """Of the perplexity, as a share."""
        return increase(self.original, self.changed)

    def _mean(self, values: tuple[NDArray[np.float64], ...]) -> Estimate:
        return mean_of(np.array([part.sum() for part in values]), self.original.num_tokens)

    def to_json(self) -> dict[str, object]:
        return {
            "mean_kl": self.mean_kl.to_json(),
            "p99_kl": self.p99_kl,
            "max_kl": self.max_kl,
            "changed_share": self.changed_share.to_json(),
            "perplexity_increase": self.increase.to_json(),
            "original": self.original.to_json(),
            "windows": [
                {"mean_kl": float(kl.mean()), "changed_share": float(changed.mean())}
                for kl, changed in zip(self.kl, self.is_changed, strict=True)
            ],
        }


def divergence(
    original: Engine, changed: Engine, windows: Windows, progress: Progress | None = None
) -> Divergence:
    return Original(original, windows, KEPT_BYTES).compare(changed, progress)


class Scores(Protocol):
    """What the original is asked for: an engine, or a model without room for one (walked.py)."""

    config: ModelConfig

    @property
    def model(self) -> Transformer: ...

    def score(
        self, prompts: Sequence[tuple[int, ...]], scores: Sequence[RowScore], /
    ) -> list[Tensor]: ...


class Original:
    """One model on one text, which others are compared with."""

    def __init__(self, engine: Scores, windows: Windows, kept_bytes: int) -> None:
        self.engine, self.windows = engine, windows
        self.groups = list(_groups(windows.tokens, kept_bytes_a_token(engine), kept_bytes))
        self._scored: _Scored | None = None  # of the one group, where there is one

    def compare(self, changed: Engine, progress: Progress | None = None) -> Divergence:
        check_same_words(self.engine, changed)
        check_vocabulary(self.windows.tokens, changed, "the changed model")
        before: list[Tensor] = []
        after: list[Tensor] = []
        for group in self.groups:
            scored = self._score(group, changed.runner.device)
            before += scored.logprobs
            after += changed.score(group, [each.compare for each in scored.kept])
            if progress is not None:
                progress("comparing windows", len(after), len(self.windows.tokens))
        check_numbers(before)
        check_numbers(after)
        columns = [rows.double().numpy() for rows in after]
        return Divergence(
            from_logprobs([rows[:, 0] for rows in before], self.windows),
            from_logprobs([rows[:, 0] for rows in after], self.windows),
            tuple(rows[:, 1] for rows in columns),
            tuple(rows[:, 2] for rows in columns),
        )

    def _score(self, group: TokenGroups, device: torch.device) -> _Scored:
        if self._scored is not None and self._scored.device == device:
            return self._scored
        kept = [KeptLogits(self.engine, len(window), device) for window in group]
        scored = _Scored(kept, self.engine.score(group, [each.keep for each in kept]), device)
        if len(self.groups) == 1:
            self._scored = scored
        return scored


class KeptLogits:
    """The original's logits for one window, from its pass to the other model's."""

    def __init__(self, original: Scores, length: int, device: torch.device) -> None:
        shape = (length - 1, original.config.vocab_size)
        self._logits_TV = torch.empty(shape, dtype=original.model.logits_dtype, device=device)
        self.keep: RowScore = self._keep
        self.compare: RowScore = self._compare

    def _keep(self, first: int, logits_RV: Tensor, tokens_R: Tensor) -> Tensor:
        self._logits_TV[first - 1 : first - 1 + len(logits_RV)] = logits_RV
        return chosen_logprobs(first, logits_RV, tokens_R)

    def _compare(self, first: int, logits_RV: Tensor, tokens_R: Tensor) -> Tensor:
        """Log-probability under the changed model, KL, and whether the likeliest differs [R, 3]."""
        original_RV = self._logits_TV[first - 1 : first - 1 + len(logits_RV)]
        kl_R = kl_divergence(original_RV, logits_RV)
        differs_R = original_RV.argmax(-1) != logits_RV.argmax(-1)
        chosen_R1 = chosen_logprobs(first, logits_RV, tokens_R)
        return torch.stack([chosen_R1[:, 0].double(), kl_R, differs_R.double()], dim=1)


class _Scored(NamedTuple):
    """What the original made of some windows."""

    kept: list[KeptLogits]
    logprobs: list[Tensor]
    device: torch.device


def kl_divergence(original_RV: Tensor, changed_RV: Tensor) -> Tensor:
    """KL(original || changed) of each row of logits, fp64, in nats."""
    rows = ROWS_AT_ONCE if original_RV.device.type == "cpu" else max(len(original_RV), 1)
    pairs = zip(original_RV.split(rows), changed_RV.split(rows), strict=True)
    return torch.cat([_kl_divergence(*pair) for pair in pairs])


def _kl_divergence(original_RV: Tensor, changed_RV: Tensor) -> Tensor:
    wanted_RV = original_RV.double().log_softmax(-1)
    found_RV = changed_RV.double().log_softmax(-1)
    # A token that the original rules out (-inf) adds nothing, whatever the other model gives it.
    return torch.where(wanted_RV.isneginf(), 0.0, wanted_RV.exp() * (wanted_RV - found_RV)).sum(-1)


def kept_bytes_a_token(original: Scores) -> int:
    return original.config.vocab_size * original.model.logits_dtype.itemsize


def check_same_words(original: Scores, changed: Engine) -> None:
    ours, theirs = changed.config.vocab_size, original.config.vocab_size
    if ours != theirs:
        raise UsageError(
            f"the models have vocabularies of {ours} and {theirs} tokens; "
            "only models with the same tokens can be compared"
        )


def _groups(windows: TokenGroups, token_bytes: int, kept_bytes: int) -> Iterator[TokenGroups]:
    """Windows in order, as many together as may be kept."""
    start = 0
    while start < len(windows):
        end, size = start + 1, len(windows[start]) * token_bytes
        while end < len(windows) and size + len(windows[end]) * token_bytes <= kept_bytes:
            size += len(windows[end]) * token_bytes
            end += 1
        yield windows[start:end]
        start = end
