"""The documents table of a unit: read, cleaned, named by language, judged and scrubbed.

A row a document, in the order of its place. What is dropped or quarantined keeps its row, without a
text; nothing vanishes.

    documents(output, [], unit=unit, recipe=CorpusRecipe(), languages=True)      # a task
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars
import pyarrow
import pyarrow.parquet

from ridgeline.data.corpus.recipe import CorpusRecipe
from ridgeline.data.corpus.sources.document import RawDocument
from ridgeline.data.corpus.sources.read import piece_documents
from ridgeline.data.corpus.stages.clean import clean
from ridgeline.data.corpus.stages.language import identify
from ridgeline.data.corpus.stages.pii import scrub
from ridgeline.data.corpus.stages.quality import PolarsEngine, verdicts
from ridgeline.data.corpus.units.unit import Unit

BATCH_BYTES = 4 << 20  # of text that are held at once: memory is a few times as much
BATCH_DOCUMENTS = 1 << 14
ID_BYTES = 16
NUM_SHOWN = 5  # quarantined documents of a unit that its note names
KEPT, QUARANTINED, LANGUAGE = "", "quarantined", "language"  # verdicts; others are rules' names
SCHEMA = pyarrow.schema(
    [
        ("id", pyarrow.binary(ID_BYTES)),
        ("file", pyarrow.string()),
        ("offset", pyarrow.int64()),  # byte of the unpacked file, or row of a table
        ("verdict", pyarrow.string()),
        ("reason", pyarrow.string()),  # of a quarantined one
        ("language", pyarrow.string()),
        ("language_score", pyarrow.float32()),
        ("num_bytes", pyarrow.int64()),  # as it was read
        ("text_hash", pyarrow.binary(ID_BYTES)),
        ("text", pyarrow.large_string()),
    ]
)


@dataclass
class Tally:
    """What a unit's documents came to."""

    verdicts: Counter[str] = field(default_factory=Counter)
    rules: Counter[str] = field(default_factory=Counter)  # documents each would drop by itself
    scrubbed: Counter[str] = field(default_factory=Counter)
    languages: Counter[str] = field(default_factory=Counter)  # of kept documents
    quarantined: list[tuple[str, int, str]] = field(default_factory=list)  # the first: file, place
    num_bytes: int = 0  # of text as it was read
    kept_bytes: int = 0
    stages_s: Counter[str] = field(default_factory=Counter)  # CPU seconds

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        start = time.process_time()
        yield
        self.stages_s[stage] += time.process_time() - start  # type: ignore[assignment]

    def to_json(self) -> dict[str, Any]:
        return {
            name: dict(sorted(value.items())) if isinstance(value, Counter) else value
            for name, value in vars(self).items()
        }


def documents(
    output: Path, inputs: Sequence[Path], *, unit: Unit, recipe: CorpusRecipe, languages: bool,
    engine: PolarsEngine = "auto",
) -> dict[str, Any]:  # fmt: skip
    """A task. `languages`: whether they are named."""
    tally = Tally()
    with table_writer(output) as writer:
        for batch in _batches(unit, recipe, tally):
            table = _judged(batch, recipe, languages, engine, tally)
            with tally.timed("write"):
                writer.write_table(table)
    return tally.to_json()


@contextmanager
def table_writer(output: Path) -> Iterator[Any]:
    """Of documents tables."""
    with (
        output.open("wb") as file,
        pyarrow.parquet.ParquetWriter(
            file, SCHEMA, compression="zstd", compression_level=1
        ) as writer,
    ):
        yield writer


Placed = tuple[str, RawDocument]  # file, document


