"""What counts as a near duplicate, and how many hashes it takes to find nearly all of them.

    DuplicateOptions(threshold=0.8, recall=0.99).bands          # 26, of 8 rows each

Two documents of similarity J agree in one hash with probability J, in a band of r of them with J^r,
and in at least one of b bands with 1 - (1 - J^r)^b.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ridgeline.errors import UsageError
from ridgeline.formats.fields import check_fields, field_help
from ridgeline.kernels.minhash import NGRAM

MOST_HASHES = 4096


@dataclass(frozen=True)
class DuplicateOptions:
    remove: bool = field(
        default=True,
        metadata=field_help("leave out exact and near duplicates", flag="remove-duplicates"),
    )
    threshold: float = field(
        default=0.8,
        metadata=field_help("similarity (Jaccard) from which on one of two texts is left out"),
    )
    recall: float = field(
        default=0.99,
        metadata=field_help("share of the pairs just at the threshold that are to be found"),
    )
    rows: int = field(
        default=8,
        metadata=field_help("hashes in a band: with more, fewer pairs and more bands"),
    )
    ngram: int = field(
        default=NGRAM, metadata=field_help("words in a shingle", flag="shingle-words")
    )

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("threshold", "recall"):
            value = getattr(self, name)
            if not 0 < value < 1:
                raise UsageError(
                    f"duplicates: {name} is {value}; give a number between 0 and 1, as 0.8"
                )
        if not 1 <= self.rows <= 64:
            raise UsageError(f"duplicates: rows is {self.rows}; give 1 to 64")
        if not 1 <= self.ngram <= 32:
            raise UsageError(f"duplicates: ngram is {self.ngram}; give 1 to 32 words")
        if self.bands * self.rows > MOST_HASHES:
            raise UsageError(
                f"duplicates: {self.recall:g} of the pairs at {self.threshold:g} need {self.bands} "
                f"bands of {self.rows} rows; more than {MOST_HASHES} hashes are too many: give "
                "fewer rows, or less recall"
            )

    @property
    def bands(self) -> int:
        """The fewest that find so many."""
        missed = math.log1p(-(self.threshold**self.rows))
        return max(1, math.ceil(math.log(1 - self.recall) / missed))

    def share_of_pairs(self, similarity: float) -> float:
        """That is expected to be looked at, of pairs so similar."""
        return float(1 - (1 - similarity**self.rows) ** self.bands)
