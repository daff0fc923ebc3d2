"""Whether a corpus is what its index says: hashes, sizes, ids, and each document's account.

for problem in check_corpus(Path("corpus"), progress): print(problem)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.compute
import pyarrow.parquet

from ridgeline.data.corpus.shards.index import CorpusIndex, ShardEntry, read_index, sha256_of
from ridgeline.data.corpus.shards.token_files import TokenFile, open_token_file
from ridgeline.errors import CorpusError
from ridgeline.progress import Progress


@dataclass(frozen=True)
class CorpusCheck:
    index: CorpusIndex
    verdicts: dict[str, int]  # documents by verdict; "" are those that were kept
    problems: tuple[str, ...]


def check_corpus(folder: Path, progress: Progress | None = None) -> CorpusCheck:
    """Reads every file of it."""
    index = read_index(folder)
    verdicts: Counter[str] = Counter()
    problems: list[str] = []
    for number, entry in enumerate(index.shards):
        problems += _shard_problems(folder, entry, index, verdicts)
        if progress is not None:
            progress("checking", number + 1, len(index.shards))
    listed = {name for entry in index.shards for name in (entry.tokens, entry.documents)}
    present = sorted([*folder.glob("tokens-*.arrow"), *folder.glob("documents-*.parquet")])
    problems += [f"{path} is not in the index" for path in present if path.name not in listed]
    return CorpusCheck(index, dict(sorted(verdicts.items())), tuple(problems))


def _shard_problems(
    folder: Path, entry: ShardEntry, index: CorpusIndex, verdicts: Counter[str]
) -> Iterator[str]:
    for name, expected in (
        (entry.tokens, entry.tokens_sha256),
        (entry.documents, entry.documents_sha256),
    ):
        try:
            if sha256_of(folder / name) != expected:
                yield f"{folder / name} has other bytes than when it was written"
        except OSError as error:
            yield f"cannot read {folder / name}: {error.strerror}"
            return
    try:
        file = open_token_file(folder / entry.tokens)
        table = pyarrow.parquet.read_table(
            folder / entry.documents, columns=["verdict", "first_token", "num_tokens"]
        )
    except CorpusError as error:
        yield str(error)
        return
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).partition("\n")[0]
        yield f"{folder / entry.documents} is damaged: {reason}"
        return
    if (len(file.ids), len(file.places)) != (entry.num_tokens, entry.num_documents):
        yield f"{folder / entry.tokens} has other sizes than the index says"
    if file.head.tokenizer != index.tokenizer:
        yield f"{folder / entry.tokens} is of another tokenizer than the index says"
    if len(file.ids) and int(file.ids.max()) >= index.vocab_size:
        yield f"{folder / entry.tokens} has token {file.ids.max()}, outside the vocabulary"
    verdicts.update(table.column("verdict").to_pylist())
    if not _accounts_agree(table, file):
        yield f"{folder / entry.documents} does not describe the documents of {entry.tokens}"


def _accounts_agree(table: pyarrow.Table, file: TokenFile) -> bool:
    """Whether the kept rows, and no others, are the documents that have tokens."""
    kept = pyarrow.compute.equal(table.column("verdict"), "")
    rows = table.filter(kept)
    dropped = table.filter(pyarrow.compute.invert(kept))
    if dropped.column("first_token").null_count != len(dropped):
        return False
    first = rows.column("first_token").to_numpy()
    lengths = rows.column("num_tokens").to_numpy()
    return np.array_equal(first, file.offsets[:-1]) and np.array_equal(
        lengths, np.diff(file.offsets)
    )
