"""The quality bound a changed model must stay within, and the line that says why it does not.

The measured figures are compared with the bound, not the ends of their intervals, which are
reported with them.

    problem = QualityBounds(max_kl=0.02).broken_by(divergence)
    if problem: raise QualityError(problem)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ridgeline.errors import UsageError
from ridgeline.formats.fields import field_help
from ridgeline.quality.divergence import Divergence
from ridgeline.quality.intervals import Estimate


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
        problems = []
        if self.max_kl is not None and not divergence.mean_kl.value <= self.max_kl:
            shown = in_words(divergence.mean_kl, "{:.5f}")
            problems.append(f"mean KL is {shown}, allowed is {self.max_kl:g}")
        allowed = self.max_ppl_increase
        if allowed is not None and not divergence.increase.value <= allowed:
            shown = in_words(divergence.increase, "{:+.2%}")
            problems.append(f"perplexity changes by {shown}, allowed is {allowed:+.2%}")
        return "; ".join(problems) or None


USUAL = QualityBounds(max_kl=0.02, max_ppl_increase=0.02)


def in_words(figure: Estimate, form: str) -> str:
    """`0.0123 (0.0119 to 0.0131)`."""
    value = form.format(figure.value)
    if figure.low is None or figure.high is None:
        return value
    return f"{value} ({form.format(figure.low)} to {form.format(figure.high)})"
