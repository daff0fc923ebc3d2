"""A task a unit: which documents share a run of words with an evaluation set.

Runs are found by the hashes of kernels/minhash and then compared word by word, so that no document
is dropped for two runs that happen to have one hash. The first run of a document is told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ridgeline.data.corpus.decontamination.grams import (
    DecontaminationOptions,
    EvaluationText,
    Runs,
    evaluation_texts,
    words_of,
)
from ridgeline.data.corpus.duplicates.tables import ID, packed, texts
from ridgeline.kernels.minhash import shingles

CONTAMINATED = pa.schema(
    [("id", ID), ("set", pa.string()), ("row", pa.int64()), ("ngram", pa.string())]
)


class Hit(NamedTuple):
    document: int
    place: int  # of the run's first word
    source: EvaluationText
    words: tuple[str, ...]


def decontaminate(
    output: Path, inputs: Sequence[Path], *, options: DecontaminationOptions
) -> dict[str, Any]:
    """From a documents table and `EVALUATIONS` to `CONTAMINATED`, sorted by name."""
    search = _search(str(inputs[1]), inputs[1].stat().st_mtime_ns, options)
    rows: list[tuple[bytes, str, int, str]] = []
    for table in texts(inputs[0], ["id"]):
        names, documents = table["id"].to_pylist(), table["text"]
        for hit in search.hits(documents):
            source = hit.source
            rows.append((names[hit.document], source.set, source.row, " ".join(hit.words)))
    rows.sort()
    columns = [
        pa.array([row[field] for row in rows], kind.type) for field, kind in enumerate(CONTAMINATED)
    ]
    pq.write_table(pa.Table.from_arrays(columns, schema=CONTAMINATED), output, compression="zstd")
    by_set = Counter(row[1] for row in rows)
    return {
        "contaminated": len(rows),
        "contaminated_by_set": dict(sorted(by_set.items())),
        "texts_too_short": search.num_too_short,
    }


@lru_cache(maxsize=1)
def _search(path: str, modified_ns: int, options: DecontaminationOptions) -> Search:
    """Made once for all units that a process looks through."""
    sets = pq.read_table(path)
    return Search(evaluation_texts(*(column.to_pylist() for column in sets)), options)


class Search:
    """For the runs of some evaluation texts."""

    def __init__(self, sources: Sequence[EvaluationText], options: DecontaminationOptions) -> None:
        short = [each for each in sources if len(each.words) < options.ngram]
        self.num_too_short = sum(len(each.words) < options.least for each in short)
        short = [each for each in short if len(each.words) >= options.least]
        self._long = Runs(sources, options.ngram)
        # A short text begins with one of these; the documents that have one are then searched for
        # the texts of each length.
        heads = [EvaluationText(each.set, each.row, each.words[: options.least]) for each in short]
        self._heads = Runs(heads, options.least) if heads else None
        lengths = sorted({len(each.words) for each in short})
        self._whole = [
            Runs([each for each in short if len(each.words) == length], length)
            for length in lengths
        ]

    def hits(self, documents: Any) -> list[Hit]:
        """One a document: its first, and of those at one place the longest."""
        every = np.arange(len(documents))
        hits = list(self._hits(self._long, documents, every))
        if self._heads is not None:
            chosen = np.array(
                sorted({hit.document for hit in self._hits(self._heads, documents, every)}),
                np.int64,
            )
            for runs in self._whole:
                hits += self._hits(runs, documents, chosen)
        hits.sort(key=lambda hit: (hit.document, hit.place, -len(hit.words)))
        return [
            hit
            for hit, before in zip(hits, [None, *hits], strict=False)
            if before is None or before.document != hit.document
        ]

    @staticmethod
    def _hits(runs: Runs, documents: Any, chosen: Any) -> Iterator[Hit]:
        """The first true one in each of these documents."""
        if not len(chosen):
            return
        column = documents.take(pa.array(chosen))
        hashes_S, starts = shingles(*packed(column), ngram=runs.length)
        places = runs.places(hashes_S.numpy().view(np.uint64))
        number = np.searchsorted(starts.numpy(), places, side="right") - 1
        done = -1
        for document, place in zip(number.tolist(), places.tolist(), strict=True):
            if document == done:
                continue
            words = words_of(column[document].as_py())
            start = place - int(starts[document])
            run = tuple(words[start : start + runs.length])
            source = runs.source(run)
            if source is not None:
                done = document
                yield Hit(int(chosen[document]), start, source, run)
