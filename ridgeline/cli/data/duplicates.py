"""What `data build` says of duplicates: how many, how similar to what stays, how many are missed.

for line in duplicate_lines(report["duplicates"]): console.print(line)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.quality.intervals import share_of_counts


def duplicate_lines(report: Mapping[str, Any]) -> list[str]:
    """Of a DuplicateReport as JSON."""
    return [_removed(report), _recall(report), _compared(report)]


def _removed(report: Mapping[str, Any]) -> str:
    words = (
        f"duplicates: {report['exact']:,} copies and {report['near']:,} near duplicates of "
        f"{report['documents']:,} documents are left out"
    )
    least = min(report["least_exact"], report["least_near"])
    if not report["exact"] + report["near"]:
        return words
    return (
        f"{words}; each has one that stays with a similarity of {report['threshold']:g} or more "
        f"(the least is {least:.3f}), counted over runs of {report['ngram']} words"
    )


def _recall(report: Mapping[str, Any]) -> str:
    threshold, bands, rows = report["threshold"], report["bands"], report["rows"]
    words = (
        f"recall: {bands} bands of {rows} rows compare 1 - (1 - {threshold:g}^{rows})^{bands} = "
        f"{report['expected_recall']:.1%} of the pairs at {threshold:g}"
    )
    if not report["planted"]:
        return f"{words}; not measured, as no document is long enough to be changed a little"
    share = share_of_counts(report["planted_found"], report["planted"])
    return (
        f"{words}; of {report['planted']:,} changed copies made of this corpus, "
        f"{report['planted_similarity']:.3f} similar, {report['planted_found']:,} were found: "
        f"{share.value:.1%} (95%: {share.low:.1%} to {share.high:.1%})"
    )


def _compared(report: Mapping[str, Any]) -> str:
    words = (
        f"precision: 1, since each pair is counted; of {report['candidates']:,} pairs that were "
        f"compared {report['verified']:,} are near duplicates"
    )
    if not report["left_out"]:
        return words
    return f"{words}, and {report['left_out']:,} pairs of large buckets were not compared"
