"""The last two pieces of work on a unit: its kept documents' tokens, and its table without texts.

Each reads files and writes one, the same bytes each time, as the ledger wants its tasks. The last
inputs may be files that name documents to leave out (near duplicates, eval sets): `verdicts` says
what each of them is, in their order.

    write_tokens(output, [table, near], tokenizer="demo", digest=..., verdicts=["near_duplicate"])
    write_documents(output, [table, near, tokens], verdicts=["near_duplicate"])
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.compute
import pyarrow.parquet
from numpy.typing import NDArray

from ridgeline.data.corpus.shards.documents import is_kept, judged_batches
from ridgeline.data.corpus.shards.token_files import (
    TokenFile,
    TokenHead,
    open_token_file,
    save_token_file,
)
from ridgeline.data.corpus.tokens import CorpusTokenizer, TokenCertificate, certified, summed
from ridgeline.data.tokenizer import Tokenizer
from ridgeline.errors import CorpusError
from ridgeline.models.checkpoint import resolve_model

SAMPLE_SEED = 26  # of what is checked against the library


def write_tokens(
    output: Path,
    inputs: Sequence[Path],
    *,
    tokenizer: str,
    digest: str,
    verdicts: Sequence[str] = (),
    certify: bool = False,
    seed: int = SAMPLE_SEED,
) -> dict[str, Any]:
    """`tokens-*.arrow` of the kept documents. `tokenizer`: a model's name or folder; `digest`: of
    the tokenizer that the build began with. The notes are the certificate's numbers.
    """
    encoder = _tokenizer(tokenizer)
    if encoder.tokenizer.digest != digest:
        raise CorpusError(f"the tokenizer of {tokenizer} changed while the corpus was built")
    tables, removed = _divided(inputs, verdicts)
    parts = list(_encoded(encoder, judged_batches(tables, removed), certify=certify, seed=seed))
    certificate = summed(part.head.certificate for part in parts)
    save_token_file(output, _joined(encoder, parts, certificate))
    return certificate.to_json()


def write_documents(
    output: Path, inputs: Sequence[Path], *, verdicts: Sequence[str] = ()
) -> dict[str, Any]:
    """`documents-*.parquet`: every row without its text, and where its tokens lie in the last
    input, the unit's tokens. The notes count the verdicts.
    """
    tables, removed = _divided(inputs[:-1], verdicts)
    offsets = open_token_file(inputs[-1]).offsets
    counts: Counter[str] = Counter()
    done, writer = 0, None
    for batch in judged_batches(tables, removed):
        counts.update(batch.column("verdict").to_pylist())
        kept = is_kept(batch).to_numpy(zero_copy_only=False)
        numbers = np.cumsum(kept) - 1 + done
        done += int(kept.sum())
        if done >= len(offsets):
            raise CorpusError(f"{inputs[-1]} has fewer documents than its table; build it again")
        batch = batch.drop_columns(["text"])
        for name, values in (
            ("first_token", offsets[:-1]),
            ("num_tokens", np.diff(offsets)),
        ):
            batch = batch.append_column(name, _of_kept(values, numbers, kept))
        if writer is None:
            writer = pyarrow.parquet.ParquetWriter(output, batch.schema, compression="zstd")
        writer.write_batch(batch)
    if writer is None or done != len(offsets) - 1:
        raise CorpusError(f"{inputs[-1]} has other documents than its table; build it again")
    writer.close()
    return {"verdicts": dict(sorted(counts.items()))}


@lru_cache(maxsize=2)
def _tokenizer(name: str) -> CorpusTokenizer:
    return CorpusTokenizer(Tokenizer.load(resolve_model(name)))


def _divided(
    inputs: Sequence[Path], verdicts: Sequence[str]
) -> tuple[Sequence[Path], Mapping[str, Path]]:
    cut = len(inputs) - len(verdicts)
    return inputs[:cut], dict(zip(verdicts, inputs[cut:], strict=True))


def _encoded(
    encoder: CorpusTokenizer, batches: Iterator[Any], *, certify: bool, seed: int
) -> Iterator[TokenFile]:
    for batch in batches:
        rows = batch.filter(is_kept(batch))
        if not len(rows):
            continue
        encoded, certificate = certified(encoder, rows.column("text"), seed=seed, certify=certify)
        names = rows.column("file").cast(pyarrow.string()).dictionary_encode()
        offsets = rows.column("offset").to_numpy().astype(np.int64)
        yield TokenFile(
            ids=encoded.ids,
            offsets=encoded.offsets,
            places=np.stack([names.indices.to_numpy().astype(np.int64), offsets], 1),
            head=_head(encoder, names.dictionary.to_pylist(), certificate),
        )


def _head(
    encoder: CorpusTokenizer, files: Sequence[str], certificate: TokenCertificate
) -> TokenHead:
    tokenizer = encoder.tokenizer
    return TokenHead(tokenizer.vocab_size, tokenizer.digest, tuple(files), certificate)


def _joined(
    encoder: CorpusTokenizer, parts: Sequence[TokenFile], certificate: TokenCertificate
) -> TokenFile:
    files: dict[str, int] = {}
    places, offsets, base = [np.empty((0, 2), np.int64)], [np.zeros(1, np.int64)], 0
    for part in parts:
        numbers = np.array([files.setdefault(file, len(files)) for file in part.head.files])
        places.append(np.stack([numbers[part.places[:, 0]], part.places[:, 1]], 1))
        offsets.append(part.offsets[1:] + base)
        base += len(part.ids)
    return TokenFile(
        ids=np.concatenate([np.empty(0, encoder.dtype), *(part.ids for part in parts)]),
        offsets=np.concatenate(offsets),
        places=np.concatenate(places),
        head=_head(encoder, list(files), certificate),
    )


def _of_kept(values: NDArray[Any], numbers: NDArray[Any], kept: NDArray[np.bool_]) -> Any:
    """The value of each kept row, null for the others."""
    chosen = np.zeros(len(kept), dtype=np.int64)
    chosen[kept] = values[numbers[kept]]
    return pyarrow.array(chosen, mask=~kept)
