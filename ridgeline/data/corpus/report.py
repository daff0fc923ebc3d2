"""What a build came to: every document that went in, and how fast each stage was.

accounts(judged, shards)["documents"]
# {"in": 9, "kept": 4, "dropped": {"gopher_few_words": 3}, "quarantined": 2}
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from ridgeline.data.corpus.ledger.task import TaskNote
from ridgeline.data.corpus.stages.documents import KEPT, QUARANTINED

NUM_SHOWN = 5  # quarantined documents; the tables have all


def accounts(judged: Sequence[TaskNote], shards: Sequence[TaskNote]) -> dict[str, Any]:
    """Of the notes of `documents`, and of tokens and tables. The same for every run, and so without
    any time.
    """
    read = summed(judged, "verdicts").total()
    verdicts = summed(shards, "verdicts")
    assert verdicts.total() == read, f"{read} documents went in, {verdicts.total()} came out"
    kept, quarantined = verdicts.pop(KEPT, 0), verdicts.pop(QUARANTINED, 0)
    shown = [place for note in judged for place in note.counts["quarantined"]][:NUM_SHOWN]
    return {
        "documents": {
            "in": read,
            "kept": kept,
            "dropped": dict(sorted(verdicts.items())),
            "quarantined": quarantined,
        },
        "bytes": {
            "in": sum(note.counts["num_bytes"] for note in judged),
            "judged_good": sum(note.counts["kept_bytes"] for note in judged),
        },
        "rules": dict(sorted(summed(judged, "rules").items())),
        "scrubbed": dict(sorted(summed(judged, "scrubbed").items())),
        "languages": dict(summed(judged, "languages").most_common()),
        "quarantine": [
            {"file": file, "offset": offset, "reason": reason} for file, offset, reason in shown
        ],
    }


def stage_rates(judged: Sequence[TaskNote], shards: Sequence[TaskNote]) -> list[dict[str, Any]]:
    """CPU seconds of each stage, and the bytes of input that one core takes a second."""
    num_bytes = sum(note.counts["num_bytes"] for note in judged)
    seconds = summed(judged, "stages_s")
    for note in shards:
        seconds[_stage(note)] += note.cpu_s  # type: ignore[assignment]
    total = sum(seconds.values())
    return [
        {
            "stage": stage,
            "cpu_s": used,
            "mb_per_core_s": num_bytes / 1e6 / used if used else None,
            "share": used / total if total else 0.0,
        }
        for stage, used in seconds.items()
    ]


def _stage(note: TaskNote) -> str:
    """`tokens/000012` and `bands 12` are of tokens and of duplicates."""
    return note.name.partition("/")[0] if "/" in note.name else "duplicates"


def summed(notes: Sequence[TaskNote], name: str) -> Counter[str]:
    """Of the counts that have it."""
    total: Counter[str] = Counter()
    for note in notes:
        total.update(note.counts.get(name, {}))
    return total
