"""StepPlan: everything one forward pass has to know, as flat lists of integers.
engine/steps/batch.py copies them into tensors; nothing here knows of tensors.

A step is made of rows, one for each stream that takes part: first decode rows (one token), then
rows with drafts (the last token and the tokens drafted after it), then pieces of prompts. It is run
in this order: copy pages, set the page table, write keys and values, attend, sample.

The scheduler fills a `PlanLists` and freezes it into a plan. What a field has entries for stands in
its type: from that a part of a plan (partial_plan.py), a plan without drafts (steps/flat_plan.py)
and the message to other ranks (execution/step_words.py) are made, so that a new field is one line
here, and in batch.py if the device reads it.

`Step` is the scheduler's own note of a step, from its planning until its tokens have come back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    get_args,
    get_type_hints,
)

from ridgeline.engine.scheduling.state import Stream, StreamKey

NOT_WRITTEN = -1  # a slot: keys and values are in their page already (see kernels/pages.py)

Entry = TypeVar("Entry")
Axis = Literal["step", "row", "token", "device token", "moved token", "sample", "logit row"]
PagePair = tuple[int, int]  # from, to
SeatTaken = tuple[int, StreamKey]


class Entries(NamedTuple):
    """What a field has one entry for each of."""

    axis: Axis
    are_tokens: bool = False  # its entries are numbers of tokens: others in a part of the plan


PerRow = Annotated[Sequence[Entry], Entries("row")]
PerToken = Annotated[Sequence[Entry], Entries("token")]
PerSample = Annotated[Sequence[Entry], Entries("sample")]
OfStep = Annotated[Sequence[Entry], Entries("step")]  # no part of a step changes these


class StepPlan(NamedTuple):
    step_id: int
    num_decode_rows: int = 0
    num_draft_rows: int = 0
    # A seat is a line of the page table on the device, and of whatever else is kept there for a
    # running stream.
    keys: PerRow[StreamKey] = ()
    seats: PerRow[int] = ()
    first_positions: PerRow[int] = ()
    num_tokens: PerRow[int] = ()
    # Row after row. The id is 0 where only the device knows it: see `device_tokens`, and for
    # drafts whoever drafts them.
    token_ids: PerToken[int] = ()
    positions: PerToken[int] = ()
    slots: PerToken[int] = ()
    # Tokens that the step before this one sampled and that have not reached the host: which token
    # of this step, and which sample of that one.
    device_tokens: Annotated[Sequence[int], Entries("device token", are_tokens=True)] = ()
    device_samples: Annotated[Sequence[int], Entries("device token")] = ()
    # Tokens of rows that go on behind drafts of the step before, of which the host does not know
    # how many are right: which token, and which sample of that step. Positions and slots are
    # those of no draft right; the device moves them on by as many as were.
    moved_tokens: Annotated[Sequence[int], Entries("moved token", are_tokens=True)] = ()
    moved_samples: Annotated[Sequence[int], Entries("moved token")] = ()
    # Row i of the decode and draft rows owns sample i; a row that ends a prompt owns one, or one
    # for each of the request's samples.
    sample_keys: PerSample[StreamKey] = ()
    sample_seats: PerSample[int] = ()
    sample_drafts: PerSample[int] = ()  # drafts it verifies
    # 1 + drafts for each sample: the token it is computed from.
    logit_tokens: Annotated[Sequence[int], Entries("logit row", are_tokens=True)] = ()
    host_samples: OfStep[int] = ()  # the next plan waits for these tokens
    copies: OfStep[PagePair] = ()
    # Changes of the page table: in line table_seats[i], entry table_indexes[i] is table_pages[i].
    table_seats: OfStep[int] = ()
    table_indexes: OfStep[int] = ()
    table_pages: OfStep[int] = ()
    joined: OfStep[SeatTaken] = ()  # who sits where, from this step on


class PlanField(NamedTuple):
    """A field of a plan that is a list."""

    name: str
    entries: Entries
    entry: Any  # the type of one: int, StreamKey, PagePair, SeatTaken


def _list_fields() -> list[PlanField]:
    hints = get_type_hints(StepPlan, include_extras=True)
    lists = {name: get_args(hint) for name, hint in hints.items() if hint is not int}
    return [
        PlanField(name, entries, get_args(sequence)[0])
        for name, (sequence, entries) in lists.items()
    ]


NUMBERS = ("step_id", "num_decode_rows", "num_draft_rows")
LISTS = _list_fields()
_NAMES = tuple(field.name for field in LISTS)
assert StepPlan._fields == (*NUMBERS, *_NAMES), "a plan's numbers come before its lists"


def names_of(axis: Axis) -> list[str]:
    """The fields with one entry for each of these."""
    return [field.name for field in LISTS if field.entries.axis == axis]


class PlanLists:
    """A plan that is being made: a list under the name of each field that is one."""

    __slots__ = _NAMES

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> list[Any]: ...

        def __setattr__(self, name: str, value: list[Any]) -> None: ...

    def __init__(self) -> None:
        for name in _NAMES:
            setattr(self, name, [])

    def frozen(self, step_id: int, num_decode_rows: int, num_draft_rows: int) -> StepPlan:
        """The plan; the lists are the plan's from now on, and nobody else's."""
        lists = [getattr(self, name) for name in _NAMES]
        return StepPlan(step_id, num_decode_rows, num_draft_rows, *lists)


class Step:
    """A step from its planning until it comes back."""

    __slots__ = (
        "budget",
        "leaving",
        "lists",
        "num_lookups",
        "pieces",
        "pins",
        "plan",
        "rows",
        "samples",
        "step_id",
    )

    plan: StepPlan  # once it is closed

    def __init__(self, step_id: int, budget: int) -> None:
        self.step_id = step_id
        self.lists = PlanLists()
        self.budget = budget  # tokens that may still be added
        self.num_lookups = 0  # pages looked up in the prefix tree for it
        self.rows: list[Stream] = []
        self.samples: list[Stream] = []
        self.pieces: list[tuple[Stream, int]] = []  # rows of prompts, and where they end
        self.pins: list[int] = []  # pages held because this step copies from them
        self.leaving: list[Stream] = []  # streams that leave when it comes back

    def add_row(self, stream: Stream, token_ids: Sequence[int], slots: Sequence[int]) -> None:
        """The stream's next tokens. Planned positions are for the caller to advance."""
        lists, first, num_tokens = self.lists, stream.position, len(token_ids)
        self.rows.append(stream)
        lists.seats.append(stream.seat)
        lists.first_positions.append(first)
        lists.num_tokens.append(num_tokens)
        lists.token_ids.extend(token_ids)
        lists.positions.extend(range(first, first + num_tokens))
        lists.slots.extend(slots)
        self.budget -= num_tokens
        stream.last_step = self.step_id

    def add_sample(self, stream: Stream, num_drafts: int = 0, holds: bool = False) -> None:
        """The stream samples from the last row: after its last token, and after each draft. If it
        `holds`, its next row waits for the host to know what came.
        """
        lists = self.lists
        stream.sample_index = len(self.samples)
        stream.last_step = self.step_id
        self.samples.append(stream)
        lists.sample_seats.append(stream.seat)
        lists.sample_drafts.append(num_drafts)
        end = len(lists.token_ids)
        lists.logit_tokens.extend(range(end - 1 - num_drafts, end))
        stream.unsure = num_drafts
        if stream.request.ask.needs_host or holds:
            lists.host_samples.append(stream.sample_index)
            stream.held_by = self.step_id

    def close_decode_rows(self) -> None:
        """The rows so far have one token and one sample each: fill in what follows from that."""
        lists, num_rows = self.lists, len(self.rows)
        self.budget -= num_rows
        self.samples.extend(self.rows)
        lists.first_positions.extend(lists.positions)
        lists.num_tokens.extend([1] * num_rows)
        lists.sample_seats.extend(lists.seats)
        lists.sample_drafts.extend([0] * num_rows)
        lists.logit_tokens.extend(range(num_rows))

    def seat(self, stream: Stream, seat: int) -> None:
        stream.seat = seat
        self.lists.joined.append((seat, stream.key))

    def take_from_device(self, stream: Stream) -> None:
        """The next token to be added is the one the stream's last step has sampled."""
        self.lists.device_tokens.append(len(self.lists.token_ids))
        self.lists.device_samples.append(stream.sample_index)

    def move(self, stream: Stream, num_tokens: int) -> None:
        """The next tokens to be added go on behind the drafts of the stream's last step."""
        first = len(self.lists.token_ids)
        self.lists.moved_tokens.extend(range(first, first + num_tokens))
        self.lists.moved_samples.extend([stream.sample_index] * num_tokens)

    def set_page(self, stream: Stream, index: int, page: int) -> None:
        self.lists.table_seats.append(stream.seat)
        self.lists.table_indexes.append(index)
        self.lists.table_pages.append(page)

    def copy_page(self, source: int, page: int) -> None:
        """`source` stays held until the step has come back."""
        self.lists.copies.append((source, page))
        self.pins.append(source)

    def close(self, num_decode_rows: int, num_draft_rows: int) -> StepPlan:
        """Nothing is added any more: the plan."""
        self.lists.keys = [stream.key for stream in self.rows]
        self.lists.sample_keys = [stream.key for stream in self.samples]
        self.plan = self.lists.frozen(self.step_id, num_decode_rows, num_draft_rows)
        return self.plan
