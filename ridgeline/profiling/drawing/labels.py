"""Labels one below the other, none touching the next: each as near as can be to what it names.

spread([18.0, 27.0, 39.0], gap=14.0, least=8.0, most=336.0)     # [14.0, 28.0, 42.0]
"""

from __future__ import annotations

from collections.abc import Sequence


def spread(wanted: Sequence[float], gap: float, least: float, most: float) -> list[float]:
    """Places for labels that want to be at `wanted`, which ascends: in the same order, `gap` apart
    at least, between `least` and `most`, and moved as little as possible in sum of squares. Where
    there is no room for all of them, they go on behind `most`.
    """
    free = [
        position - index * gap for index, position in enumerate(wanted)
    ]  # without what others take
    highest = max(least, most - (len(free) - 1) * gap)
    moved = (min(max(position, least), highest) for position in _ascending(free))
    return [position + index * gap for index, position in enumerate(moved)]


def _ascending(values: Sequence[float]) -> list[float]:
    """The nearest values that never descend: those that do are replaced by their mean."""
    blocks: list[tuple[float, int]] = []  # mean and count
    for value in values:
        mean, count = value, 1
        while blocks and blocks[-1][0] > mean:
            earlier, size = blocks.pop()
            mean, count = (earlier * size + mean * count) / (size + count), size + count
        blocks.append((mean, count))
    return [mean for mean, count in blocks for _ in range(count)]
