"""Lines over a number, such as throughput over the batch: told apart by colour, stroke and mark.

curves([Series("after", ((1, 250.0), (8, 1800.0)))], "Throughput", "batch", "tokens/s")
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ridgeline.profiling.drawing.markup import Markup


@dataclass(frozen=True)
class Series:
    name: str
    points: Sequence[tuple[float, float]]  # x, y; both positive
    series: int = 0  # colour and mark: 0 to 5
    hollow: bool = False  # as it was before: dashed


def curves(
    series: Sequence[Series],
    title: str,
    x_name: str,
    y_name: str,
    *,
    read: Callable[[float], str] | None = None,  # a value as people read it
) -> Markup:
    """A figure with both axes logarithmic (batches double) and ticks at the batches measured.
    Points take the focus and show their figures; the figures stand in a table below as well.
    """
    raise NotImplementedError
