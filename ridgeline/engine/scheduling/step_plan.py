"""StepPlan: everything one forward pass has to know, as flat lists of integers.
engine/steps/batch.py copies them into tensors; nothing here knows of tensors.

A step is made of rows, one for each stream that takes part: first decode rows (one token), then
rows with drafts (the last token and the tokens guessed after it), then pieces of prompts. It is run
in this order: copy pages, set the page table, write keys and values, attend, sample.

`Step` is the scheduler's own note of a step, from its planning until its tokens have come back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ridgeline.engine.scheduling.state import Stream, StreamKey

NOT_WRITTEN = -1  # a slot: keys and values are in their page already (see kernels/pages.py)


@dataclass(frozen=True, slots=True)
class StepPlan:
    step_id: int
    num_decode_rows: int = 0
    num_draft_rows: int = 0
    # One entry a row. A seat is a line of the page table on the device, and of whatever else is
    # kept there for a running stream.
    keys: list[StreamKey] = field(default_factory=list)
    seats: list[int] = field(default_factory=list)
    first_positions: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    # One entry a token, row after row. The id is 0 where only the device knows it: see
    # `device_tokens`, and for drafts whoever guesses them.
    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    # Tokens that the step before this one sampled and that have not reached the host: which token
    # of this step, and which sample of that one.
    device_tokens: list[int] = field(default_factory=list)
    device_samples: list[int] = field(default_factory=list)
    # Tokens of rows that go on behind drafts of the step before, of which the host does not know
    # how many are right: which token, and which sample of that step. Positions and slots are
    # those of no draft right; the device moves them on by as many as were.
    moved_tokens: list[int] = field(default_factory=list)
    moved_samples: list[int] = field(default_factory=list)
    # One entry a sample. Row i of the decode and draft rows owns sample i; a row that ends a prompt
    # owns one, or one for each of the request's samples.
    sample_keys: list[StreamKey] = field(default_factory=list)
    sample_seats: list[int] = field(default_factory=list)
    sample_drafts: list[int] = field(default_factory=list)  # drafts it verifies
    # One entry a row of logits, 1 + drafts for each sample: the token it is computed from.
    logit_tokens: list[int] = field(default_factory=list)
    host_samples: list[int] = field(default_factory=list)  # the next plan waits for these tokens
    copies: list[tuple[int, int]] = field(default_factory=list)  # page from, page to
    # Changes of the page table: in line table_seats[i], entry table_indexes[i] is table_pages[i].
    table_seats: list[int] = field(default_factory=list)
    table_indexes: list[int] = field(default_factory=list)
    table_pages: list[int] = field(default_factory=list)
    joined: list[tuple[int, StreamKey]] = field(
        default_factory=list
    )  # who sits where, from this step on


class Step:
    """A step from its planning until it comes back."""

    __slots__ = ("budget", "leaving", "num_lookups", "pieces", "pins", "plan", "rows", "samples")

    def __init__(self, step_id: int, budget: int) -> None:
        self.plan = StepPlan(step_id)
        self.budget = budget  # tokens that may still be added
        self.num_lookups = 0  # pages looked up in the prefix tree for it
        self.rows: list[Stream] = []
        self.samples: list[Stream] = []
        self.pieces: list[tuple[Stream, int]] = []  # rows of prompts, and where they end
        self.pins: list[int] = []  # pages held because this step copies from them
        self.leaving: list[Stream] = []  # streams that leave when it comes back

    def add_row(self, stream: Stream, token_ids: Sequence[int], slots: Sequence[int]) -> None:
        """The stream's next tokens. Planned positions are for the caller to advance."""
        plan, first, num_tokens = self.plan, stream.position, len(token_ids)
        self.rows.append(stream)
        plan.seats.append(stream.seat)
        plan.first_positions.append(first)
        plan.num_tokens.append(num_tokens)
        plan.token_ids.extend(token_ids)
        plan.positions.extend(range(first, first + num_tokens))
        plan.slots.extend(slots)
        self.budget -= num_tokens
        stream.last_step = plan.step_id

    def add_sample(self, stream: Stream, num_drafts: int = 0, holds: bool = False) -> None:
        """The stream samples from the last row: after its last token, and after each draft. If it
        `holds`, its next row waits for the host to know what came.
        """
        plan = self.plan
        stream.sample_index = len(self.samples)
        stream.last_step = plan.step_id
        self.samples.append(stream)
        plan.sample_seats.append(stream.seat)
        plan.sample_drafts.append(num_drafts)
        end = len(plan.token_ids)
        plan.logit_tokens.extend(range(end - 1 - num_drafts, end))
        stream.unsure = num_drafts
        if stream.request.ask.needs_host or holds:
            plan.host_samples.append(stream.sample_index)
            stream.held_by = plan.step_id

    def close_decode_rows(self) -> None:
        """The rows so far have one token and one sample each: fill in what follows from that."""
        plan, num_rows = self.plan, len(self.rows)
        self.budget -= num_rows
        self.samples.extend(self.rows)
        plan.first_positions.extend(plan.positions)
        plan.num_tokens.extend([1] * num_rows)
        plan.sample_seats.extend(plan.seats)
        plan.sample_drafts.extend([0] * num_rows)
        plan.logit_tokens.extend(range(num_rows))

    def seat(self, stream: Stream, seat: int) -> None:
        stream.seat = seat
        self.plan.joined.append((seat, stream.key))

    def take_from_device(self, stream: Stream) -> None:
        """The next token to be added is the one the stream's last step has sampled."""
        self.plan.device_tokens.append(len(self.plan.token_ids))
        self.plan.device_samples.append(stream.sample_index)

    def move(self, stream: Stream, num_tokens: int) -> None:
        """The next tokens to be added go on behind the drafts of the stream's last step."""
        first = len(self.plan.token_ids)
        self.plan.moved_tokens.extend(range(first, first + num_tokens))
        self.plan.moved_samples.extend([stream.sample_index] * num_tokens)

    def set_page(self, stream: Stream, index: int, page: int) -> None:
        self.plan.table_seats.append(stream.seat)
        self.plan.table_indexes.append(index)
        self.plan.table_pages.append(page)

    def copy_page(self, source: int, page: int) -> None:
        """`source` stays held until the step has come back."""
        self.plan.copies.append((source, page))
        self.pins.append(source)

    def close(self, num_decode_rows: int, num_draft_rows: int) -> StepPlan:
        """Nobody has seen the plan yet: it is completed in place, as every step needs it."""
        plan = self.plan
        object.__setattr__(plan, "num_decode_rows", num_decode_rows)
        object.__setattr__(plan, "num_draft_rows", num_draft_rows)
        plan.keys.extend([stream.key for stream in self.rows])
        plan.sample_keys.extend([stream.key for stream in self.samples])
        return plan
