"""Tables of `ridgeline data`: what became of the documents, and what each stage took."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from ridgeline.profiling.printing import safe_text


def accounts_table(document: dict[str, Any]) -> Table:
    """In = kept + dropped + quarantined."""
    counts = document["documents"]
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("documents")
    table.add_column("number", justify="right")
    table.add_column("share", justify="right")
    rows = [("kept", counts["kept"]), *counts["dropped"].items()]
    rows += [("quarantined", counts["quarantined"])] if counts["quarantined"] else []
    for name, count in rows:
        table.add_row(safe_text(name), f"{count:,}", f"{count / counts['in']:.1%}")
    table.add_row("in", f"{counts['in']:,}", "100%", style="bold")
    return table


def stages_table(document: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("stage")
    for name in ("CPU seconds", "MB/s a core", "share"):
        table.add_column(name, justify="right")
    for row in document["stages"]:
        rate = row["mb_per_core_s"]
        table.add_row(
            row["stage"],
            f"{row['cpu_s']:.2f}",
            "–" if rate is None else f"{rate:.1f}",
            f"{row['share']:.0%}",
        )
    return table


def plan_table(document: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column()
    hours = document["hours"]
    time = f"{hours:.1f} hours" if hours >= 1 else f"{hours * 60:.1f} minutes"
    rows = {
        "input": f"{document['files']:,} files, {size(document['input_bytes'])}, "
        f"{size(document['text_bytes'])} unpacked",
        "units": f"{document['units']:,}",
        "workers": f"{document['workers']}",
        "memory": size(document["memory_bytes"]),
        "disk while it runs": f"{size(document['work_bytes'] + document['corpus_bytes'])}, of "
        f"{size(document['free_bytes'])} that are free",
        "corpus": f"{size(document['corpus_bytes'])}",
        "kept": f"{document['kept_share']:.0%} of documents, before duplicates",
        "time": f"{time} at {document['mb_per_s']:.1f} MB/s",
        "bound by": f"{document['bound']}; reads use {document['read_share']:.1%} of "
        f"{document['read_mb_per_s']:,.0f} MB/s",
        "by a sample of": size(document["sample_bytes"]),
    }
    for name, value in rows.items():
        table.add_row(name, safe_text(value))
    return table


def size(num_bytes: int) -> str:
    """`1.2 GB`, in powers of ten as disks are sold."""
    value = float(num_bytes)
    for unit in ("bytes", "KB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"
