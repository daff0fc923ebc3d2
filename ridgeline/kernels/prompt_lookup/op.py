"""What the registry knows of prompt lookup: its work, its shapes, its baseline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ridgeline.kernels.cost import OpCost
from ridgeline.kernels.inputs import label
from ridgeline.kernels.op import Case, Op, OpInputs, case_lists, functions
from ridgeline.kernels.prompt_lookup import LookupResults, Streams, reference

INT32 = torch.int32
WHOLE = 1 << 26  # a table up to this many tokens is compared whole


@dataclass(frozen=True)
class PromptLookupCase:
    """One case: streams of these lengths, in a table with some lines to spare."""

    lengths: tuple[int, ...]  # tokens known before the step
    num_drafts: int = 5
    ngrams: tuple[int, int] = (2, 4)  # shortest and longest run
    vocab_size: int = 4  # few: then runs are found again
    num_seats: int = 0  # 0: two more than there are streams
    gap: int = 3  # columns between the lines of the table
    has_out: bool = False  # whether verdicts go into rows that lie apart, from such that do

    @property
    def label(self) -> str:
        return label(
            f"{len(self.lengths)} of {min(self.lengths)}-{max(self.lengths)}",
            f"{self.num_drafts} drafts",
            f"runs {self.ngrams[0]}-{self.ngrams[1]}",
            self.vocab_size > 4 and f"vocabulary {self.vocab_size}",
            self.num_seats and f"{self.num_seats} seats",
            self.has_out and "out",
        )


def make(setting: PromptLookupCase, device: torch.device, generator: torch.Generator) -> OpInputs:
    """Streams whose drafts are partly right, with none to as many as there are verified."""
    num_samples, K = len(setting.lengths), setting.num_drafts

    def drawn(shape: tuple[int, ...], high: int) -> Tensor:
        return torch.randint(0, high, shape, device=device, generator=generator, dtype=INT32)

    num_seats = setting.num_seats or num_samples + 2
    width = max(setting.lengths) + K + 2
    table = torch.full((num_seats, width + setting.gap), -1, dtype=INT32, device=device)
    seats = torch.arange(num_seats - 1, num_seats - 1 - num_samples, -1, device=device)
    for seat, length in zip(seats.tolist(), setting.lengths, strict=True):
        table[seat, :length] = drawn((length,), setting.vocab_size)
    verified = drawn((num_samples,), K + 1)
    rows = (verified + 1).cumsum(0) - (verified + 1)
    tokens = drawn((int((verified + 1).sum()),), setting.vocab_size)
    drafts = drawn((num_seats, K), setting.vocab_size)
    for sample, (seat, row) in enumerate(zip(seats.tolist(), rows.tolist(), strict=True)):
        right = int(verified[sample]) - sample % 2
        if right > 0:
            drafts[seat, :right] = tokens[row : row + right]
    lengths = torch.tensor(setting.lengths, device=device)
    room = torch.full((7, num_samples + 4), -7, dtype=INT32, device=device)
    samples = torch.stack((seats, rows, verified, lengths)).to(INT32)
    if setting.has_out:
        room[3:, :num_samples] = samples
        samples = room[3:, :num_samples]
    into = LookupResults(room[:3, :num_samples], torch.full_like(room[0], -7))
    return {
        "streams": Streams(table[:, :width], drafts, *setting.ngrams),
        "tokens_R": tokens,
        "samples_4N": samples,
        "into": into if setting.has_out else None,
    }


def case(setting: PromptLookupCase) -> Case:
    return Case(setting.label, partial(make, setting), torch.float32)


def with_what_changed(function: Callable[..., Tensor], **inputs: Any) -> tuple[Tensor, ...]:
    """What it returns and leaves, and both tables; of a table too large to compare, the streams'
    lines.
    """
    counts = function(**inputs)
    history, seats = inputs["streams"].history, inputs["samples_4N"][0].long()
    left = () if inputs["into"] is None else (inputs["into"].last,)
    whole = history if history.numel() <= WHOLE else history[seats]
    return counts, inputs["streams"].drafts, whole, *left


def launch(**inputs: Any) -> tuple[Tensor, ...]:
    from ridgeline.kernels.prompt_lookup import triton

    return with_what_changed(triton.prompt_lookup, **inputs)


def cost(streams: Streams, tokens_R: Tensor, samples_4N: Tensor, **_: Any) -> OpCost:
    """Each stream's tokens are read once, its drafts read and written."""
    num_samples, element = samples_4N.shape[1], tokens_R.element_size()
    tokens = int(samples_4N[3].sum()) + tokens_R.numel()
    drafts = num_samples * streams.drafts.shape[1]
    written = drafts + tokens_R.numel() + 3 * num_samples
    return OpCost((tokens + drafts) * element + samples_4N.nbytes, written * element)


SMALL = [
    case(setting)
    for setting in [
        PromptLookupCase((1,), num_drafts=1, ngrams=(1, 1)),
        PromptLookupCase((1, 2, 3, 4, 5), ngrams=(1, 3)),
        PromptLookupCase((63, 17, 40, 2, 90, 33), ngrams=(2, 4)),
        PromptLookupCase((1000, 1023, 1024, 1025), num_drafts=7, ngrams=(3, 9)),
        PromptLookupCase((30, 900), num_drafts=32, ngrams=(1, 16), vocab_size=2),
        PromptLookupCase((200, 100, 50), vocab_size=50_000),  # nothing is found
        PromptLookupCase((63, 17, 40), has_out=True),
    ]
]
LARGE = [
    case(setting)
    for setting in [
        PromptLookupCase(tuple(range(1, 3000, 17)), num_drafts=8, ngrams=(2, 5)),
        PromptLookupCase((131_072, 5, 70_000), ngrams=(2, 12)),
        PromptLookupCase((4_000, 300), ngrams=(2, 4), num_seats=550_000),  # past 2^31 elements
    ]
]
BENCH = [
    case(PromptLookupCase((length,) * batch, vocab_size=50_000))
    for batch, length in [(1, 2048), (1, 32_768), (64, 2048), (256, 2048)]
]
COMPILE = [
    case(PromptLookupCase((20, 30), num_drafts=drafts, ngrams=ngrams))
    for drafts, ngrams in [(5, (2, 4)), (32, (1, 16)), (1, (1, 1))]
]
defined = partial(with_what_changed, reference.prompt_lookup)

OP = Op(
    name="prompt_lookup",
    summary="Confirming drafted tokens, and drafting what followed the last ones before",
    **functions(defined, launch, cost, eager=defined),
    **case_lists(SMALL, LARGE, BENCH, COMPILE),
)
