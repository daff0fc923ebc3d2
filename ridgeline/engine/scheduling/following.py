"""Waiting for a prefix that another stream is just computing, instead of computing it again.

Each stream announces the page it will compute next, under the key that page will have in the prefix
tree. A stream that finds its next page announced follows: it waits until the other one has computed
all that they share. It holds nothing meanwhile, and whatever happens to the other one (it is
cancelled, preempted, done) wakes it, so nobody waits for somebody who does not run.
"""

from __future__ import annotations

from ridgeline.engine.scheduling.prefix_cache import COPY_SHARE, TOKEN_BYTES, Match, common_tokens
from ridgeline.engine.scheduling.state import Stream
from ridgeline.engine.scheduling.tables import Tables


class Following:
    __slots__ = ("_announced", "_tables")

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._announced: dict[bytes, Stream] = {}

    def announce(self, stream: Stream) -> None:
        """What the stream computes next; nothing, when less than a page is left."""
        self.withdraw(stream)
        index = stream.num_stored
        if not self._tables.reuse or (index + 1) * self._tables.size > stream.target:
            return
        key = stream.node + self._tables.page_tokens(stream, index)
        if key not in self._announced:
            self._announced[key] = stream
            stream.announced = key

    def withdraw(self, stream: Stream) -> None:
        if stream.announced is not None:
            del self._announced[stream.announced]
            stream.announced = None

    def follow(self, stream: Stream, match: Match) -> bool:
        """Whether the stream now waits for another one. It never waits for one that ranks behind
        it, which may be kept from running.
        """
        index, size = len(match.pages), self._tables.size
        ask, end = stream.request.ask, (index + 1) * size
        if not ask.reuse_prefix or end > (ask.reuse_limit or len(stream.tokens)):
            return False
        leader = self._announced.get(match.node + self._tables.page_tokens(stream, index))
        if leader is None or leader.rank > stream.rank:
            return False
        leader.followers.append((self._meeting_point(stream, leader, index * size), stream))
        stream.state = "following"
        return True

    def reached(self, leader: Stream) -> list[Stream]:
        """The followers whose shared part is computed; all of them once the leader's prompt is."""
        done = leader.prefilled
        if done >= leader.target:
            return self.dismiss(leader)
        woken = [stream for position, stream in leader.followers if position <= done]
        leader.followers = [entry for entry in leader.followers if entry[0] > done]
        return _still_following(woken)

    def dismiss(self, leader: Stream) -> list[Stream]:
        """All followers, because the leader has computed all it will."""
        woken = [stream for _, stream in leader.followers]
        leader.followers = []
        return _still_following(woken)

    def _meeting_point(self, stream: Stream, leader: Stream, start: int) -> int:
        """How far the leader must have come: to the end of the last page it shares enough of."""
        size = self._tables.size
        theirs = leader.tokens[start : leader.target].tobytes()
        end = start + common_tokens(stream.tokens.tobytes()[start * TOKEN_BYTES :], theirs)
        if end % size < max(1, size // COPY_SHARE):
            end -= end % size
        return min(-(-end // size) * size, leader.target)


def _still_following(streams: list[Stream]) -> list[Stream]:
    """Without those that have ended meanwhile."""
    return [stream for stream in streams if stream.state == "following"]
