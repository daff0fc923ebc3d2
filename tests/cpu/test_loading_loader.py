"""The loader gives the same samples whatever its batch, threads and timing, and counts waits."""

import threading
import time
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from test_loading_packing import VOCAB, store_of

from ridgeline.data.loading import DataState, Loader, TokenWindows, held_out_batches, split_data
from ridgeline.data.loading.packing import PackedBatch
from ridgeline.errors import UsageError

LENGTH = 16


@pytest.fixture(scope="module")
def windows() -> TokenWindows:
    lengths = np.random.default_rng(1).integers(1, 60, 40).tolist()
    return split_data(store_of(lengths), sequence_length=LENGTH, vocab_size=VOCAB).train


def rows_of(batches: list[PackedBatch]) -> list[tuple[list[int], list[int], list[int]]]:
    """Ids, targets and positions of each window, wherever batches begin."""
    names = ("ids", "targets", "positions")
    columns = [torch.cat([getattr(b, name) for b in batches]).view(-1, LENGTH) for name in names]
    return [tuple(row.tolist() for row in rows) for rows in zip(*columns, strict=True)]  # type: ignore[misc]


def take(loader: Loader, count: int) -> list[PackedBatch]:
    return [next(loader) for _ in range(count)]


@pytest.fixture(scope="module")
def expected(windows: TokenWindows) -> list[tuple[list[int], list[int], list[int]]]:
    with Loader(windows, DataState(seed=3), sequences=1) as loader:
        return rows_of(take(loader, 3 * windows.num_windows))


@pytest.mark.parametrize("sequences", [1, 2, 5, 24])
@pytest.mark.parametrize("workers", [1, 2, 7])
def test_batch_and_workers_change_nothing(
    windows: TokenWindows, expected: list[Any], sequences: int, workers: int
) -> None:
    options = {"sequences": sequences, "workers": workers, "ahead": workers + 1}
    with Loader(windows, DataState(seed=3), **options) as loader:
        rows = rows_of(take(loader, len(expected) // sequences))
    assert rows == expected[: len(rows)]


def test_threads_that_finish_out_of_order(
    windows: TokenWindows, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers, release, pack_one = count(), threading.Event(), TokenWindows.batch

    def slow_first(self: TokenWindows, chosen: Any) -> PackedBatch:
        match next(numbers):
            case 0:
                release.wait(10)
            case 3:
                release.set()
        return pack_one(self, chosen)

    monkeypatch.setattr(TokenWindows, "batch", slow_first)
    with Loader(windows, DataState(seed=3), sequences=2, workers=4, ahead=4) as loader:
        assert rows_of(take(loader, 6)) == expected[:12]


def test_resuming_at_every_sample(windows: TokenWindows, expected: list[Any]) -> None:
    for consumed in range(len(expected) - 6):
        with Loader(windows, DataState(3, consumed), sequences=3, ahead=1) as loader:
            assert rows_of(take(loader, 2)) == expected[consumed : consumed + 6]


def test_the_state_is_that_of_batches_given_out(windows: TokenWindows, expected: list[Any]) -> None:
    """What was packed ahead and never given out is given by the loader that goes on."""
    with Loader(windows, DataState(seed=3), sequences=4, ahead=6) as loader:
        first = rows_of(take(loader, 3))
        state = loader.state
        assert state == DataState(3, 12)
    with Loader(windows, state, sequences=5) as loader:  # another batch
        assert first + rows_of(take(loader, 3)) == expected[:27]
        assert loader.epoch == 27 / windows.num_windows


def test_waits_are_counted(windows: TokenWindows, monkeypatch: pytest.MonkeyPatch) -> None:
    with Loader(windows, DataState(0), sequences=2, ahead=3) as loader:
        for _ in range(10):
            while not all(future.done() for future in loader._queue):  # a step that takes long
                time.sleep(0.001)
            next(loader)
        assert (loader.waits, loader.waited_s, loader.num_batches) == (0, 0.0, 10)
    gate, pack_one = threading.Semaphore(1), TokenWindows.batch

    def held_back(self: TokenWindows, chosen: Any) -> PackedBatch:
        gate.acquire()
        return pack_one(self, chosen)

    monkeypatch.setattr(TokenWindows, "batch", held_back)
    with Loader(windows, DataState(0), sequences=2, ahead=3) as loader:
        next(loader)
        first_waits = loader.waits
        late = loader._queue[0]
        result = late.result

        def released(*_: Any) -> Any:  # packed only after the step began to wait for it
            gate.release()
            return result()

        monkeypatch.setattr(late, "result", released)
        next(loader)
        gate.release(10)  # for those that are packed ahead
    assert first_waits == 0  # nobody can be early for the first
    assert loader.waits == 1
    assert loader.waited_s > 0


def test_an_error_in_a_thread_reaches_the_step() -> None:
    store = store_of([300])
    windows = split_data(store, sequence_length=LENGTH, vocab_size=VOCAB).train
    store.shards[0].tokens[7] = 65_000
    with (
        Loader(windows, DataState(0), sequences=4) as loader,
        pytest.raises(UsageError, match="damaged"),
    ):
        take(loader, windows.num_windows)


def test_closing_leaves_no_thread(windows: TokenWindows) -> None:
    with Loader(windows, DataState(0), sequences=2, workers=3) as loader:
        next(loader)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("data")]


def test_documents_of_a_batch_are_named(windows: TokenWindows) -> None:
    with Loader(windows, DataState(5), sequences=3) as loader:
        first = loader.state.consumed
        batch = next(loader)
        lines = [origin.line for origin in loader.documents(first)]
    places = batch.ids[batch.starts[:-1].long()].tolist()
    documents = [windows.store.document_of(token - 1) + 1 for token in places if token]
    assert lines == documents


def test_held_out_batches_have_every_window_once(windows: TokenWindows) -> None:
    for sequences in (1, 4, 1000):
        rows = rows_of(list(held_out_batches(windows, sequences)))
        assert len(rows) == windows.num_windows
        tokens = [token for ids, _, _ in rows for token in ids if token]
        assert tokens == list(range(1, windows.num_tokens + 1))


@pytest.mark.parametrize("name", ["sequences", "workers", "ahead"])
def test_options_that_make_no_sense(windows: TokenWindows, name: str) -> None:
    with pytest.raises(UsageError, match=f"{name} is 0; give at least 1"):
        Loader(windows, DataState(0), **{"sequences": 1, name: 0})
