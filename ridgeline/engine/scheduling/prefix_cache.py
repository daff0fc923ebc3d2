"""Pages kept for prompts that begin alike: a tree of pages, each keyed by its tokens and by the
page before it; at the root by the tenant's salt.

A page is a node. The tree's edges are one dictionary from (the node of the page before, the tokens
of this one) to the page; the whole key is compared, so no collision of hashes can give wrong text.
A node's name is never used twice: what hung under an evicted page can no longer be reached, and
ages out.

Each page is in one of three states: free, used (someone holds it, and it may be in the tree too),
or cached (in the tree, held by nobody). When no page is free, `take` gives the cached page that was
longest in nobody's hands. Streams let go of their last pages first, so that is a leaf. All
operations take constant time, matching and storing that of the tokens' number.

    cache = PrefixCache(num_pages=1024, page_size=64)
    match = cache.match("tenant", tokens)           # full pages to share, and one to copy from
    node = cache.insert(match.node, tokens_of_a_page, page)

A page may enter the tree before it is full (the end of a prompt). Others never share such a page,
since its holder writes on behind what the tree knows; they copy it.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from typing import NamedTuple

from ridgeline.engine.scheduling.pages import PagePool

TOKEN_BYTES = array("i").itemsize
COPY_SHARE = 8  # a page is copied for at least 1/8 of its tokens: less is soon computed


class Match(NamedTuple):
    """What the cache holds of some tokens."""

    pages: list[int]  # full pages that can be shared
    copy_source: int | None  # a page that begins with the tokens behind those
    num_copied: int  # how many of them
    num_tokens: int  # all that need not be computed
    node: bytes  # under which the page behind the shared ones belongs


class PrefixCache:
    __slots__ = (
        "_idle",
        "_key",
        "_latest",
        "_node",
        "_num_bytes",
        "_num_inserted",
        "_page",
        "page_bytes",
        "page_size",
        "pool",
    )

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.pool = PagePool(num_pages)
        self.page_size = page_size
        self.page_bytes = page_size * TOKEN_BYTES
        self._page: dict[bytes, int] = {}  # key, which is node + tokens, to page
        self._key: list[bytes | None] = [None] * num_pages
        self._num_bytes = [0] * num_pages  # of the tokens at the key's end
        self._node: list[bytes | None] = [None] * num_pages  # of a page in the tree, else None
        self._latest: dict[bytes, int] = {}  # node to the page that was inserted under it last
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached pages, the oldest first
        self._num_inserted = 0

    @property
    def num_cached(self) -> int:
        """Pages in the tree that nobody holds."""
        return len(self._idle)

    @property
    def num_available(self) -> int:
        """Pages that `take` can give."""
        return self.pool.num_free + len(self._idle)

    def take(self) -> int | None:
        """A page to write to, at the cost of the oldest cached one when none is free."""
        if self.pool.num_free == 0 and self._idle:
            self.forget(next(iter(self._idle)))
        return self.pool.take()

    def hold(self, page: int) -> None:
        if self.pool.hold(page) == 1:
            del self._idle[page]

    def release(self, page: int) -> None:
        """One holder less. Without any, a page in the tree is cached, another one free."""
        if self.pool.drop(page) > 0:
            return
        if self._node[page] is None:
            self.pool.give_back(page)
        else:
            self._idle[page] = None

    def is_idle(self, page: int) -> bool:
        return page in self._idle

    def root(self, salt: str) -> bytes:
        """Where a tenant's first pages belong. The length comes first, so that no salt followed by
        tokens reads as a longer salt.
        """
        text = salt.encode()
        return b"s" + len(text).to_bytes(4, "little") + text

    def is_alive(self, node: bytes) -> bool:
        """Whether what is inserted under this node can be found again."""
        return node[:1] == b"s" or self._node[int.from_bytes(node[1:5], "little")] == node

    def match(self, salt: str, tokens: array[int]) -> Match:
        """The longest beginning of `tokens` that is in the tree. The last token is never counted:
        it has to be computed for its logits, even where its page is shared.
        """
        text, size = tokens.tobytes(), self.page_bytes
        node, pages = self.root(salt), []
        for start in range(0, len(text) - size + 1, size):
            page = self._page.get(node + text[start : start + size])
            if page is None:
                break
            pages.append(page)
            node = self._node_of(page)
        shared = len(pages) * self.page_size
        end = min(shared + self.page_size, len(tokens) - 1)
        source, copied = self._beginning(node, text[shared * TOKEN_BYTES : end * TOKEN_BYTES])
        return Match(pages, source, copied, min(shared + copied, len(tokens) - 1), node)

    def insert(self, node: bytes, tokens: bytes, page: int) -> bytes:
        """Put a page's tokens into the tree and return its node. Where the tree has
        these tokens already, it keeps the page it has, and `page` stays with its holders alone.
        """
        key = node + tokens
        known = self._page.get(key)
        if known is not None:
            return self._node_of(known)
        if self._node[page] is not None:
            self._remove(page)  # it was in the tree with fewer tokens
        self._num_inserted += 1
        new = b"p" + page.to_bytes(4, "little") + self._num_inserted.to_bytes(8, "little")
        self._page[key], self._key[page], self._node[page] = page, key, new
        self._num_bytes[page] = len(tokens)
        self._latest[node] = page
        return new

    def forget(self, page: int) -> None:
        """Take a page out of the tree; it is free if nobody holds it."""
        if self._node[page] is None:
            return
        self._remove(page)
        if page in self._idle:
            del self._idle[page]
            self.pool.give_back(page)

    def clear(self) -> None:
        for page in list(self._page.values()):
            self.forget(page)

    def _beginning(self, node: bytes, wanted: bytes) -> tuple[int | None, int]:
        """The page last inserted under this node, if it begins like `wanted`, and for how long."""
        page = self._latest.get(node)
        if page is None:
            return None, 0
        key = self._key[page]
        assert key is not None, f"page {page} is the latest under its node and has no key"
        common = common_tokens(wanted, key[len(node) :])
        enough = max(1, self.page_size // COPY_SHARE)
        return (page, common) if common >= enough else (None, 0)

    def _node_of(self, page: int) -> bytes:
        node = self._node[page]
        assert node is not None, f"page {page} is not in the tree"
        return node

    def _remove(self, page: int) -> None:
        key = self._key[page]
        assert key is not None, f"page {page} is not in the tree"
        before = key[: len(key) - self._num_bytes[page]]
        if self._latest.get(before) == page:
            del self._latest[before]
        del self._page[key]
        self._key[page] = self._node[page] = None


def common_tokens(one: bytes, other: bytes) -> int:
    """How many tokens two runs of them have in common at their beginning."""
    width = min(len(one), len(other))
    difference = int.from_bytes(one[:width], "little") ^ int.from_bytes(other[:width], "little")
    if difference == 0:
        return width // TOKEN_BYTES
    first_bit = (difference & -difference).bit_length() - 1
    return first_bit // (8 * TOKEN_BYTES)
