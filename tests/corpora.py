"""Documents tables as the corpus chain writes them, and its tasks run one after the other."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ridgeline.data.corpus.duplicates import DuplicateOptions, DuplicateReport, duplicate_tasks
from ridgeline.data.corpus.ledger.task import perform

SCHEMA = pa.schema(
    [
        ("id", pa.binary(16)),
        ("verdict", pa.string()),
        ("text_hash", pa.binary(16)),
        ("text", pa.large_string()),
    ]
)
Named = tuple[str, str]  # a document's place and its text


def digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def write_table(path: Path, documents: Sequence[Named], dropped: Sequence[Named] = ()) -> None:
    rows = [(name, text, "") for name, text in documents]
    rows += [(name, text, "short") for name, text in dropped]
    columns = [
        pa.array([digest(name) for name, _, _ in rows], pa.binary(16)),
        pa.array([verdict for _, _, verdict in rows], pa.string()),
        pa.array([digest(text) for _, text, _ in rows], pa.binary(16)),
        pa.array([None if verdict else text for _, text, verdict in rows], pa.large_string()),
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_arrays(columns, schema=SCHEMA), path)


def cut(documents: Sequence[Named], num_units: int) -> list[list[Named]]:
    """As units of about the same size; there may be empty ones."""
    bounds = [len(documents) * unit // num_units for unit in range(num_units + 1)]
    return [list(documents[a:b]) for a, b in pairwise(bounds)]


def run_stages(folder: Path, stages: Iterable[Sequence[Any]]) -> list[dict[str, Any]]:
    return [perform(folder, task, "").counts for stage in stages for task in stage]


class Found:
    """What the steps make of documents."""

    def __init__(
        self, folder: Path, units: Sequence[Sequence[Named]], options: DuplicateOptions
    ) -> None:
        names = [f"documents-{unit}.parquet" for unit in range(len(units))]
        for name, unit in zip(names, units, strict=True):
            write_table(folder / name, unit)
        num_documents = sum(map(len, units))
        num_bytes = sum(len(text.encode()) for unit in units for _, text in unit)
        self.steps = duplicate_tasks(names, num_bytes, num_documents, options)
        self.folder = folder
        self.report = DuplicateReport.of(run_stages(folder, self.steps.stages), options)
        self.name_of = {digest(name): name for unit in units for name, _ in unit}
        self.near = self.removed(self.steps.near)
        self.exact = self.removed(self.steps.exact)

    def removed(self, file: str) -> dict[str, tuple[str, float]]:
        """Each removed document's survivor and how similar it is."""
        rows = pq.read_table(self.folder / file).to_pylist()
        assert rows == sorted(rows, key=lambda row: row["id"])
        return {
            self.name_of[row["id"]]: (self.name_of[row["duplicate_of"]], row["similarity"])
            for row in rows
        }


def vocabulary(generator: random.Random, size: int = 5000) -> list[str]:
    letters = "etaoinshrdlucmfwygpbvkxqjz"
    return ["".join(generator.choices(letters, k=generator.randint(2, 9))) for _ in range(size)]


def shingle_set(text: str, ngram: int = 5) -> set[tuple[str, ...]]:
    """Of text in ASCII, by another way than the kernels'."""
    lowered = "".join(c if c.isascii() and c.isalnum() else " " for c in text.lower())
    words = lowered.split()
    if len(words) < ngram:
        return {tuple(words)} if words else set()
    return {tuple(words[i : i + ngram]) for i in range(len(words) - ngram + 1)}


def jaccard(one: set[Any], other: set[Any]) -> float:
    return len(one & other) / max(1, len(one | other))
