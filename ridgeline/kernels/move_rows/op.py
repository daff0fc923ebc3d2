"""What the registry knows of moving rows on: its work, its shapes, its baseline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ridgeline.kernels.cost import OpCost
from ridgeline.kernels.inputs import label
from ridgeline.kernels.move_rows import MovingRows, reference
from ridgeline.kernels.op import Case, Op, OpInputs, case_lists, functions

INT32 = torch.int32


@dataclass(frozen=True)
class MoveRowsCase:
    """One case: samples with up to so many drafts each, some of which go on behind others."""

    num_samples: int
    num_drafts: int = 5
    page_size: int = 64
    num_pages: int = 40  # of a seat's line
    num_prompt_rows: int = 0  # samples behind the rows that may move
    num_seats: int = 0  # 0: two more than there are samples

    @property
    def label(self) -> str:
        return label(
            f"{self.num_samples} samples",
            f"{self.num_drafts} drafts",
            f"pages of {self.page_size}",
            self.num_prompt_rows and f"{self.num_prompt_rows} prompts",
            self.num_seats and f"{self.num_seats} seats",
        )


def make(setting: MoveRowsCase, device: torch.device, generator: torch.Generator) -> OpInputs:
    def drawn(shape: tuple[int, ...], low: int, high: int) -> Tensor:
        return torch.randint(low, high, shape, device=device, generator=generator, dtype=INT32)

    num_samples = setting.num_samples
    num_seats = setting.num_seats or num_samples + 2
    drafts = drawn((num_samples,), 0, setting.num_drafts + 1)
    rows = (drafts + 1).cumsum(0, dtype=INT32) - (drafts + 1)
    num_rows = int((drafts + 1).sum())
    own = torch.repeat_interleave(torch.arange(num_samples, device=device), (drafts + 1).long())
    behind = drawn((num_samples,), -1, num_samples)  # a sample of the step before, or -1
    seats = torch.arange(num_seats - 1, num_seats - 1 - num_samples, -1, device=device).to(INT32)
    longest = setting.num_pages * setting.page_size - 2 * setting.num_drafts - 2
    first = drawn((num_samples,), 0, longest)
    step = torch.arange(num_rows, device=device, dtype=INT32) - rows[own]
    positions = first[own] + step
    judged = torch.zeros((4, num_samples + setting.num_prompt_rows + 3), dtype=INT32, device=device)
    judged[0, :num_samples], judged[1, :num_samples] = seats, rows
    judged[2, :num_samples], judged[3, :num_samples] = drafts, first + 1
    ends = judged[:, num_samples : num_samples + setting.num_prompt_rows]
    ends[1] = num_rows + torch.arange(ends.shape[1], device=device)
    ends[3] = 17
    table = drawn((num_seats, setting.num_pages), 0, 1 << 16)
    counts = drawn((num_samples,), 1, setting.num_drafts + 2)
    places = (positions, positions + 1, positions + 1, positions + 1)
    return {
        "rows": MovingRows(behind[own], places, drawn((num_rows,), 0, 1 << 20), seats[own]),
        "counts_N": counts,
        "judged_4R": judged[:, : num_samples + setting.num_prompt_rows],
        "table_SP": table,
        "page_size": setting.page_size,
    }


def case(setting: MoveRowsCase) -> Case:
    return Case(setting.label, partial(make, setting), torch.float32)


def with_what_changed(function: Callable[..., None], **inputs: Any) -> tuple[Tensor, ...]:
    """On copies: what is moved twice is somewhere else."""
    moved, places, slots, seats = inputs["rows"]
    rows = MovingRows(moved, tuple(place.clone() for place in places), slots.clone(), seats)
    judged = inputs["judged_4R"].clone()
    function(**(inputs | {"rows": rows, "judged_4R": judged}))
    return (*rows.places, rows.slots, judged)


def launch(**inputs: Any) -> tuple[Tensor, ...]:
    from ridgeline.kernels.move_rows import triton

    return with_what_changed(triton.move_rows, **inputs)


def cost(rows: MovingRows, judged_4R: Tensor, **_: Any) -> OpCost:
    """Each row's numbers read and written, a page and a count read; of samples two and one."""
    count, samples, element = len(rows.moved), judged_4R.shape[1], INT32.itemsize
    return OpCost((8 * count + 3 * samples) * element, (5 * count + samples) * element)


SMALL = [
    case(setting)
    for setting in [
        MoveRowsCase(1, num_drafts=1, page_size=1, num_pages=20),
        MoveRowsCase(1, num_drafts=8),
        MoveRowsCase(7, num_drafts=5, page_size=16),
        MoveRowsCase(60, num_drafts=3, page_size=128, num_prompt_rows=5),
        MoveRowsCase(200, num_drafts=0, num_prompt_rows=130),
    ]
]
LARGE = [
    case(setting)
    for setting in [
        MoveRowsCase(512, num_drafts=8),
        MoveRowsCase(3, num_pages=4096, num_seats=600_000),  # past 2^31 entries
    ]
]
BENCH = [case(MoveRowsCase(batch, num_drafts=8)) for batch in (1, 16, 256)]
COMPILE = [case(MoveRowsCase(20, num_drafts=5))]
defined = partial(with_what_changed, reference.move_rows)

OP = Op(
    name="move_rows",
    summary="Rows behind drafts of the step before, moved on by those that were confirmed",
    **functions(defined, launch, cost, eager=defined),
    **case_lists(SMALL, LARGE, BENCH, COMPILE),
)
