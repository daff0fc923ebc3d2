"""Ranks of one machine tokenize the data of a run once, and have the same of it; what is wrong with
it is said alike by all.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from process_ranks import run_ranks
from tiny_tokenizers import byte_level_json

from ridgeline.data import Tokenizer
from ridgeline.data.loading import tokenizing
from ridgeline.data.loading.shards import save_shards
from ridgeline.data.loading.tokenizing import read_tokens
from ridgeline.errors import UsageError
from ridgeline.parallel.layout import Layout
from ridgeline.parallel.mesh import Mesh
from ridgeline.training.ranks.reading import read_tokens_once

ROWS = ['{"text": "one text"}', "no JSON", '{"prompt": "two", "completion": " three"}']


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a tokenizer, and beside it data with a broken row and a part that is not learned."""
    byte_level_json().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows.jsonl").write_text("\n".join(ROWS))
    return tmp_path


def reading(mesh: Mesh, folder: Path, data: str) -> tuple[int, str, list[str], list[bool], str]:
    """How often this rank tokenized, and what it has."""
    tempfile.tempdir = str(folder / "temporary")
    usual, count = tokenizing._Builder.add_batch, 0

    def counted(*args: object) -> None:
        nonlocal count
        count += 1
        usual(*args)  # type: ignore[arg-type]

    tokenizing._Builder.add_batch = counted  # type: ignore[method-assign, assignment]
    tokenizer = Tokenizer.load(folder)
    try:
        result = read_tokens_once([folder / data], tokenizer, mesh, None)
    except UsageError as error:
        return count, str(error), [], [], ""
    store = result.store
    places = np.arange(store.num_tokens)
    learned = store.counted_at(places)
    assert learned is not None
    origins = [str(store.origin(number)) for number in range(store.num_documents)]
    return count, store.digest, origins, learned.tolist(), result.quarantine.summary()


def test_one_rank_tokenizes(folder: Path) -> None:
    (folder / "temporary").mkdir()
    first, second = run_ranks(Layout(shard=2), reading, folder, "data")
    expected = read_tokens([folder / "data"], Tokenizer.load(folder))
    assert (first[0], second[0]) == (1, 0)
    assert first[1:] == second[1:]
    assert first[1] == expected.store.digest
    assert first[2] == [str(expected.store.origin(number)) for number in range(2)]
    assert first[4] == expected.quarantine.summary()
    assert "1 row quarantined" in first[4]
    assert not list((folder / "temporary").iterdir())


def test_all_say_what_is_wrong(folder: Path) -> None:
    (folder / "temporary").mkdir()
    first, second = run_ranks(Layout(shard=2), reading, folder, "nothing")
    assert first[1:] == second[1:]
    assert "does not exist" in first[1]
    assert not list((folder / "temporary").iterdir())


def test_token_files_are_opened_by_each(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    store = read_tokens([folder / "data"], tokenizer).store
    save_shards(store, folder / "tokens", tokenizer)
    for each in run_ranks(Layout(shard=2), reading, folder, "tokens"):
        assert each[:2] == (0, store.digest)
