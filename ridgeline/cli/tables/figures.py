"""Figures of a document as a record's values. One with an interval becomes three: itself and the
interval's two ends.

    values = {**figure("perplexity", found["perplexity"], "1"), **divergence_figures(compared)}
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping
from typing import Any

from ridgeline.records import Value


def figure(
    name: str, measured: Mapping[str, float | None] | float | None, unit: str
) -> dict[str, Any]:
    """`measured` is a number, an interval as `Estimate.to_json` writes it, or None for nothing."""
    ends = measured if isinstance(measured, Mapping) else {"value": measured}
    return {
        name if end == "value" else f"{name}_{end}": Value(float(value), unit)
        for end, value in ends.items()
        if value is not None
    }


def divergence_figures(compared: Mapping[str, Any]) -> dict[str, Value]:
    """Of what `Divergence.to_json` writes."""
    return {
        **figure("original_perplexity", compared["original"]["perplexity"], "1"),
        **figure("perplexity_increase", compared["perplexity_increase"], "1"),
        **figure("mean_kl", compared["mean_kl"], "nat"),
        **figure("p99_kl", compared["p99_kl"], "nat"),
        **figure("changed_share", compared["changed_share"], "1"),
    }


def peak_host_bytes() -> int:
    """The most memory that this process has held."""
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return held if sys.platform == "darwin" else held * 1024
