"""What the scheduler knows of requests: `Ask` comes in, `End` goes out, and in between a `Request`
has one `Stream` for each of its samples.

A stream is one sequence of tokens: the prompt, the tokens known on the host, and perhaps one more
that only the device knows yet. Plain numbers, changed by scheduler.py and tables.py alone.

    scheduler.submit(Ask("a", prompt=[1, 2, 3], max_tokens=16, stop_ids=frozenset({0})))
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ridgeline.errors import UsageError

StreamKey = tuple[Hashable, int]  # a request's id and the number of one of its samples
Rank = tuple[float, float, int, int]  # smaller runs first: precedence, arrival, number, sample
Status = Literal["finished", "refused", "cancelled", "failed"]
# following: waits until another stream has computed the beginning they share.
# leaving: holds its pages until the steps that were planned with them have come back.
StreamState = Literal["waiting", "following", "prefilling", "decoding", "leaving", "gone"]


@dataclass(frozen=True)
class Ask:
    """A request, as far as it concerns scheduling."""

    request_id: Hashable
    prompt: Sequence[int]  # token ids
    max_tokens: int  # new tokens a sample; 0: the prompt is run and nothing is sampled
    min_tokens: int = 0  # stop ids end nothing before this many
    num_samples: int = 1  # outputs of the one prompt
    stop_ids: frozenset[int] = frozenset()
    output: Sequence[int] = ()  # tokens made earlier (by an engine that was restarted)
    priority: int = 0  # higher runs first (see waiting.py)
    arrival: float = 0.0  # earlier runs first; between equals the order of submission decides
    deadline: float | None = None  # in the clock that `plan` is given
    salt: str = ""  # requests share pages only with those of the same salt
    tenant: str = ""  # whose it is: what several have to wait for is shared out between them
    needs_host: bool = False  # each token must reach the host before the next step is planned
    reuse_prefix: bool = True  # False: compute every token of the prompt (for its logits)
    reuse_limit: int | None = None  # with reuse: compute the last of so many tokens, and all behind

    def __post_init__(self) -> None:
        for name, least in (("max_tokens", 0), ("min_tokens", 0), ("num_samples", 1)):
            if getattr(self, name) < least:
                raise UsageError(f"{name} is {getattr(self, name)}; give at least {least}")
        if self.output and self.num_samples > 1:
            raise UsageError("a request with output so far continues one sample; give each its own")
        if self.output and len(self.output) >= self.max_tokens:
            raise UsageError(
                f"{len(self.output)} of {self.max_tokens} tokens are made; nothing is left to do"
            )


def duplicate_id(request_id: Hashable) -> UsageError:
    return UsageError(f"request id {request_id!r} is in use; give every request its own id")


class End(NamedTuple):
    """How a request ended. There is exactly one for each that was submitted."""

    request_id: Hashable
    status: Status
    reason: str
    num_cached: int = 0  # tokens of its prompt that the prefix cache had when it started


class Request:
    """One request while it lives."""

    __slots__ = ("ask", "forked", "num_cached", "number", "precedence", "streams")

    def __init__(self, ask: Ask, number: int) -> None:
        self.ask = ask
        self.number = number
        self.num_cached = 0  # tokens of its prompt that were there when it started
        self.precedence: float = -ask.priority  # smaller runs first; lowered when its turn has come
        self.forked = ask.num_samples == 1  # whether its samples have gone separate ways
        self.streams: list[Stream] = []  # those that have not ended


class Stream:
    """One sample of a request: its tokens, its pages, and how far it is."""

    __slots__ = (
        "announced",
        "coming",
        "copy_source",
        "drafts",
        "ended",
        "failed",
        "followers",
        "full_length",
        "held_by",
        "key",
        "last_step",
        "limit",
        "node",
        "num_dropped",
        "num_hit",
        "num_stored",
        "offset",
        "pages",
        "position",
        "prefilled",
        "promised",
        "rank",
        "request",
        "sample_index",
        "seat",
        "shared_end",
        "spare_seats",
        "started",
        "state",
        "stop_ids",
        "target",
        "tokens",
        "unsure",
    )

    def __init__(self, request: Request, sample: int, tokens: array[int], rank: Rank) -> None:
        ask = request.ask
        self.request = request
        self.key: StreamKey = (ask.request_id, sample)
        self.rank = rank
        self.tokens = tokens  # known on the host
        self.full_length = len(ask.prompt) + ask.max_tokens
        self.stop_ids = ask.stop_ids
        self.ended = False
        self.failed = False  # what it computed is not to be trusted
        self.started = False  # it has been admitted before
        self.last_step = 0  # the last step that was planned with it
        self.clear()

    def clear(self) -> None:
        """Back to holding nothing, with the tokens that are known."""
        self.state: StreamState = "waiting"
        self.seat = 0  # its line of the device's page table; has a meaning while it runs
        self.spare_seats: list[int] = []  # for the samples that will fork off
        # Progress. A position is planned when a step that writes it has been planned.
        self.position = 0  # the next to be planned
        self.prefilled = 0  # tokens of the prompt whose steps have come back
        self.target = len(self.tokens)  # tokens to compute before one is sampled
        self.sample_index = 0  # which sample of its last step chose its last token
        self.held_by = 0  # step that must come back before the next row can be planned
        self.drafts = 0  # draft tokens wanted in the step being planned
        # Drafts of the step that is out, behind which it is planned to go on: as many positions
        # further than planned it may be.
        self.unsure = 0
        # The quick way through a decode step: up to `limit`, position p is in slot offset + p.
        self.limit = 0
        self.offset = 0
        # Pages.
        self.pages: list[int] = []  # the page table; entries before num_dropped are not held
        self.num_dropped = 0  # pages that have fallen behind the window
        self.num_hit = 0  # pages that came from the cache
        self.shared_end = 0  # positions before it are written already
        self.copy_source: int | None = None  # held; to be copied into the next page taken
        self.promised = 0  # pages still to be taken, counted when it was admitted
        self.coming = 0  # pages that become available when it has left
        # Its part of the prefix tree.
        self.num_stored = 0  # pages that are in the tree
        self.node = b""  # behind the last of them
        self.announced: bytes | None = None  # key of the page it computes next
        self.followers: list[tuple[int, Stream]] = []  # who waits, and for which position

    @property
    def num_computed(self) -> int:
        """Tokens whose keys and values are written by steps that have come back."""
        return len(self.tokens) - 1 if len(self.tokens) > self.target else self.prefilled


class Stats(NamedTuple):
    """Where things stand, and totals since the beginning."""

    num_pages_free: int
    num_pages_used: int
    num_pages_cached: int
    num_waiting: int  # streams in the queue
    num_following: int  # streams that wait for a prefix another one computes
    num_prefilling: int
    num_decoding: int
    num_steps: int
    prompt_tokens: int  # of requests that were admitted
    hit_tokens: int  # of those, found in the cache
    computed_tokens: int  # that went through the model, recomputation included
    num_preemptions: int
    drafted_tokens: int  # drafted and verified
    accepted_tokens: int  # of those, right
