"""What was removed as a duplicate, and how sure that is, from the notes of the tasks.

DuplicateReport.of([note.counts for note in notes], options)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ridgeline.data.corpus.duplicates.options import DuplicateOptions

WHOLE = ("documents", "exact", "near", "candidates", "verified", "left_out")
SUMMED = (*WHOLE, "planted", "planted_found", "planted_similarity")


@dataclass(frozen=True)
class DuplicateReport:
    threshold: float
    bands: int
    rows: int
    ngram: int
    expected_recall: float  # of pairs just at the threshold, by the formula
    documents: int  # that were compared
    exact: int  # copies that were removed
    near: int  # near duplicates that were removed
    least_near: float  # the least similarity of one to its survivor
    least_exact: float  # 1, or less where a copy's original is a near duplicate of what stays
    candidates: int  # pairs that share a band
    verified: int  # of these, pairs that are at the threshold or above
    left_out: int  # pairs of large buckets that were not looked at
    planted: int  # copies, just above the threshold, that recall was measured with
    planted_found: int
    planted_similarity: float  # their mean

    @staticmethod
    def of(counts: Iterable[Mapping[str, Any]], options: DuplicateOptions) -> DuplicateReport:
        sums: dict[str, float] = dict.fromkeys(SUMMED, 0)
        for each in counts:
            for name, value in each.items():
                sums[name] = sums.get(name, 0) + value
        planted = int(sums["planted"])
        return DuplicateReport(
            threshold=options.threshold,
            bands=options.bands,
            rows=options.rows,
            ngram=options.ngram,
            expected_recall=options.share_of_pairs(options.threshold),
            least_near=sums["least_near"],
            least_exact=sums["least_exact"],
            planted=planted,
            planted_found=int(sums["planted_found"]),
            planted_similarity=sums["planted_similarity"] / max(1, planted),
            **{name: int(sums[name]) for name in WHOLE},
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
