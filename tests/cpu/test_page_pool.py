"""The page pool: no page is given twice, and free and held pages are always all of them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.engine.scheduling.pages import PagePool
from ridgeline.errors import UsageError

ACTIONS = st.lists(st.tuples(st.sampled_from(["take", "hold", "drop"]), st.integers(0, 99)))


@pytest.mark.smoke
@settings(deadline=None, max_examples=200)
@given(num_pages=st.integers(1, 9), actions=ACTIONS)
def test_pages_are_free_or_held(num_pages: int, actions: list[tuple[str, int]]) -> None:
    pool = PagePool(num_pages)
    held: list[int] = []  # one entry for each holder
    for action, choice in actions:
        if action == "take":
            page = pool.take()
            assert (page is None) == (len(set(held)) == num_pages)
            assert page not in held
            held += [page] if page is not None else []
        elif held:
            page = held[choice % len(held)]
            if action == "hold":
                held.append(page)
                assert pool.hold(page) == held.count(page)
            else:
                held.remove(page)
                assert pool.drop(page) == held.count(page)
                if page not in held:
                    pool.give_back(page)
        assert pool.num_free == num_pages - len(set(held))
        assert all(pool.holders(page) == held.count(page) for page in range(num_pages))


@pytest.mark.smoke
def test_the_first_pages_are_taken_first() -> None:
    pool = PagePool(3)
    assert [pool.take() for _ in range(4)] == [0, 1, 2, None]


@pytest.mark.smoke
def test_misuse_is_seen() -> None:
    pool = PagePool(2)
    page = pool.take()
    assert page is not None
    with pytest.raises(AssertionError, match="still has 1 holders"):
        pool.give_back(page)
    pool.drop(page)
    with pytest.raises(AssertionError, match="has no holder"):
        pool.drop(page)
    pool.give_back(page)
    with pytest.raises(AssertionError, match="already free"):
        pool.give_back(page)
    with pytest.raises(AssertionError, match="cannot be held"):
        pool.hold(page)
    with pytest.raises(UsageError, match="num_pages is 0"):
        PagePool(0)
