"""The page pool: which pages of the KV cache are free, and how many hold each of the others.

Integers only: what lies in a page and how is kernels/pages.py's, what a page without a holder is
still good for is prefix_cache.py's. Every operation takes the same time whatever the pool's size.

    pool = PagePool(1024)
    page = pool.take()                       # one holder
    pool.hold(page)                          # two
    pool.drop(page); pool.drop(page)         # none: still not free,
    pool.give_back(page)                     # until it is given back
"""

from __future__ import annotations

from ridgeline.errors import UsageError


class PagePool:
    __slots__ = ("_free", "_holders", "_is_free", "num_pages")

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise UsageError(f"num_pages is {num_pages}; give at least 1")
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))  # a stack: page 0 is taken first
        self._is_free = bytearray(b"\1" * num_pages)
        self._holders = [0] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    def holders(self, page: int) -> int:
        return self._holders[page]

    def take(self) -> int | None:
        """A free page, which the caller now holds; None when there is none."""
        if not self._free:
            return None
        page = self._free.pop()
        self._is_free[page] = 0
        self._holders[page] = 1
        return page

    def take_some(self, count: int) -> list[int]:
        """So many free pages, or as many as there are."""
        start = max(0, len(self._free) - count)
        pages = self._free[start:]
        del self._free[start:]
        for page in pages:
            self._is_free[page] = 0
            self._holders[page] = 1
        return pages

    def give_back_some(self, pages: list[int]) -> None:
        """Pages that each have one holder, who lets go, become free."""
        for page in pages:
            assert self._holders[page] == 1, f"page {page} has {self._holders[page]} holders"
            self._is_free[page] = 1
            self._holders[page] = 0
        self._free += pages

    def hold(self, page: int) -> int:
        """One more holder of a page that is not free; how many it has now."""
        assert not self._is_free[page], f"page {page} is free and cannot be held"
        self._holders[page] += 1
        return self._holders[page]

    def drop(self, page: int) -> int:
        """One holder less; how many are left."""
        assert self._holders[page] > 0, f"page {page} has no holder"
        self._holders[page] -= 1
        return self._holders[page]

    def give_back(self, page: int) -> None:
        """A page without holders becomes free."""
        assert self._holders[page] == 0, f"page {page} still has {self._holders[page]} holders"
        assert not self._is_free[page], f"page {page} is already free"
        self._is_free[page] = 1
        self._free.append(page)
