"""Packed windows: every token once an epoch, no target outside its document, on either side of the
split. Checked against documents walked one token at a time.
"""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from ridgeline.data.loading import IGNORED, SampleOrder, TokenStore, TokenWindows, split_data
from ridgeline.data.loading.packing import PackedBatch, pack
from ridgeline.data.loading.split import SplitData
from ridgeline.data.loading.store import TokenShard
from ridgeline.data.loading.windows import best_fit
from ridgeline.errors import UsageError
from ridgeline.kernels.token_windows.recycled import KEPT, RecycledMemory

VOCAB = 60_000


def store_of(lengths: list[int], *, counted: list[bool] | None = None, cuts: int = 1) -> TokenStore:
    """Every token is its own place in the corpus plus one: a batch says where each came from."""
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    bounds = np.linspace(0, len(lengths), min(cuts, len(lengths)) + 1).astype(int)
    shards = []
    for low, high in pairwise(bounds.tolist()):
        begin, end = offsets[low], offsets[high]
        shards.append(
            TokenShard(
                tokens=np.arange(begin + 1, end + 1, dtype=np.uint16),
                offsets=offsets[low : high + 1] - begin,
                origins=np.stack([np.zeros(high - low, int), np.arange(low, high) + 1], 1),
                counted=None if counted is None else np.array(counted[begin:end]),
            )
        )
    return TokenStore(shards, ["corpus.jsonl"], VOCAB)


def split(store: TokenStore, length: int, held_out: float, packing: str) -> SplitData:
    options = {"sequence_length": length, "held_out": held_out, "packing": packing}
    return split_data(store, vocab_size=VOCAB, **options)  # type: ignore[arg-type]


def documents_of(batch: PackedBatch) -> list[slice]:
    starts = batch.starts.tolist()
    return [slice(begin, end) for begin, end in pairwise(starts)]


def check_row(batch: PackedBatch, store: TokenStore, num_tokens: int) -> list[tuple[int, int]]:
    """The (token, target) pairs of a row, after every invariant of it was checked."""
    assert batch.starts[0] == 0
    assert batch.starts[-1] == num_tokens == len(batch.ids)
    assert (batch.starts.diff() > 0).all()
    pairs = []
    for part in documents_of(batch):
        ids, targets = batch.ids[part].tolist(), batch.targets[part].tolist()
        assert batch.positions[part].tolist() == list(range(len(ids)))
        if ids[0] == 0:  # filled up
            assert set(ids) == {0}
            assert set(targets) == {IGNORED}
            continue
        assert ids == list(range(ids[0], ids[0] + len(ids)))
        owners = {store.document_of(token - 1) for token in ids}
        owners |= {store.document_of(target - 1) for target in targets if target != IGNORED}
        assert len(owners) == 1
        pairs += list(zip(ids, targets, strict=True))
    return pairs


LENGTHS = st.lists(st.integers(1, 90), min_size=1, max_size=25)


@settings(max_examples=60, deadline=None)
@given(
    lengths=LENGTHS,
    length=st.integers(2, 40),
    held_out=st.sampled_from([0.0, 0.1, 0.5]),
    packing=st.sampled_from(["cut", "whole"]),
    cuts=st.integers(1, 3),
    marks=st.one_of(st.none(), st.integers(0, 2**32)),
    batch=st.integers(1, 5),
)
def test_every_token_once_and_no_target_outside_its_document(
    lengths: list[int],
    length: int,
    held_out: float,
    packing: str,
    cuts: int,
    marks: int | None,
    batch: int,
) -> None:
    total = sum(lengths)
    counted = None
    if marks is not None:
        counted = (np.random.default_rng(marks).random(total) < 0.7).tolist()
    store = store_of(lengths, counted=counted, cuts=cuts)
    try:
        data = split(store, length, held_out, packing)
    except UsageError:  # too short: refused, see below
        reject()
    pairs: list[tuple[int, int]] = []
    sides = []
    for windows in (data.train, data.held_out):
        own = pairs_of_epoch(windows, store, batch) if windows is not None else []
        sides.append({token for token, _ in own})
        pairs += own
        if windows is not None:
            assert windows.num_targets() == sum(target != IGNORED for _, target in own)
    assert Counter(token for token, _ in pairs) == Counter(range(1, total + 1))
    ends = set(store.offsets.tolist())
    for token, target in pairs:
        # token t is at place t - 1, the next one of the corpus is token t + 1
        learned = counted is None or (token < total and counted[token])
        is_last = token in ends
        same_side = any({token, token + 1} <= side for side in sides)
        expected = token + 1 if learned and not is_last and same_side else IGNORED
        assert target == expected


