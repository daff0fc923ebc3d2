"""Token shards: a folder that holds a `TokenStore`, mapped into memory when it is opened.

tokens.json             the head, written last: sizes, vocabulary, digest, names of the files
00000.tokens.npy        [N] uint16 or uint32, documents one behind the other
00000.offsets.npy       [D + 1] int64: where documents begin, then N
00000.origins.npy       [D, 2] int64: number of the file in the head, line in it
00000.counted.npy       [N] bool: whether a token is learned; absent where all are

save_shards(store, folder, tokenizer)
store = open_shards(folder, tokenizer)
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ridgeline.data.loading.store import TokenShard, TokenStore
from ridgeline.data.tokenizer import Tokenizer
from ridgeline.errors import UsageError
from ridgeline.formats.files import atomic_write

HEAD_NAME = "tokens.json"
FORMAT = "ridgeline-tokens"
VERSION = 1
SHARD_TOKENS = 2**28  # a shard ends with the document that reaches this many


def save_shards(
    store: TokenStore, folder: Path, tokenizer: Tokenizer, shard_tokens: int = SHARD_TOKENS
) -> None:
    """A folder without a head is not one of shards: a writer that was killed leaves none."""
    sizes = []
    for number, shard in enumerate(_cut(store, shard_tokens)):
        arrays: dict[str, NDArray[Any]] = {
            "tokens": shard.tokens,
            "offsets": shard.offsets,
            "origins": shard.origins,
        }
        if shard.counted is not None:
            arrays["counted"] = shard.counted
        for name, array in arrays.items():
            with atomic_write(folder / f"{number:05d}.{name}.npy", "wb") as file:
                np.save(file, array, allow_pickle=False)
        sizes.append({"tokens": len(shard.tokens), "documents": len(shard.origins)})
    head = {
        "format": FORMAT,
        "version": VERSION,
        "vocab_size": store.vocab_size,
        "tokenizer": tokenizer.digest,
        "digest": store.digest,
        "shards": sizes,
        "files": store.files,
    }
    with atomic_write(folder / HEAD_NAME) as file:
        json.dump(head, file, indent=1)


def _cut(store: TokenStore, shard_tokens: int) -> Iterator[TokenShard]:
    """The shards of a store, cut where they are too large."""
    for shard in store.shards:
        first = 0
        while first < len(shard.origins):
            limit = shard.offsets[first] + shard_tokens
            last = int(np.searchsorted(shard.offsets, limit))
            last = min(last, len(shard.origins))
            begin, end = shard.offsets[first], shard.offsets[last]
            yield TokenShard(
                tokens=shard.tokens[begin:end],
                offsets=shard.offsets[first : last + 1] - begin,
                origins=shard.origins[first:last],
                counted=None if shard.counted is None else shard.counted[begin:end],
            )
            first = last


def open_shards(folder: Path, tokenizer: Tokenizer | None = None) -> TokenStore:
    """The store in a folder; with a tokenizer, only if it is the one that wrote it."""
    head = _read_head(folder)
    if tokenizer is not None and head["tokenizer"] != tokenizer.digest:
        raise UsageError(
            f"{folder} was tokenized with another tokenizer than the model's; build it again"
        )
    shards = [_open_shard(folder, number, size) for number, size in enumerate(head["shards"])]
    return TokenStore(shards, head["files"], head["vocab_size"])


def _read_head(folder: Path) -> dict[str, Any]:
    path = folder / HEAD_NAME
    try:
        head: dict[str, Any] = json.loads(path.read_text())
        if (head["format"], head["version"]) != (FORMAT, VERSION):
            raise UsageError(
                f"{path} has format {head['format']!r} version {head['version']!r}; "
                f"this Ridgeline reads {FORMAT!r} version {VERSION}"
            )
        sizes = [(shard["tokens"], shard["documents"]) for shard in head["shards"]]
        numbers = [number for size in sizes for number in size] + [head["vocab_size"]]
        is_whole = all(isinstance(number, int) and number > 0 for number in numbers)
        texts = [head["tokenizer"], head["digest"], *head["files"]]
        if not (is_whole and sizes and all(isinstance(text, str) for text in texts)):
            raise ValueError("a field has a value that makes no sense")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except KeyError as error:
        raise UsageError(f"{path} is not the head of token shards: {error} is missing") from None
    except (ValueError, TypeError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{path} is not the head of token shards: {error}") from None
    return head


def _open_shard(folder: Path, number: int, size: dict[str, int]) -> TokenShard:
    num_tokens, num_documents = size["tokens"], size["documents"]
    tokens = _array(folder, number, "tokens", (num_tokens,), (np.uint16, np.uint32))
    offsets = np.array(_array(folder, number, "offsets", (num_documents + 1,), (np.int64,)))
    origins = _array(folder, number, "origins", (num_documents, 2), (np.int64,))
    if offsets[0] != 0 or offsets[-1] != num_tokens or (np.diff(offsets) <= 0).any():
        raise UsageError(f"{folder} is damaged: offsets of shard {number} do not rise; build again")
    counted = None
    if (folder / f"{number:05d}.counted.npy").exists():
        counted = _array(folder, number, "counted", (num_tokens,), (np.bool_,))
    return TokenShard(tokens, offsets, origins, counted)


def _array(
    folder: Path, number: int, name: str, shape: tuple[int, ...], dtypes: tuple[type, ...]
) -> NDArray[Any]:
    path = folder / f"{number:05d}.{name}.npy"
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UsageError(f"{path} is missing or cut short: {error}; build it again") from None
    if array.shape != shape or array.dtype not in dtypes:
        raise UsageError(
            f"{path} holds {array.dtype} of shape {array.shape}, its head says {shape}; build again"
        )
    return array.view(np.ndarray)
