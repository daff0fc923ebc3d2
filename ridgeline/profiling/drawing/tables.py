"""Tables that become lists of cards on a narrow screen, so that nothing scrolls sideways.

table([Column("kernel"), Column("time", is_number=True)], [("rms_norm", "12 µs")], "Kernels")
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ridgeline.profiling.drawing.markup import Markup, element, join


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
    names = join(
        element("th", column.name, scope="col", class_=_look(column)) for column in columns
    )
    body = [
        _row(columns, row, keys[index] if index < len(keys) else None)
        for index, row in enumerate(rows)
    ]
    return element(
        "table",
        element("caption", caption, class_=None if shows_caption else "hidden"),
        element("thead", element("tr", names)),
        element("tbody", *body),
        class_="cards",
    )


def _row(columns: Sequence[Column], row: Sequence[Markup | str], key: str | None) -> Markup:
    cells = [element("th", row[0], scope="row")]
    for column, cell in zip(columns[1:], row[1:], strict=True):
        cells.append(element("td", cell, class_=_look(column), data_name=column.name or None))
    return element("tr", *cells, data_key=key or None)


def _look(column: Column) -> str | None:
    return "number" if column.is_number else None
