"""All steps as tasks of the ledger, in stages: what a stage's tasks read, earlier stages wrote."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ridgeline.data.corpus.duplicates.collecting import collect
from ridgeline.data.corpus.duplicates.options import DuplicateOptions
from ridgeline.data.corpus.duplicates.pairing import pair
from ridgeline.data.corpus.duplicates.signing import sign
from ridgeline.data.corpus.duplicates.surviving import remove_exact, remove_near
from ridgeline.data.corpus.duplicates.verifying import verify
from ridgeline.data.corpus.ledger.task import WORK_FOLDER, CorpusTask

FOLDER = f"{WORK_FOLDER}/duplicates"
PART_BYTES = 64 << 20  # of text, whose sets a task may have to hold
PART_ROWS = 1 << 19  # of documents and bands, which a task sorts


@dataclass(frozen=True)
class DuplicateSteps:
    stages: tuple[tuple[CorpusTask, ...], ...]
    near: str  # the file that lists what was removed as a near duplicate
    exact: str  # and as a copy


def num_parts(num_bytes: int, num_documents: int, options: DuplicateOptions) -> int:
    """Of the shuffle: the same for the same corpus, wherever it is built."""
    rows = num_documents * (options.bands + 1)
    return max(1, math.ceil(num_bytes / PART_BYTES), math.ceil(rows / PART_ROWS))


def duplicate_tasks(
    tables: Sequence[str], num_bytes: int, num_documents: int, options: DuplicateOptions
) -> DuplicateSteps:
    """`tables` are the documents tables of all units; the other two are of all of them together."""
    parts = num_parts(num_bytes, num_documents, options)
    units = range(len(tables))
    bands = tuple(f"{FOLDER}/bands-{unit:05}.parquet" for unit in units)
    mentions = tuple(f"{FOLDER}/pairs-{part:05}.parquet" for part in range(parts))
    sets = tuple(f"{FOLDER}/sets-{unit:05}.parquet" for unit in units)
    verified = tuple(f"{FOLDER}/verified-{part:05}.parquet" for part in range(parts))
    near, exact = f"{FOLDER}/near.parquet", f"{FOLDER}/exact.parquet"
    of_unit = {"parts": parts, "options": options}
    stages = (
        tuple(
            CorpusTask(
                f"bands {unit}", sign, bands[unit], (tables[unit],), {"unit": unit, **of_unit}
            )
            for unit in units
        ),
        tuple(
            CorpusTask(f"pairs {part}", pair, mentions[part], bands, {"part": part})
            for part in range(parts)
        ),
        tuple(
            CorpusTask(
                f"shingles {unit}",
                collect,
                sets[unit],
                (tables[unit], *mentions),
                {"unit": unit, **of_unit},
            )
            for unit in units
        ),
        tuple(
            CorpusTask(
                f"similarity {part}",
                verify,
                verified[part],
                sets,
                {"part": part, "options": options},
            )
            for part in range(parts)
        ),
        (CorpusTask("near duplicates", remove_near, near, verified),),
        (CorpusTask("copies", remove_exact, exact, (near, *mentions)),),
    )
    return DuplicateSteps(stages, near, exact)
