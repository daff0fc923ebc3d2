"""Mixtures: quotas that hold at every point of a run, orders that can be turned around, ranges left
out, and readers of any number that see the same.
"""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_loading_packing import store_of

from ridgeline.data.loading import DataState, Loader, SampleOrder, split_data
from ridgeline.data.loading.loader import BatchPart
from ridgeline.data.loading.mixture import (
    MixedCorpus,
    Mixture,
    Quotas,
    read_mixture,
    save_mixture,
)
from ridgeline.data.loading.order import SkippingOrder
from ridgeline.data.loading.packing import pack
from ridgeline.data.loading.permutation import Permutation, key_of
from ridgeline.data.loading.store import MixedStore, TokenStore
from ridgeline.errors import UsageError

WEIGHTS = st.lists(st.integers(1, 60).map(Fraction), min_size=1, max_size=7)


@settings(max_examples=80, deadline=None)
@given(weights=WEIGHTS)
def test_quotas_hold_at_every_prefix(weights: list[Fraction]) -> None:
    quotas = Quotas(weights)
    num = 2 * int(quotas.counts.sum()) + 3
    sources, numbers = quotas.sources(0, num)
    for source, weight in enumerate(weights):
        share = weight / sum(weights)
        taken = np.cumsum(sources == source)
        # in whole numbers: |taken - share · n| < 1
        n = np.arange(1, num + 1)
        assert (np.abs(taken * share.denominator - share.numerator * n) < share.denominator).all()
        own = numbers[sources == source]
        assert own.tolist() == list(range(len(own)))
        assert all(
            quotas.places(source, k) == at for k, at in enumerate(np.flatnonzero(sources == source))
        )


def test_quotas_far_away_are_found_at_once() -> None:
    quotas = Quotas([Fraction("0.7"), Fraction("0.2"), Fraction("0.1")])
    first = 10**12
    sources, numbers = quotas.sources(first, 10)
    assert np.bincount(sources).tolist() == [7, 2, 1]
    assert numbers[sources == 0].tolist() == list(range(7 * 10**11, 7 * 10**11 + 7))


