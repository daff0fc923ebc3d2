"""Axes of losses and of rates, which these pages share.

curves(lines, "Smoothed loss", "learning rate", "", y_scale=loss_scale(losses))
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from ridgeline.profiling.drawing.scales import Scale

ROOM = 0.08  # above and below


def loss_scale(losses: Iterable[float], most: float = math.inf) -> Scale:
    """Even, over all losses; what lies above `most` is drawn at the edge."""
    known = [min(loss, most) for loss in losses if math.isfinite(loss)] or [0.0, 1.0]
    low, high = min(known), max(known)
    room = ROOM * (high - low) or 0.1 * abs(high) or 1.0
    return Scale(low - room, high + room)


def rounded(value: float) -> float:
    """To three digits, as an axis shows it."""
    return float(f"{value:.3g}")
