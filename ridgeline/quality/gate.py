"""The quality bound a changed model must stay within, and the line that says why it does not.

The measured figures are compared with the bound, not the ends of their intervals, which are
reported with them, whether the model is kept or refused.

    problem = QualityBounds(max_kl=0.02).broken_by(divergence)
    if problem: raise QualityError(problem)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from ridgeline.errors import UsageError
from ridgeline.formats.fields import field_help
from ridgeline.quality.divergence import Divergence
from ridgeline.quality.intervals import Estimate


class JudgedFigure(NamedTuple):
    """A figure beside what is allowed."""

    name: str
    figure: Estimate
    allowed: float
    words: str

    @property
    def is_outside(self) -> bool:
        return not self.figure.value <= self.allowed  # NaN is outside

    @property
    def may_be_outside(self) -> bool:
        return self.figure.high is not None and self.figure.high > self.allowed


@dataclass(frozen=True)
class QualityBounds:
    max_kl: float | None = field(
        default=None,
        metadata=field_help(
            "limit on the mean KL divergence from the original, in nats (quantize, optimize: 0.02)"
        ),
    )
    max_ppl_increase: float | None = field(
        default=None,
        metadata=field_help(
            "limit on the increase of perplexity; 0.02 is 2%% (quantize, optimize: 0.02)"
        ),
    )

    def __post_init__(self) -> None:
        for name in ("max_kl", "max_ppl_increase"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise UsageError(f"{name} is {value}; give 0 or a positive number")
        if self.max_ppl_increase is not None and self.max_ppl_increase >= 1:
            raise UsageError(
                f"max_ppl_increase is {self.max_ppl_increase:g}, which is "
                f"{self.max_ppl_increase:.0%}; give a share below 1: 0.02 is 2%"
            )

    @property
    def are_given(self) -> bool:
        return self.max_kl is not None or self.max_ppl_increase is not None

    def filled_from(self, other: QualityBounds) -> QualityBounds:
        """With `other`'s values where none was given."""
        return QualityBounds(
            other.max_kl if self.max_kl is None else self.max_kl,
            other.max_ppl_increase if self.max_ppl_increase is None else self.max_ppl_increase,
        )

    def broken_by(self, divergence: Divergence) -> str | None:
        """What is outside the bound, with the numbers; None when all is inside."""
        problems = [each.words for each in self._judged(divergence) if each.is_outside]
        return "; ".join(problems) or None

    def verdict_on(self, divergence: Divergence) -> str:
        """Every bounded figure with its interval, whether it is inside or not; and what the
        intervals leave open.
        """
        judged = self._judged(divergence)
        if not judged:
            return "no quality bounds were given"
        if any(each.is_outside for each in judged):
            return f"outside the quality bounds: {'; '.join(each.words for each in judged)}"
        verdict = f"within the quality bounds: {'; '.join(each.words for each in judged)}"
        if divergence.mean_kl.low is None:
            return f"{verdict}; one window gives no interval: give a longer text"
        unsure = [each.name for each in judged if each.may_be_outside]
        if unsure:
            verdict += f"; the interval of {' and '.join(unsure)} ends outside: give a longer text"
        return verdict

    def _judged(self, divergence: Divergence) -> list[JudgedFigure]:
        judged = []
        if self.max_kl is not None:
            figure, allowed = divergence.mean_kl, self.max_kl
            words = f"mean KL is {in_words(figure, '{:.5f}')}, allowed is {allowed:g}"
            judged.append(JudgedFigure("mean KL", figure, allowed, words))
        if self.max_ppl_increase is not None:
            figure, allowed = divergence.increase, self.max_ppl_increase
            shown = in_words(figure, "{:+.2%}")
            words = f"perplexity changes by {shown}, allowed is {allowed:+.2%}"
            judged.append(JudgedFigure("perplexity", figure, allowed, words))
        return judged


USUAL = QualityBounds(max_kl=0.02, max_ppl_increase=0.02)


def in_words(figure: Estimate, form: str) -> str:
    """`0.0123 (0.0119 to 0.0131)`."""
    value = form.format(figure.value)
    if figure.low is None or figure.high is None:
        return value
    return f"{value} ({form.format(figure.low)} to {form.format(figure.high)})"
