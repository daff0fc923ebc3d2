"""Two climbs side by side in the terminal, from the document that programs get.

console.print(comparison_table(both.to_json()))
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ridgeline.profiling.printing import safe_text

TITLES = {"figures": "Figures", "changes": "What each kept", "recipe": "Fields that differ"}


def comparison_table(document: Mapping[str, Any]) -> RenderableType:
    parts: list[RenderableType] = [safe_text(document["headline"], "bold")]
    parts += [Text().append("! ", "yellow").append_text(safe_text(n)) for n in document["notes"]]
    for key, title in TITLES.items():
        if document[key]:
            parts.append(_table(title, document["names"], document[key]))
    return Group(*parts)


def _table(title: str, names: list[str], rows: list[Mapping[str, str]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.title, table.title_justify, table.title_style = f"\n{title}", "left", "bold"
    table.add_column("")
    for name in names:
        table.add_column(safe_text(name), overflow="fold")
    for row in rows:
        cells = (row["first"], row["second"])
        table.add_row(safe_text(row["name"], "dim"), *map(safe_text, cells))
    return table