@settings(max_examples=25, deadline=None)
@given(size=st.integers(1, 2000), seed=st.integers(0, 2**60))
def test_orders_turn_around(size: int, seed: int) -> None:
    order = Permutation(size, key_of(seed))
    places = np.arange(size)
    assert np.array_equal(order.places_of(order(places)), places)
    samples = SampleOrder(size, seed)
    window = int(samples.samples(size // 2, 1)[0])
    assert samples.number_of(window) == size // 2


@settings(max_examples=60, deadline=None)
@given(first=st.integers(0, 10**12), cuts=st.lists(st.integers(1, 3000), min_size=1, max_size=4))
def test_samples_depend_on_their_number_alone(first: int, cuts: list[int]) -> None:
    """Whatever was computed together with them."""
    order, place, parts = SampleOrder(10**12 + 39, 5), first, []
    for count in cuts:
        parts.append(order.samples(place, count))
        place += count
    fresh = SampleOrder(10**12 + 39, 5).samples(first, sum(cuts))
    assert np.array_equal(np.concatenate(parts), fresh)


@settings(max_examples=40, deadline=None)
@given(
    skipped=st.lists(st.tuples(st.integers(0, 80), st.integers(1, 9)), max_size=4),
    first=st.integers(0, 60),
    count=st.integers(1, 60),
)
def test_what_is_left_out(skipped: list[tuple[int, int]], first: int, count: int) -> None:
    ranges, last = [], 0
    for begin, length in sorted(skipped):
        if begin >= last:
            last = begin + length
            ranges.append((begin, last))
    order = SampleOrder(57, 3)
    kept = [n for n in range(400) if not any(begin <= n < end for begin, end in ranges)]
    skipping = SkippingOrder(order, ranges)
    expected = order.samples(0, 400)[kept][first : first + count]
    assert skipping.samples(first, count).tolist() == expected.tolist()
    for number in range(0, 57, 5):
        window = int(order.samples(number, 1)[0])
        place = kept.index(number) if number in kept else None
        assert skipping.number_of(window) == place


def mixed(lengths: list[list[int]], weights: list[str], skip: tuple[str, ...] = ()) -> TokenStore:
    corpora = tuple(MixedCorpus(f"corpus-{n}", weight) for n, weight in enumerate(weights))
    whole = store_of([length for part in lengths for length in part])
    tokens, offsets, origins = (
        whole.shards[0].tokens, whole.shards[0].offsets, whole.shards[0].origins,
    )  # fmt: skip
    shards, document = [], 0
    for part in lengths:
        last = document + len(part)
        begin, end = offsets[document], offsets[last]
        shards.append(
            type(whole.shards[0])(
                tokens[begin:end], offsets[document : last + 1] - begin, origins[document:last]
            )
        )
        document = last
    counts = tuple(1 for _ in lengths)
    return TokenStore(
        shards, whole.files, whole.vocab_size, MixedStore(Mixture(corpora, skip), counts)
    )


def test_each_corpus_comes_by_its_quota_and_whole() -> None:
    store = mixed([[90, 30, 200], [50, 41], [7, 300]], ["0.5", "0.3", "0.2"])
    windows = split_data(store, sequence_length=16, vocab_size=store.vocab_size).train
    bounds = store.corpus_bounds()
    samples = windows.order(11).samples(0, 200)
    owners = []
    for window in samples:
        pieces = windows.pieces(np.array([window]))
        own = {
            int(np.searchsorted(bounds, p, side="right")) - 1
            for p in pieces.first[~pieces.is_padding]
        }
        assert len(own) == 1  # no window has tokens of two corpora
        owners += own
    assert np.bincount(owners).tolist() == [100, 60, 40]
    for corpus, size in enumerate(np.diff(bounds)):
        own_windows = samples[np.array(owners) == corpus]
        num = -(-int(size) // 16)
        assert len(set(own_windows[:num].tolist())) == min(num, len(own_windows))  # once an epoch
    order = windows.order(11)
    assert [order.number_of(int(window)) for window in samples[:10]] == list(range(10))


@pytest.mark.parametrize("readers", [1, 2, 7])
def test_readers_of_any_number_see_the_same(readers: int) -> None:
    store = mixed([[90, 30, 200], [50, 41]], ["2", "1"], ("5-9",))
    windows = split_data(store, sequence_length=8, vocab_size=store.vocab_size).train
    whole = windows.batch(windows.order(1).samples(0, 14 * 3)).ids.reshape(3, 14, 8)
    parts = []
    for reader in range(readers):
        own = range(14 * reader // readers, 14 * (reader + 1) // readers)
        part = BatchPart(14, own)
        with Loader(
            windows, DataState(1), sequences=len(own), workers=1 + reader % 3, part=part
        ) as loader:
            parts.append([next(loader).ids.reshape(len(own), 8) for _ in range(3)])
    for batch in range(3):
        rows = [row for part in parts for row in part[batch].tolist()]
        assert rows == whole[batch].tolist()


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=20),
    length=st.integers(2, 40),
    cuts=st.integers(1, 4),
    packing=st.sampled_from(["cut", "whole"]),
    marks=st.one_of(st.none(), st.integers(0, 2**31)),
)
def test_rows_packed_in_c_are_numpy_s(
    lengths: list[int], length: int, cuts: int, packing: str, marks: int | None
) -> None:
    counted = None
    if marks is not None:
        counted = (np.random.default_rng(marks).random(sum(lengths)) < 0.6).tolist()
    store = store_of(lengths, counted=counted, cuts=cuts)
    try:
        windows = split_data(
            store, sequence_length=length, vocab_size=60_000, packing=packing
        ).train  # type: ignore[arg-type]
    except UsageError:
        return  # too short
    chosen = windows.order(2).samples(0, min(9, windows.num_windows))
    one, other = windows.batch(chosen), pack(store, windows.pieces(chosen))
    assert windows._packer is not None
    for name in ("ids", "targets", "positions", "starts"):
        assert getattr(one, name).tolist() == getattr(other, name).tolist(), name
        assert getattr(one, name).dtype == getattr(other, name).dtype
    told = {name: vars(one)[name] for name in ("num_targets", "learned")}  # by the kernel
    assert told == {name: getattr(other, name) for name in told}
    assert (one.lengths, one.longest) == (other.lengths, other.longest)


def test_a_mixture_s_file(tmp_path: Path) -> None:
    mixture = Mixture((MixedCorpus("../a", "0.7"), MixedCorpus("../b", "3/10")), ("10-19",))
    save_mixture(tmp_path, mixture)
    assert read_mixture(tmp_path) == mixture
    path = tmp_path / "mixture.json"
    lines = path.read_text().splitlines()
    assert json.loads(path.read_text())["skip"] == ["10-19"]
    good = json.loads("\n".join(lines))
    for wrong, message in (
        (good | {"skip": ["9"]}, "give ranges of samples"),
        (good | {"skip": ["1-5", "4-8"]}, "overlap at sample 4"),
        (good | {"skips": []}, "unknown key 'skips'; did you mean 'skip'"),
        (good | {"version": 2}, "another format or version"),
        (good | {"corpora": [{"corpus": "a"}]}, "is no mixture"),
        (good | {"corpora": []}, "needs a corpus"),
        ([], "is no mixture"),
    ):
        path.write_text(json.dumps(wrong))
        with pytest.raises(UsageError, match=message):
            read_mixture(tmp_path)
