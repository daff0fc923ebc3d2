"""A small model that drafts: it has its own keys and values, in pages with the target's numbers.

The draft follows lazily. Whatever the target writes into a page makes that place of the draft's
page stale; of each page the host knows how many places, from its first, the draft has computed.
When drafts are wanted, a stream first runs through the draft what it lacks (the last token or two;
the prompt, the first time), and then decodes as many tokens as are wanted. So chunked prompts,
shared prefixes, copied pages and preemption need no code of their own, pages that are shared hold
the draft's part too once somebody has made it, and while drafts do not pay off it costs nothing.
(Where every layer has a window, pages behind it may be gone before the draft has seen them: its
drafts are then a little worse for some tokens.)

It runs through a runner of its own, graphs included, and draws with the request's settings, seed
and position, hence with the noise that the target will draw with.

Letters: S seats, K drafts, N samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from ridgeline.engine.execution.runner import Runner
from ridgeline.engine.requests.request import Sampling
from ridgeline.engine.sampling.drafter import Drafter, KnownTokens, judged
from ridgeline.engine.sampling.extras import DeviceJob
from ridgeline.engine.scheduling.state import StreamKey
from ridgeline.engine.scheduling.step_plan import PlanLists, StepPlan
from ridgeline.engine.steps.transfer import to_device

KEY: StreamKey = ("draft", 0)  # its rows belong to no request: what fails here fails nobody
JOBS = {KEY[0]: DeviceJob(Sampling(seed=0), (0,), frozenset())}


@dataclass
class DraftRow:
    """A stream that wants drafts."""

    seat: int
    start: int  # the first position that the draft lacks
    position: int  # of its last token
    num_drafts: int
    tokens: list[int]  # from `start` on; the last one is 0 where only the device knows it
    device_sample: int | None  # then, which of the target's last samples it is

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


class DraftPages:
    """What the draft has computed, page by page."""

    def __init__(self, num_pages: int, page_size: int, table_shape: tuple[int, int]) -> None:
        self.size = page_size
        self.table = np.zeros(table_shape, dtype=np.int32)  # as the device has it
        self.filled = np.zeros(num_pages, dtype=np.int32)  # places computed, from the first on

    def follow(self, plan: StepPlan) -> None:
        """What the target is about to do: copy pages, change tables, write places anew."""
        for source, target in plan.copies:
            self.filled[target] = self.filled[source]
        self.table[plan.table_seats, plan.table_indexes] = plan.table_pages
        slots = np.asarray(plan.slots, dtype=np.int64)
        slots = slots[slots >= 0]
        np.minimum.at(self.filled, slots // self.size, (slots % self.size).astype(np.int32))

    def start(self, seat: int, position: int, window: int | None) -> int:
        """The first position that the draft lacks, up to `position`; what has fallen behind the
        window nobody needs, and its pages may be others' by now.
        """
        first = 0 if window is None else max(position - window + 1, 0) // self.size
        pages = self.table[seat, first : position // self.size + 1]
        partial = np.flatnonzero(self.filled[pages] < self.size)
        if not len(partial):
            return position
        index = int(partial[0])
        return min((first + index) * self.size + int(self.filled[pages[index]]), position)

    def slots(self, seat: int, start: int, end: int) -> list[int]:
        positions = np.arange(start, end)
        pages = self.table[seat, positions // self.size].astype(np.int64)
        slots: list[int] = (pages * self.size + positions % self.size).tolist()
        return slots

    def fill(self, seat: int, start: int, end: int) -> None:
        """These positions are computed, and all before them were."""
        for index in range(start // self.size, (end - 1) // self.size + 1):
            self.filled[self.table[seat, index]] = min(end - index * self.size, self.size)


class DraftModel(Drafter):
    """`runner` has the draft; `target` is the runner it drafts for, `window` how far back the
    target's pages are kept.
    """

    def __init__(self, runner: Runner, target: Runner, window: int | None, budget: int) -> None:
        self.runner, self.target, self.window = runner, target, window
        self.budget = budget  # tokens in one pass of the draft
        self.drafts_SK = target.buffers.drafts_SK
        shape = (runner.buffers.page_table.shape[0], runner.buffers.page_table.shape[1])
        self.pages = DraftPages(runner.kv.num_pages, runner.kv.page_size, shape)
        self._changes: dict[tuple[int, int], int] = {}  # of the page table, to be sent

    def sit(
        self, seat: int, prompt_length: int, sampling: Sampling, seed: int, tokens: Sequence[int]
    ) -> None:
        self.runner.sampler.seats.sit(seat, prompt_length, sampling, seed)

    def follow(self, plan: StepPlan) -> None:
        self.runner.kv.copy_pages(plan.copies)
        self.pages.follow(plan)
        entries = zip(plan.table_seats, plan.table_indexes, strict=True)
        self._changes.update(zip(entries, plan.table_pages, strict=True))

    def judge(self, plan: StepPlan, tokens_R: Tensor, counts_R: Tensor) -> Tensor:
        return judged(plan, tokens_R, self.drafts_SK)

    def draft(self, plan: StepPlan, known_tokens: KnownTokens) -> None:
        rows = self._rows(plan, known_tokens)
        if not rows:
            return
        while (behind := self._behind(rows)) is not None:
            self._pass([behind])
        self._copy_last_samples()
        rows.sort(key=lambda row: row.num_tokens > 1)  # rows of one token come first in a step
        most = max(row.num_drafts for row in rows)
        for number in range(most):
            rows = [row for row in rows if row.num_drafts > number]
            self._pass(rows)
            self._keep_drafts(rows, number)
            for sample, row in enumerate(rows):
                row.start = row.position = row.position + 1
                row.tokens, row.device_sample = [0], sample

    def _rows(self, plan: StepPlan, known_tokens: KnownTokens) -> list[DraftRow]:
        from_device = dict(zip(plan.device_tokens, plan.device_samples, strict=True))
        rows, token = [], plan.num_decode_rows
        for row in range(plan.num_decode_rows, plan.num_decode_rows + plan.num_draft_rows):
            seat, position = plan.seats[row], plan.first_positions[row]
            start = self.pages.start(seat, position, self.window)
            known = list(known_tokens(plan.keys[row])[start:position])
            tokens = [*known, plan.token_ids[token]]
            drafts = plan.num_tokens[row] - 1
            if drafts:
                sample = from_device.get(token)
                rows.append(DraftRow(seat, start, position, drafts, tokens, sample))
            token += 1 + drafts
        return rows

    def _behind(self, rows: list[DraftRow]) -> DraftRow | None:
        """A piece of what a stream lacks, taken off it, as long as all lack more than goes into one
        pass.
        """
        total = sum(row.num_tokens for row in rows)
        row = max(rows, key=lambda row: row.num_tokens)
        if total <= self.budget or row.num_tokens == 1:
            return None
        count = min(self.budget, row.num_tokens - 1)
        tokens, row.tokens = row.tokens[:count], row.tokens[count:]
        row.start += count
        return DraftRow(row.seat, row.start - count, row.start - 1, 0, tokens, None)

    def _copy_last_samples(self) -> None:
        """Tokens that only the device knows are the target's samples at first."""
        count = min(self.target.max_batch, len(self.runner.buffers.last_tokens))
        self.runner.buffers.last_tokens[:count] = self.target.buffers.last_tokens[:count]

    def _pass(self, rows: list[DraftRow]) -> None:
        """Run rows through the draft, and choose the token behind each."""
        self.runner.run(_plan_of(rows, self.pages, self._changes), JOBS)
        self._changes = {}
        for row in rows:
            self.pages.fill(row.seat, row.start, row.position + 1)

    def _keep_drafts(self, rows: list[DraftRow], number: int) -> None:
        indexes = [row.seat * self.drafts_SK.shape[1] + number for row in rows]
        where = to_device(indexes, self.drafts_SK.device)
        self.drafts_SK.view(-1).index_copy_(0, where, self.runner.buffers.last_tokens[: len(rows)])


