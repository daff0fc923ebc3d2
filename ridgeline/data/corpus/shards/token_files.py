"""`tokens-*.arrow`: the ids of documents as an Arrow file, mapped into memory when it is opened.

One record batch with a row for each document: `ids`, a large_list of uint16 or uint32 whose values
lie one behind the other, and `place`, the number of the file in the metadata's list and the byte
(or row, of a table) where the document begins in it. The same documents give the same bytes.

    save_token_file(path, TokenFile(...))
    file = open_token_file(path)
    file.ids[file.offsets[3] : file.offsets[4]]         # of the fourth document, from the disk
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from numpy.typing import NDArray

from ridgeline.data.corpus.tokens import TokenCertificate
from ridgeline.errors import CorpusError

METADATA = b"ridgeline"
VERSION = 1


@dataclass(frozen=True)
class TokenHead:
    """What is known of a file of tokens besides them."""

    vocab_size: int
    tokenizer: str  # its digest
    files: tuple[str, ...]  # that the documents come from
    certificate: TokenCertificate


@dataclass(frozen=True)
class TokenFile:
    """N tokens of D documents."""

    ids: NDArray[Any]  # [N] uint16 or uint32
    offsets: NDArray[np.int64]  # [D + 1]: where documents begin, then N
    places: NDArray[np.int64]  # [D, 2]: number of the file, byte or row in it
    head: TokenHead


def save_token_file(path: Path, file: TokenFile) -> None:
    values = pyarrow.array(file.ids)
    ids = pyarrow.LargeListArray.from_arrays(pyarrow.array(file.offsets), values)
    places = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(file.places.ravel()), 2)
    head = {
        "version": VERSION,
        "vocab_size": file.head.vocab_size,
        "tokenizer": file.head.tokenizer,
        "files": list(file.head.files),
        "certificate": file.head.certificate.to_json(),
    }
    fields = [
        pyarrow.field("ids", ids.type, nullable=False),
        pyarrow.field("place", places.type, nullable=False),
    ]
    schema = pyarrow.schema(fields, metadata={METADATA: json.dumps(head, sort_keys=True)})
    with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_file(sink, schema) as writer:
        writer.write_batch(pyarrow.record_batch([ids, places], schema=schema))


def open_token_file(path: Path) -> TokenFile:
    """CorpusError where it is missing, cut short, or not such a file."""
    try:
        with pyarrow.memory_map(str(path)) as mapped:
            reader = pyarrow.ipc.open_file(mapped)
            head = _head_of(reader.schema.metadata)
            batch = reader.get_batch(0)
            ids, places = batch.column("ids"), batch.column("place")
            file = TokenFile(
                ids=ids.values.to_numpy(),
                offsets=ids.offsets.to_numpy(),
                places=places.values.to_numpy().reshape(-1, 2),
                head=head,
            )
    except (OSError, pyarrow.ArrowException, KeyError, IndexError, ValueError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise CorpusError(f"{path} is missing or damaged: {reason}; build it again") from None
    _check(path, file)
    return file


def _head_of(metadata: dict[bytes, bytes] | None) -> TokenHead:
    head = json.loads((metadata or {})[METADATA])
    if head["version"] != VERSION:
        raise ValueError(f"it has version {head['version']}, this Ridgeline reads {VERSION}")
    return TokenHead(
        vocab_size=int(head["vocab_size"]),
        tokenizer=str(head["tokenizer"]),
        files=tuple(head["files"]),
        certificate=TokenCertificate.from_json(head["certificate"]),
    )


def _check(path: Path, file: TokenFile) -> None:
    offsets = file.offsets
    is_whole = len(offsets) == len(file.places) + 1 and offsets[0] == 0
    if not is_whole or offsets[-1] != len(file.ids) or (np.diff(offsets) <= 0).any():
        raise CorpusError(f"{path} is damaged: its offsets do not rise; build it again")
    if file.ids.dtype not in (np.uint16, np.uint32):
        raise CorpusError(f"{path} holds {file.ids.dtype}; expected uint16 or uint32")