def pairs_of_epoch(windows: TokenWindows, store: TokenStore, batch: int) -> list[tuple[int, int]]:
    order = SampleOrder(windows.num_windows, seed=5)
    pairs = []
    for first in range(0, windows.num_windows, batch):
        count = min(batch, windows.num_windows - first)
        row = windows.batch(order.samples(first, count))
        pairs += check_row(row, store, count * windows.length)
    return pairs


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, length=st.integers(2, 40))
def test_whole_documents_stay_whole(lengths: list[int], length: int) -> None:
    store = store_of(lengths)
    try:
        windows = split(store, length, 0.0, "whole").train
    except UsageError:
        reject()
    pieces = windows.pieces(np.arange(windows.num_windows))
    real = ~pieces.is_padding
    parts = Counter(store.document_of(place) for place in pieces.first[real].tolist())
    assert parts == {n: -(-size // length) for n, size in enumerate(lengths)}


def test_cut_windows_waste_nothing() -> None:
    windows = split(store_of([100, 3, 57, 1, 800]), 64, 0.0, "cut").train
    assert windows.num_windows == -(-961 // 64)
    batch = windows.batch(np.arange(windows.num_windows))
    assert (batch.ids == 0).sum() == windows.num_windows * 64 - 961


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(1, 64), min_size=1, max_size=200))
def test_best_fit(sizes: list[int]) -> None:
    """No window overflows, and no two could be one: all but one are more than half full."""
    windows = best_fit(np.array(sizes), 64)
    fill = np.bincount(windows, weights=sizes)
    assert fill.max() <= 64
    assert fill.min() > 0
    assert (fill <= 32).sum() <= 1


def test_the_held_out_part_is_the_same_for_every_sequence_length() -> None:
    store = store_of([20_000, 300, 5_000, 40])
    sides = []
    for length in (16, 100, 512):
        for packing in ("cut", "whole"):
            judged = split(store, length, 0.1, packing).held_out
            assert judged is not None
            ids = judged.batch(np.arange(judged.num_windows)).ids
            sides.append(sorted(ids[ids > 0].tolist()))
    assert all(side == sides[0] for side in sides)
    assert 0.08 < len(sides[0]) / store.num_tokens < 0.12


def test_another_split_seed_holds_out_something_else() -> None:
    store = store_of([20_000])
    firsts = set()
    for seed in range(5):
        options = {"sequence_length": 64, "vocab_size": VOCAB, "held_out": 0.05}
        judged = split_data(store, split_seed=seed, **options).held_out  # type: ignore[arg-type]
        assert judged is not None
        firsts.add(int(judged.batch(np.array([0])).ids[0]))
    assert len(firsts) > 1


def test_shards_change_nothing() -> None:
    lengths = [5, 90, 1, 33, 64, 7]
    counted = (np.arange(sum(lengths)) % 3 > 0).tolist()
    rows = []
    for cuts in (1, 2, 6):
        windows = split(store_of(lengths, counted=counted, cuts=cuts), 32, 0.4, "auto").train
        rows.append(windows.batch(np.arange(windows.num_windows)))
    for row in rows[1:]:
        for name in ("ids", "targets", "positions", "starts"):
            assert torch.equal(getattr(row, name), getattr(rows[0], name))
    digests = {store_of(lengths, counted=counted, cuts=cuts).digest for cuts in (1, 2, 6)}
    assert len(digests) == 1
    assert store_of(lengths).digest not in digests


def test_documents_of_a_window_are_named() -> None:
    windows = split(store_of([10, 10, 50]), 16, 0.0, "cut").train
    assert [str(origin) for origin in windows.documents(0)] == [
        "corpus.jsonl line 1",
        "corpus.jsonl line 2",
    ]
    assert [origin.line for origin in windows.documents(1)] == [2, 3]


def test_types_of_a_batch() -> None:
    batch = split(store_of([10, 30]), 16, 0.0, "cut").train.batch(np.array([0, 2]))
    assert batch.ids.dtype == batch.targets.dtype == batch.positions.dtype == torch.int32
    assert batch.starts.dtype == torch.int32
    assert batch.num_targets == (batch.targets != IGNORED).sum()
    moved = batch.to(torch.device("meta"))
    assert (moved.num_targets, moved.longest) == (batch.num_targets, 10)


def test_memory_is_used_again_and_never_while_somebody_holds_it() -> None:
    windows = split(store_of([700, 40, 900]), 16, 0.0, "cut").train
    rows = [np.arange(first, first + 8) for first in range(12)]
    expected = [pack(windows.store, windows.pieces(row)) for row in rows]
    held = [windows.batch(row).ids[5:] for row in rows]  # a part of a batch holds it too
    for ids, other in zip(held, expected, strict=True):
        assert torch.equal(ids, other.ids[5:])
    places = {ids.data_ptr() for ids in held}
    del held, ids
    smaller = windows.batch(rows[0][:2])
    assert len(smaller.ids) == 32
    for row, other in zip(rows, expected, strict=True):
        batch = windows.batch(row)
        for name in ("ids", "targets", "positions", "starts"):
            assert torch.equal(getattr(batch, name), getattr(other, name))
        assert batch.lengths == other.lengths
        assert batch.learned == other.learned
    assert len(places) == len(rows)


def test_memory_that_is_free_is_taken() -> None:
    memory = RecycledMemory(rows=3, dtype=torch.int32)
    lent = torch.from_numpy(memory.take(64))
    place, part = lent.data_ptr(), lent[1]
    del lent
    assert memory.take(64).ctypes.data != place  # a part is still held
    del part
    assert memory.take(64).ctypes.data == place
    assert memory.take(65).shape == (3, 65)
    many = [memory.take(8) for _ in range(3 * KEPT)]
    del many
    assert len(memory._free) == KEPT


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        ([5, 3], {}, "8 tokens, fewer than one sequence of 16; give more text or a shorter"),
        ([17], {"held_out": 0.5}, "one short document that cannot be divided"),
        ([40], {"vocab_size": 39}, "token 40 and the model a vocabulary of 39"),
        ([1] * 40, {}, "every target of the data is ignored"),
        ([40], {"sequence_length": 1}, "sequence_length is 1"),
        ([40], {"held_out": 1.0}, "held_out is 1.0"),
        ([40], {"held_out": float("nan")}, "held_out is nan"),
        ([40], {"packing": "hole"}, "did you mean 'whole'"),
    ],
)
def test_data_that_cannot_be_trained_on(
    lengths: list[int], options: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError, match=message) as error:
        split_data(store_of(lengths), **{"sequence_length": 16, "vocab_size": VOCAB, **options})  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


def test_labels_that_are_all_ignored() -> None:
    with pytest.raises(UsageError, match="every target of the data is ignored"):
        split(store_of([30, 30], counted=[False] * 60), 16, 0.0, "auto")
    # a first token is nobody's target
    with pytest.raises(UsageError, match="every target of the data is ignored"):
        split(store_of([30, 30], counted=[True, *[False] * 59]), 16, 0.0, "auto")


def test_a_damaged_token_is_named() -> None:
    store = store_of([30, 30])
    store.shards[0].tokens[42] = 65_000
    windows = split(store, 16, 0.0, "cut").train
    with pytest.raises(UsageError, match=r"token 65000 of corpus.jsonl line 2 is outside"):
        windows.batch(np.arange(windows.num_windows))