def _plan_of(
    rows: list[DraftRow], pages: DraftPages, changes: dict[tuple[int, int], int]
) -> StepPlan:
    """A step of these rows, those of one token first; each has a sample."""
    seats, keys = [row.seat for row in rows], [KEY] * len(rows)
    plan = PlanLists()
    plan.keys = plan.sample_keys = keys
    plan.seats = plan.sample_seats = seats
    plan.first_positions = [row.start for row in rows]
    plan.num_tokens = [row.num_tokens for row in rows]
    plan.sample_drafts = [0] * len(rows)
    plan.table_seats = [seat for seat, _ in changes]
    plan.table_indexes = [index for _, index in changes]
    plan.table_pages = list(changes.values())
    for row in rows:
        plan.token_ids.extend(row.tokens)
        plan.positions.extend(range(row.start, row.position + 1))
        plan.slots.extend(pages.slots(row.seat, row.start, row.position + 1))
        plan.logit_tokens.append(len(plan.token_ids) - 1)
        if row.device_sample is not None:
            plan.device_tokens.append(plan.logit_tokens[-1])
            plan.device_samples.append(row.device_sample)
    num_decode_rows = sum(row.num_tokens == 1 for row in rows)
    return plan.frozen(step_id=0, num_decode_rows=num_decode_rows, num_draft_rows=0)
