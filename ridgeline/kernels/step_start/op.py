"""What the registry knows of a step's start: its work, its shapes, its baseline."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ridgeline.kernels.cost import OpCost
from ridgeline.kernels.inputs import label, normal, strided_rows
from ridgeline.kernels.op import Case, Op, OpInputs, case_lists, functions
from ridgeline.kernels.rotary.reference import Angles
from ridgeline.kernels.step_start import EmbeddingTable, StepTokens, TableRows, reference

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
INT32 = torch.int32


@dataclass(frozen=True)
class StepStartCase:
    """One case: about half of the tokens are the last step's."""

    num_tokens: int
    num_rows: int
    hidden_size: int
    num_angles: int = 64  # 0: no rope
    num_pages: int = 16
    dtype: torch.dtype = BF16
    scale: float = 1.0
    vocab_size: int = 300
    apart: bool = False  # lines of the embedding lie apart

    @property
    def label(self) -> str:
        return label(
            f"{self.num_tokens} tokens {self.num_rows} rows",
            (self.hidden_size, self.num_angles),
            self.dtype,
            f"{self.num_pages} pages",
            self.scale != 1.0 and f"scale={self.scale:g}",
            self.vocab_size > 300 and f"vocabulary {self.vocab_size}",
            self.apart and "apart",
        )


def make(setting: StepStartCase, device: torch.device, generator: torch.Generator) -> OpInputs:
    def drawn(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, device=device, generator=generator, dtype=INT32)

    T, num_seats, length = setting.num_tokens, setting.num_rows + 3, 50
    weight = normal((setting.vocab_size, setting.hidden_size), setting.dtype, device, generator)
    table = drawn(0, 1 << 30, num_seats, setting.num_pages + 5)
    tokens = StepTokens(
        ids=drawn(0, setting.vocab_size, T),
        sources=drawn(-T - 1, T + 1, T).clamp(min=-1),
        last=drawn(0, setting.vocab_size, T + 1),
        positions=drawn(0, length, T),
    )
    seats = drawn(0, num_seats, setting.num_rows)
    inputs: OpInputs = {
        "tokens": tokens,
        "embedding": EmbeddingTable(
            strided_rows(weight) if setting.apart else weight, setting.scale
        ),
        "rows": TableRows(seats, table[:, : setting.num_pages]),
    }
    if setting.num_angles:
        shape = (length, setting.num_angles)
        inputs["angles"] = tuple(normal(shape, FP32, device, generator) for _ in range(2))
    return inputs


def case(*args: Any, **kwargs: Any) -> Case:
    setting = StepStartCase(*args, **kwargs)
    return Case(setting.label, partial(make, setting), setting.dtype)


def launch(**inputs: Any) -> tuple[Tensor, ...]:
    from ridgeline.kernels.step_start import triton

    return triton.step_start(**inputs)


def cost(
    tokens: StepTokens, embedding: EmbeddingTable, rows: TableRows, angles: Angles | None = None
) -> OpCost:
    """What is copied is read and written; the numbers that say what, are read."""
    num_tokens, num_rows = len(tokens.ids), len(rows.seats)
    copied = sum(
        count * table.shape[1] * table.element_size()
        for count, table in (
            (num_tokens, embedding.weight),
            (num_rows, rows.table),
            *((num_tokens, table) for table in angles or ()),
        )
    )
    return OpCost(copied + INT32.itemsize * (4 * num_tokens + num_rows), copied)


SMALL = [
    case(1, 1, 64),
    case(5, 5, 200, 24, 7, FP32),
    case(40, 3, 100, 0, 33, FP16, apart=True),
    case(17, 9, 1000, 48, 1, BF16, 7.0625),
    case(6, 2, 5000, 10, 4100, BF16, 0.5, apart=True),  # longer than what is copied at once
    case(3, 2, 63, 1, 5, FP16, 1.5),
]
LARGE = [
    case(512, 512, 4096, 64, 2048, vocab_size=128256),
    case(8192, 100, 3584, 128, 512, BF16, 59.75, vocab_size=256000),
    case(64, 64, 8192, 64, 16, FP32, vocab_size=300_000),  # past 2^31 entries
]
BENCH = [
    *(case(rows, rows, 4096, 64, 64, vocab_size=128256) for rows in (1, 16, 256)),
    case(8192, 8, 4096, 64, 2048, vocab_size=128256),
]
COMPILE = [
    case(16, 16, 4096, 64, 64),
    case(16, 2, 3584, 128, 64, BF16, 59.75),
    case(3, 3, 1000, 0, 7, FP32),
]

OP = Op(
    name="step_start",
    summary="A step's tokens, embeddings, rotary angles and page tables, looked up at once",
    **functions(reference.step_start, launch, cost, eager=reference.step_start),
    **case_lists(SMALL, LARGE, BENCH, COMPILE),
)
