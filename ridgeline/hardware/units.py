"""Figures for people: 4.25e12 B/s is shown as `4.25 TB/s`, 1.24e-5 s as `12.4 µs`; and sizes as
people type them.

Stored values are always in base units (bytes, bytes/s, FLOP/s, OP/s, seconds); only rendering and
flags call this.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from ridgeline.errors import UsageError

LARGE = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
OVER = 1.0005  # of a limit: more is shown as more than 100%
NAMED = 3  # of those that exceed a limit
WRONG_LIMIT = (
    "that limit was measured too low (`ridgeline hardware --refresh` on an idle machine measures "
    "it again), or data came from a cache"
)
SMALL = ((1.0, ""), (1e-3, "m"), (1e-6, "µ"), (1e-9, "n"))


def human(value: float, unit: str) -> str:
    """Three significant digits with an SI prefix; rates stay in TFLOP/s beyond 1,000."""
    steps: Sequence[tuple[float, str]] = SMALL if unit == "s" else LARGE
    if unit in ("FLOP/s", "OP/s"):
        steps = LARGE[1:]
    factor, prefix = next((step for step in steps if abs(value) >= step[0]), steps[-1])
    return f"{_three_digits(value / factor)} {prefix}{unit}"


def human_bytes(num_bytes: int) -> str:
    """A size in binary units, as memory and caches are built: 2097152 is `2 MiB`."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{_three_digits(value)} {unit}"
        value /= 1024
    return f"{_three_digits(value)} TiB"


def parse_bytes(text: str) -> int:
    """`4GiB`, `500MB`, `1.5 GiB` or a plain number of bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMGT]i?)?B?", text.strip(), re.IGNORECASE)
    if not match:
        raise UsageError(f"{text!r} is not a size; give e.g. 4GiB, 500MB or a number of bytes")
    prefix = (match[2] or "").lower()
    power = " kmgt".index(prefix[0]) if prefix else 0
    return int(float(match[1]) * (1024 if prefix.endswith("i") else 1000) ** power)


def percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}%"


def is_over(share: float | None) -> bool:
    """More than all of a limit: then the limit is wrong."""
    return share is not None and share > OVER


def over_words(shares: Mapping[str, float | None]) -> str | None:
    """What is said wherever shares of a limit are shown, where one is above 100%; by their names,
    the largest first.
    """
    over = {name: share for name, share in shares.items() if share is not None and is_over(share)}
    if not over:
        return None
    largest = sorted(over, key=lambda name: -over[name])
    names = ", ".join(f"{name} {over[name]:.0%}" for name in largest[:NAMED])
    more = f" and {len(over) - NAMED} more" if len(over) > NAMED else ""
    return f"above 100% of the limit: {names}{more}; {WRONG_LIMIT}"


def _three_digits(value: float) -> str:
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:.{min(decimals, 3)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
