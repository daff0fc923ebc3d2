"""`index.json`: what a corpus holds, written last. A folder without one is no corpus yet.

write_index(corpus, facts={"recipe": recipe, "documents": counts})
index = read_index(corpus)
index.num_tokens, index.certificate.words()
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ridgeline.data.corpus.names import INDEX_NAME
from ridgeline.data.corpus.shards.token_files import open_token_file
from ridgeline.data.corpus.tokens import TokenCertificate, summed
from ridgeline.errors import CorpusError
from ridgeline.formats.files import atomic_write

FORMAT = "ridgeline-corpus"
VERSION = 1
PIECE_BYTES = 2**20


@dataclass(frozen=True)
class ShardEntry:
    """One `tokens-*.arrow` and the table of its documents."""

    tokens: str
    documents: str
    tokens_sha256: str
    documents_sha256: str
    num_tokens: int
    num_documents: int  # that have tokens


@dataclass(frozen=True)
class CorpusIndex:
    vocab_size: int
    tokenizer: str  # its digest
    shards: tuple[ShardEntry, ...]
    certificate: TokenCertificate
    facts: Mapping[str, Any]  # of the build: its recipe, what was counted

    @property
    def num_tokens(self) -> int:
        return sum(shard.num_tokens for shard in self.shards)

    @property
    def num_documents(self) -> int:
        return sum(shard.num_documents for shard in self.shards)


def write_index(
    corpus: Path, facts: Mapping[str, Any], hashes: Mapping[str, str] | None = None
) -> CorpusIndex:
    """Of all pairs of `tokens-*.arrow` and `documents-*.parquet` in the folder. `hashes`: by file
    name, those that are known already.
    """
    hashes = hashes or {}
    shards, heads = [], []
    for path in sorted(corpus.glob("tokens-*.arrow")):
        file, table = open_token_file(path), documents_beside(path)
        if not table.is_file():
            raise CorpusError(f"{path} has no {table.name} beside it; build the corpus again")
        heads.append(file.head)
        shards.append(
            ShardEntry(
                tokens=path.name,
                documents=table.name,
                tokens_sha256=hashes.get(path.name) or sha256_of(path),
                documents_sha256=hashes.get(table.name) or sha256_of(table),
                num_tokens=len(file.ids),
                num_documents=len(file.places),
            )
        )
    if not shards:
        raise CorpusError(f"{corpus} has no tokens-*.arrow; build the corpus first")
    if len({(head.tokenizer, head.vocab_size) for head in heads}) > 1:
        raise CorpusError(f"{corpus} has tokens of several tokenizers; build it again")
    certificate = summed(head.certificate for head in heads)
    index = CorpusIndex(
        heads[0].vocab_size, heads[0].tokenizer, tuple(shards), certificate, dict(facts)
    )
    with atomic_write(corpus / INDEX_NAME) as file_handle:
        json.dump(_document(index), file_handle, indent=1, sort_keys=True, ensure_ascii=False)
        file_handle.write("\n")
    return index


def _document(index: CorpusIndex) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": VERSION,
        "vocab_size": index.vocab_size,
        "tokenizer": index.tokenizer,
        "shards": [asdict(shard) for shard in index.shards],
        "certificate": index.certificate.to_json(),
        "facts": dict(index.facts),
    }


def read_index(corpus: Path) -> CorpusIndex:
    path = corpus / INDEX_NAME
    try:
        document = json.loads(path.read_text())
        if (document["format"], document["version"]) != (FORMAT, VERSION):
            raise CorpusError(
                f"{path} has format {document['format']!r} version {document['version']!r}; "
                f"this Ridgeline reads {FORMAT!r} version {VERSION}"
            )
        return CorpusIndex(
            vocab_size=int(document["vocab_size"]),
            tokenizer=str(document["tokenizer"]),
            shards=tuple(ShardEntry(**shard) for shard in document["shards"]),
            certificate=TokenCertificate.from_json(document["certificate"]),
            facts=document["facts"],
        )
    except OSError as error:
        raise CorpusError(f"cannot read {path}: {error.strerror}; build the corpus first") from None
    except KeyError as error:
        raise CorpusError(f"{path} is no corpus's index: {error} is missing") from None
    except (ValueError, TypeError, AttributeError) as error:
        if isinstance(error, CorpusError):
            raise
        raise CorpusError(f"{path} is no corpus's index: {error}") from None


def documents_beside(tokens: Path) -> Path:
    """The table that belongs to a file of tokens."""
    number = tokens.stem.removeprefix("tokens-")
    return tokens.with_name(f"documents-{number}.parquet")


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()