def _batches(unit: Unit, recipe: CorpusRecipe, tally: Tally) -> Iterator[list[Placed]]:
    """A unit's documents, some megabytes at a time."""
    batch: list[Placed] = []
    num_bytes = 0
    start = time.process_time()
    for piece in unit.pieces:
        for document in piece_documents(piece, recipe.read):
            batch.append((piece.file, document))
            num_bytes += len(document.text)
            if num_bytes >= BATCH_BYTES or len(batch) == BATCH_DOCUMENTS:
                tally.stages_s["read"] += time.process_time() - start  # type: ignore[assignment]
                yield batch
                batch, num_bytes, start = [], 0, time.process_time()
    tally.stages_s["read"] += time.process_time() - start  # type: ignore[assignment]
    if batch:
        yield batch


def _judged(
    batch: list[Placed], recipe: CorpusRecipe, languages: bool, engine: PolarsEngine, tally: Tally
) -> pyarrow.Table:
    tally.num_bytes += sum(document.num_bytes for _, document in batch)
    with tally.timed("clean"):
        texts = polars.Series("text", [document.text for _, document in batch], polars.String)
        texts = clean(texts, recipe.clean)
    with tally.timed("language"):
        named = identify(texts) if languages else [("", 0.0)] * len(batch)
    frame = polars.DataFrame(
        {
            "text": texts,
            "language": [name for name, _ in named],
            "language_score": polars.Series([score for _, score in named], dtype=polars.Float32),
            "reason": [document.reason for _, document in batch],
        }
    )
    with tally.timed("quality"):
        judged = verdicts(frame, recipe.quality, engine)
        is_read = frame["reason"] == ""
        for name in judged.columns[1:]:
            tally.rules[name] += int((judged[name] & is_read).sum())
        frame = frame.with_columns(verdict=_verdict(recipe, judged["verdict"]))
    tally.verdicts.update(frame["verdict"].to_list())
    tally.quarantined += [
        (file, document.offset, document.reason) for file, document in batch if document.reason
    ][: NUM_SHOWN - len(tally.quarantined)]
    with tally.timed("pii"):
        is_kept = frame["verdict"] == KEPT
        scrubbed, counts = scrub(frame["text"].filter(is_kept), recipe.pii)
        tally.scrubbed.update(counts)
    tally.languages.update(frame["language"].filter(is_kept).to_list())
    with tally.timed("write"):
        return _table(batch, frame, iter(scrubbed), tally)


def _verdict(recipe: CorpusRecipe, of_rules: polars.Series) -> polars.Expr:
    """Quarantine comes first, then what is no text at all, then language, then quality."""
    column = polars.col
    expression = polars.lit(of_rules)
    if recipe.language.keep:
        is_other = ~column("language").is_in(list(recipe.language.keep))
        is_vague = column("language_score") < recipe.language.min_score
        verdict = polars.when(is_other | is_vague).then(polars.lit(LANGUAGE)).otherwise(expression)
    else:
        verdict = expression
    is_refused = column("reason") != ""
    return polars.when(is_refused).then(polars.lit(QUARANTINED)).otherwise(verdict)


def _table(
    batch: list[Placed], frame: polars.DataFrame, scrubbed: Iterator[str], tally: Tally
) -> pyarrow.Table:
    kept: list[str | None] = []
    hashes: list[bytes | None] = []
    for verdict in frame["verdict"]:
        text = next(scrubbed) if verdict == KEPT else None
        kept.append(text)
        data = None if text is None else text.encode()
        hashes.append(None if data is None else digest(data))
        tally.kept_bytes += len(data or b"")
    columns = {
        "id": [digest(f"{file}\0{document.offset}".encode()) for file, document in batch],
        "file": [file for file, _ in batch],
        "offset": [document.offset for _, document in batch],
        "verdict": frame["verdict"].to_list(),
        "reason": frame["reason"].to_list(),
        "language": frame["language"].to_list(),
        "language_score": frame["language_score"].to_list(),
        "num_bytes": [document.num_bytes for _, document in batch],
        "text_hash": hashes,
        "text": kept,
    }
    return pyarrow.table(columns, schema=SCHEMA)


def digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=ID_BYTES).digest()
