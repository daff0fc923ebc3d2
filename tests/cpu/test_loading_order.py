"""Which sample comes when: a pure function of seed and samples consumed, free of batches."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.data.loading.order import DataState, SampleOrder
from ridgeline.data.loading.permutation import MAX_SIZE, Permutation, key_of
from ridgeline.errors import UsageError


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_every_number_once(size: int, key: int) -> None:
    assert sorted(Permutation(size, key)(np.arange(size)).tolist()) == list(range(size))


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, MAX_SIZE), key=st.integers(0, 2**64 - 1), data=st.data())
def test_huge_orders_need_no_list(size: int, key: int, data: st.DataObject) -> None:
    places = sorted(data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=20)))
    order = Permutation(size, key)
    values = order(np.array(places))
    assert len(set(values.tolist())) == len(places)
    assert all(0 <= value < size for value in values.tolist())
    alone = [order(np.array([place]))[0] for place in places]
    assert values.tolist() == alone


def test_orders_are_shuffled() -> None:
    """No more numbers at their own place, beside their neighbour or in rising pairs than chance
    leaves there.
    """
    size = 10_000
    values = Permutation(size, key_of(1, 2))(np.arange(size))
    assert (values == np.arange(size)).sum() < 10
    assert (np.abs(np.diff(values)) == 1).sum() < 20
    assert abs((np.diff(values) > 0).mean() - 0.5) < 0.02
    assert abs(np.corrcoef(values, np.arange(size))[0, 1]) < 0.05
    other = Permutation(size, key_of(1, 3))(np.arange(size))
    assert (values == other).sum() < 10


def test_small_orders_are_all_reached() -> None:
    orders = {tuple(Permutation(4, key_of(key))(np.arange(4)).tolist()) for key in range(1000)}
    assert len(orders) == 24


EXPECTED_KEY = 14602521892564604090
EXPECTED_ORDER = [7, 8, 3, 9, 2, 6, 0, 5, 4, 1, 5, 6, 0, 2, 7, 1, 3, 4, 9, 8, 9, 4, 5, 6, 2]


def test_the_order_stays_the_same_in_later_versions() -> None:
    """A run that resumes after an update must see the samples it would have seen."""
    assert key_of(7, 0) == EXPECTED_KEY
    assert SampleOrder(10, seed=7).samples(0, 25).tolist() == EXPECTED_ORDER


@settings(max_examples=100, deadline=None)
@given(
    num_samples=st.integers(1, 50),
    seed=st.integers(0, 2**62 - 1),
    sizes=st.lists(st.integers(1, 37), min_size=1, max_size=12),
    start=st.integers(0, 200),
)
def test_batches_and_resuming_change_nothing(
    num_samples: int, seed: int, sizes: list[int], start: int
) -> None:
    order = SampleOrder(num_samples, seed)
    together = order.samples(0, start + sum(sizes)).tolist()
    parts, first = [], start
    for size in sizes:
        parts += SampleOrder(num_samples, seed).samples(first, size).tolist()
        first += size
    assert parts == together[start:]
    for epoch in range(len(together) // num_samples):
        once = together[epoch * num_samples : (epoch + 1) * num_samples]
        assert sorted(once) == list(range(num_samples))


def test_epochs_and_seeds_differ() -> None:
    orders = [SampleOrder(100, seed).samples(0, 300).tolist() for seed in range(3)]
    parts = [tuple(order[start : start + 100]) for order in orders for start in (0, 100, 200)]
    assert len(set(parts)) == 9


@pytest.mark.parametrize("values", [{"seed": -1}, {"seed": 1.5}, {"seed": 1, "consumed": -1}])
def test_a_state_that_makes_no_sense(values: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="give a whole number"):
        DataState(**values)
