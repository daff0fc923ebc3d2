"""Which replica a request goes to: where its beginning was computed before, unless that one has
more to do than the others.

Prompts are cut into blocks, and a block is known by itself and all before it, so that the longest
known beginning is found by looking blocks up one after the other. Plain integers; what a replica
has really kept is not known here, only what was sent to it, and the oldest is forgotten.

    router = Router(num_replicas=4)
    replica = router.route(prompt, salt="", loads=[3, 0, None, 5])    # None: it is down
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

BLOCK_TOKENS = 64
MAX_BLOCKS = 200_000  # remembered: 12.8 million tokens
SLACK = 1.25  # times the mean load that a replica may have and still be preferred
LEAST_LEAD = 2  # requests that it may always be ahead


def choose(hits: Sequence[int], loads: Sequence[int | None]) -> int:
    """The replica with the longest beginning (`hits`, in tokens) of those that are not overloaded;
    between equals the one with least to do, then the first. Those without a load are down.
    """
    up = [index for index, load in enumerate(loads) if load is not None]
    assert up, "somebody must be up"
    busy = {index: loads[index] or 0 for index in up}
    mean = sum(busy.values()) / len(up)
    limit = max(SLACK * mean, min(busy.values()) + LEAST_LEAD)
    fit = [index for index in up if busy[index] <= limit]
    return min(fit, key=lambda index: (-hits[index], busy[index], index))


class Router:
    def __init__(self, num_replicas: int, block_tokens: int = BLOCK_TOKENS) -> None:
        self._num_replicas, self._block_tokens = num_replicas, block_tokens
        self._blocks: OrderedDict[int, set[int]] = OrderedDict()  # who was sent it; oldest first

    def route(self, prompt: Sequence[int], salt: str, loads: Sequence[int | None]) -> int:
        """The replica for a request, which is then remembered to have its beginning."""
        keys = list(self._keys(prompt, salt))
        chosen = choose(self.hits(keys), loads)
        for key in keys:
            self._blocks.setdefault(key, set()).add(chosen)
            self._blocks.move_to_end(key)
        while len(self._blocks) > MAX_BLOCKS:
            self._blocks.popitem(last=False)
        return chosen

    def hits(self, keys: Sequence[int]) -> list[int]:
        """Tokens of the beginning that each replica has."""
        lengths = [0] * self._num_replicas
        holders = set(range(self._num_replicas))
        for number, key in enumerate(keys, 1):
            holders = holders & self._blocks.get(key, set())
            if not holders:
                break
            for index in holders:
                lengths[index] = number * self._block_tokens
        return lengths

    def forget(self, replica: int) -> None:
        """It has begun anew, with nothing kept."""
        for key in list(self._blocks):
            self._blocks[key].discard(replica)
            if not self._blocks[key]:
                del self._blocks[key]

    def _keys(self, prompt: Sequence[int], salt: str) -> Iterator[int]:
        """Of whole blocks: what is shorter saves nothing."""
        key = hash(salt)
        for start in range(0, len(prompt) - self._block_tokens + 1, self._block_tokens):
            key = hash((key, tuple(prompt[start : start + self._block_tokens])))
            yield key
