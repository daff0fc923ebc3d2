"""Tables that become lists of cards on a narrow screen, so that nothing scrolls sideways.

table([Column("kernel"), Column("time", is_number=True)], [("rms_norm", "12 µs")], "Kernels")
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ridgeline.profiling.drawing.markup import Markup


@dataclass(frozen=True)
class Column:
    name: str
    is_number: bool = False  # to the right, digits below each other


def table(
    columns: Sequence[Column],
    rows: Sequence[Sequence[Markup | str]],
    caption: str,
    *,
    shows_caption: bool = False,  # otherwise only screen readers have it
    keys: Sequence[str] = (),  # of rows: pointing at one marks what has the same `data-key`
) -> Markup:
    """The first column names its row. Cells are escaped unless they are Markup."""
    raise NotImplementedError
