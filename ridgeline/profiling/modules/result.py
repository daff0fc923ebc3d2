"""`ModuleProfile`: what `ridgeline.profile` returns. Plain data that prints itself.

profile = ridgeline.profile(module, x)
print(profile)
profile.verdict.sentence
profile.rows[0].share_of_limit, profile.division["host"]
"""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from ridgeline.formats.files import atomic_write
from ridgeline.hardware.units import human, over_words, percent
from ridgeline.profiling.modules.changes import Suggestion
from ridgeline.profiling.modules.rows import OpRow, grouped
from ridgeline.profiling.modules.table import division_table, ops_table, suggestions_table
from ridgeline.profiling.placing import StepVerdict
from ridgeline.profiling.printing import PrintedResult, safe_text
from ridgeline.timing import Timing

SCHEMA = 1
NUM_ROWS = 20  # of the table


@dataclass(frozen=True, repr=False)
class ModuleProfile(PrintedResult):
    name: str
    device: str
    hardware: Mapping[str, Any]
    call: Timing  # untraced
    # "matrices", "attention", "other kernels", "copies", "gaps" (launches that the device waits
    # for), "host" (all else that it waits for); they add up to the call
    division: Mapping[str, float]
    rows: tuple[OpRow, ...]  # the longest first
    verdict: StepVerdict
    next: tuple[Suggestion, ...]  # the largest gain first
    num_kernels: int
    peak_bytes: int | None  # of the device's memory during a call; None on a CPU
    notes: tuple[str, ...] = ()
    trace: bytes = field(default=b"", compare=False)  # a Chrome trace, compressed

    def __repr__(self) -> str:
        time = human(self.call.median_s, "s")
        bound = self.verdict.kind
        return f"<ModuleProfile of {self.name} on {self.device}: {time} a call, {bound}>"

    @property
    def flops(self) -> float:
        return sum(row.flops for row in self.rows)

    @property
    def num_bytes(self) -> int:
        return sum(row.num_bytes for row in self.rows)

    @property
    def headline(self) -> str:
        return (
            f"{self.name} on {self.hardware['name']}: {human(self.call.median_s, 's')} a call "
            f"(spread {percent(self.call.spread)}, untraced); {self.verdict.sentence}"
        )

    def table(self, num_rows: int = NUM_ROWS) -> RenderableType:
        """For `rich.print`; layers that are alike share a row."""
        rows = grouped(self.rows)
        parts: list[RenderableType] = [safe_text(self.headline), Text(), ops_table(rows[:num_rows])]
        rest = rows[num_rows:]
        if rest:
            share = sum(row.share for row in rest)
            parts.append(Text(f"and {len(rest)} more rows, {percent(share)} of the call"))
        over = over_words({f"{row.path} {row.op}".strip(): row.share_of_limit for row in rows})
        parts += [] if over is None else [safe_text(over)]
        parts += [Text(), division_table(self.division, self.call.median_s)]
        parts += [Text(), suggestions_table(self.next)]
        parts += [safe_text(f"note: {note}") for note in self.notes]
        return Group(*parts)

    def to_json(self) -> dict[str, Any]:
        document = asdict(replace(self, trace=b""))
        del document["trace"]
        document["rows"] = [
            {**fields, "share_of_limit": row.share_of_limit, "limit_s": row.limit_s}
            for fields, row in zip(document["rows"], self.rows, strict=True)
        ]
        return {"schema": SCHEMA, "flops": self.flops, "num_bytes": self.num_bytes, **document}

    def save_trace(self, path: str | Path) -> Path:
        """For chrome://tracing or ui.perfetto.dev; compressed where the name ends in .gz."""
        path = Path(path)
        data = self.trace if path.suffix == ".gz" else gzip.decompress(self.trace)
        with atomic_write(path, "wb") as file:
            file.write(data)
        return path
