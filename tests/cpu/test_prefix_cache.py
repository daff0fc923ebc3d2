"""The prefix cache against a model of it: a dictionary from whole prefixes to pages."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ridgeline.engine.scheduling.prefix_cache import Match, PrefixCache, common_tokens

SIZE = 4


def ints(tokens: list[int] | tuple[int, ...]) -> array[int]:
    return array("i", tokens)


def store(cache: PrefixCache, salt: str, tokens: list[int], with_last: bool = False) -> list[int]:
    """Take pages for the tokens, put them into the tree and return them, still held."""
    node, pages = cache.root(salt), []
    for start in range(0, len(tokens), SIZE):
        content = ints(tokens[start : start + SIZE])
        page = cache.take()
        assert page is not None
        pages.append(page)
        if len(content) == SIZE or with_last:
            node = cache.insert(node, content.tobytes(), page)
    return pages


def let_go(cache: PrefixCache, pages: list[int]) -> None:
    for page in reversed(pages):
        cache.release(page)


@pytest.mark.smoke
def test_the_longest_beginning_is_found() -> None:
    cache = PrefixCache(10, SIZE)
    pages = store(cache, "", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    match = cache.match("", ints([1, 2, 3, 4, 5, 6, 7, 8, 9, 9]))
    assert match.pages == pages[:2]
    assert match.num_tokens == 8
    assert cache.match("", ints([1, 2, 3, 4, 9, 6, 7, 8])).pages == pages[:1]
    assert cache.match("", ints([5, 6, 7, 8])).pages == [], "a page counts only behind its own"


@pytest.mark.smoke
def test_the_last_token_is_left_to_compute() -> None:
    cache = PrefixCache(10, SIZE)
    pages = store(cache, "", [1, 2, 3, 4])
    match = cache.match("", ints([1, 2, 3, 4]))
    assert (match.pages, match.num_tokens, match.copy_source) == (pages, 3, None)


@pytest.mark.smoke
def test_a_page_that_begins_alike_is_a_source_to_copy() -> None:
    cache = PrefixCache(10, SIZE)
    pages = store(cache, "", [1, 2, 3, 4, 5, 6], with_last=True)
    match = cache.match("", ints([1, 2, 3, 4, 5, 6, 7]))
    assert (match.pages, match.copy_source, match.num_copied) == (pages[:1], pages[1], 2)
    assert match.num_tokens == 6
    assert cache.match("", ints([1, 2, 3, 4, 5, 6])).num_copied == 1, "the last one is computed"
    assert cache.match("", ints([1, 2, 3, 4, 6, 5])).copy_source is None


@pytest.mark.smoke
def test_too_little_is_not_copied() -> None:
    cache = PrefixCache(10, 16)
    page = cache.take()
    assert page is not None
    cache.insert(cache.root(""), ints(range(16)).tobytes(), page)
    assert cache.match("", ints([0, 99, 99])).copy_source is None
    assert cache.match("", ints([0, 1, 99])).copy_source == page


@pytest.mark.smoke
def test_a_page_that_has_filled_up_keeps_its_place() -> None:
    cache = PrefixCache(10, SIZE)
    pages = store(cache, "", [1, 2], with_last=True)
    cache.insert(cache.root(""), ints([1, 2, 3, 4]).tobytes(), pages[0])
    assert cache.match("", ints([1, 2, 3, 4, 5])).pages == pages
    let_go(cache, pages)
    assert (cache.num_cached, cache.pool.num_free) == (1, 9)


@pytest.mark.smoke
def test_tenants_share_nothing() -> None:
    cache = PrefixCache(10, SIZE)
    store(cache, "one", [1, 2, 3, 4])
    assert cache.match("two", ints([1, 2, 3, 4, 5])).pages == []
    assert cache.match("two", ints([1, 2, 3])).copy_source is None
    # A salt that ends like tokens begin: the same bytes in a row, cut elsewhere.
    letters = int.from_bytes(b"abcd", "little")
    store(cache, "xabcd", [7, 8, 9], with_last=True)
    assert cache.match("x", ints([letters, 7, 8, 9, 10])).pages == []


@pytest.mark.smoke
def test_the_oldest_goes_first_and_leaves_before_their_stem() -> None:
    cache = PrefixCache(4, SIZE)
    old = store(cache, "", [1, 1, 1, 1, 2, 2, 2, 2])
    new = store(cache, "", [3, 3, 3, 3, 4, 4, 4, 4])
    let_go(cache, old)
    let_go(cache, new)
    assert [cache.take() for _ in range(3)] == [old[1], old[0], new[1]]
    assert cache.match("", ints([3, 3, 3, 3, 4, 4, 4, 4, 5])).pages == new[:1]
    assert cache.match("", ints([1, 1, 1, 1, 5])).pages == []


@pytest.mark.smoke
def test_what_is_used_again_is_kept_longer() -> None:
    cache = PrefixCache(2, SIZE)
    (first,), (second,) = store(cache, "", [1] * SIZE), store(cache, "", [2] * SIZE)
    let_go(cache, [first])
    let_go(cache, [second])
    cache.hold(first)
    cache.release(first)
    assert cache.take() == second


@pytest.mark.smoke
def test_what_hung_under_a_page_that_is_gone_is_never_found_again() -> None:
    cache = PrefixCache(3, SIZE)
    stem, leaf = store(cache, "", [1, 1, 1, 1, 2, 2, 2, 2])
    behind_stem = cache.match("", ints([1, 1, 1, 1, 9])).node
    cache.release(stem)  # the leaf is still held: the wrong order, as behind a sliding window
    cache.forget(stem)
    assert not cache.is_alive(behind_stem)
    for _ in range(2):
        page = cache.take()
        assert page is not None
        cache.insert(cache.root(""), ints([3, 3, 3, 3]).tobytes(), page)
    # `stem` is taken again with other tokens: what was behind the old ones is not behind these.
    assert cache.match("", ints([3, 3, 3, 3, 2, 2, 2, 2, 9])).pages == [stem]
    cache.release(leaf)
    assert cache.is_idle(leaf)


@pytest.mark.smoke
def test_a_page_that_is_there_twice_is_kept_once() -> None:
    cache = PrefixCache(4, SIZE)
    first = store(cache, "", [1, 1, 1, 1])
    second = store(cache, "", [1, 1, 1, 1])
    let_go(cache, second)
    assert cache.pool.num_free == 3
    assert cache.match("", ints([1, 1, 1, 1, 2])).pages == first


@pytest.mark.smoke
def test_common_tokens() -> None:
    def common(one: list[int], other: list[int]) -> int:
        return common_tokens(ints(one).tobytes(), ints(other).tobytes())

    assert common([1, 2, 3], [1, 2, 4]) == 2
    assert common([1, 2], [1, 2, 4]) == 2
    assert common([], [1]) == 0
    assert common([256, 1], [257, 1]) == 0
    assert common([1 << 24, 5], [1 << 24, -5]) == 1


class CacheMachine(RuleBasedStateMachine):
    """Random use by several streams. `truth` says what each page in the tree must stand for."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = PrefixCache(8, SIZE)
        self.held: list[list[int]] = []
        self.truth: dict[int, tuple[str, tuple[int, ...]]] = {}  # page to all tokens up to its end

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20),
        salt=st.sampled_from(["", "b"]),
        with_last=st.booleans(),
    )
    def run(self, tokens: list[int], salt: str, with_last: bool) -> None:
        """A stream comes, shares what is there and computes the rest, if there are pages."""
        match = self.cache.match(salt, ints(tokens))
        self.check(match, salt, tokens)
        pages = list(match.pages)
        for page in pages:
            self.cache.hold(page)
        self.held.append(pages)
        node = match.node
        for start in range(len(pages) * SIZE, len(tokens), SIZE):
            page = self.cache.take()
            if page is None:
                return
            self.truth.pop(page, None)
            pages.append(page)
            end = min(start + SIZE, len(tokens))
            if end - start < SIZE and not with_last:
                return
            node = self.cache.insert(node, ints(tokens[start:end]).tobytes(), page)
            if self.cache._node[page] is not None:
                self.truth[page] = (salt, tuple(tokens[:end]))

    def check(self, match: Match, salt: str, tokens: list[int]) -> None:
        for index, page in enumerate(match.pages):
            assert self.truth[page] == (salt, tuple(tokens[: (index + 1) * SIZE]))
        if match.copy_source is not None:
            end = len(match.pages) * SIZE + match.num_copied
            held_salt, held_tokens = self.truth[match.copy_source]
            assert (held_salt, held_tokens[:end]) == (salt, tuple(tokens[:end]))
            assert end < len(tokens)

    @rule(choice=st.integers(0, 99), backwards=st.booleans())
    def leave(self, choice: int, backwards: bool) -> None:
        if self.held:
            pages = self.held.pop(choice % len(self.held))
            let_go(self.cache, pages if backwards else pages[::-1])

    @rule(page=st.integers(0, 7))
    def forget(self, page: int) -> None:
        self.cache.forget(page)
        self.truth.pop(page, None)

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        assert self.cache.num_cached == 0

    @invariant()
    def every_page_has_one_state(self) -> None:
        cache = self.cache
        holders = [page for pages in self.held for page in pages]
        assert all(cache.pool.holders(page) == holders.count(page) for page in range(8))
        assert cache.pool.num_free + cache.num_cached + len(set(holders)) == 8
        in_tree = [page for page in range(8) if cache._node[page] is not None]
        assert sorted(cache._page.values()) == in_tree
        assert set(cache._latest.values()) <= set(in_tree)

    def teardown(self) -> None:
        for pages in self.held:
            let_go(self.cache, pages)
        self.cache.clear()
        assert self.cache.pool.num_free == 8
        assert not self.cache._latest


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
