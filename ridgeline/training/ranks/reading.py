"""The tokens of a run's data, made once on each machine: its first rank tokenizes and leaves the
tokens in a folder of the system's for temporary files, all of its ranks map them into memory, and
the folder goes. What is wrong with the data is said alike on every rank.

    data = read_tokens_once([Path("corpus/")], tokenizer, mesh, progress)   # on every rank
"""

from __future__ import annotations

import shutil
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ridgeline.data import Tokenizer
from ridgeline.data.loading.shards import open_shards, save_shards
from ridgeline.data.loading.sources import Quarantine
from ridgeline.data.loading.store import TokenStore
from ridgeline.data.loading.tokenizing import TokenizedData, is_tokenized, read_tokens
from ridgeline.parallel.agreeing import host_group, together
from ridgeline.parallel.mesh import Mesh
from ridgeline.progress import Progress

PATIENCE_S = 7 * 86400.0  # tokenizing takes as long as it takes; a rank that dies ends all


class LeftTokens(NamedTuple):
    """What the others of a machine have to know."""

    folder: Path
    quarantine: Quarantine
    dropped_bytes: int


def read_tokens_once(
    paths: Sequence[Path], tokenizer: Tokenizer, mesh: Mesh | None, progress: Progress | None
) -> TokenizedData:
    """Files that hold tokens already are mapped by every rank."""
    if mesh is None or mesh.layout.is_single or is_tokenized(paths):
        return read_tokens(paths, tokenizer, progress)
    hosts, own_name = host_group(mesh, PATIENCE_S), socket.gethostname()
    first = together(hosts, lambda: own_name).index(own_name)  # of this machine's ranks
    folder: Path | None = None

    def tokenize() -> LeftTokens | None:
        nonlocal folder
        if mesh.rank != first:
            return None
        data = read_tokens(paths, tokenizer, progress)
        folder = Path(tempfile.mkdtemp(prefix="ridgeline-tokens-"))
        save_shards(data.store, folder, tokenizer)
        return LeftTokens(folder, data.quarantine, data.dropped_bytes)

    try:
        left = together(hosts, tokenize)[first]
        assert left is not None, "the first rank of a machine tokenizes"
        mapped: list[TokenStore] = []
        together(hosts, lambda: mapped.append(open_shards(left.folder, tokenizer)))
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
    return TokenizedData(mapped[0], left.quarantine, left.dropped_bytes)
