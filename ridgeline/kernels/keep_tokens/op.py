"""What the registry knows of keeping tokens: its work, its shapes, its baseline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ridgeline.kernels.cost import OpCost
from ridgeline.kernels.inputs import label, normal, strided_rows
from ridgeline.kernels.keep_tokens import reference
from ridgeline.kernels.op import Case, Op, OpInputs, case_lists, functions

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
INT32 = torch.int32
VOCABULARY = 128256  # Llama 3's


@dataclass(frozen=True)
class KeepTokensCase:
    """One case. Every third chosen logit is NaN, and so are some that were not chosen."""

    shape: tuple[int, int]
    dtype: torch.dtype = BF16
    room: int = 0  # tokens there is room for; 0: more than there are rows
    last: bool = True  # whether the next step's place is written too
    apart: bool = False  # whether rows of logits lie apart

    @property
    def label(self) -> str:
        return label(
            self.shape,
            self.dtype,
            self.room and f"room for {self.room}",
            not self.last and "results only",
            self.apart and "apart",
        )


def make(setting: KeepTokensCase, device: torch.device, generator: torch.Generator) -> OpInputs:
    rows, vocab_size = setting.shape
    logits = normal(setting.shape, setting.dtype, device, generator)
    tokens = torch.randint(vocab_size, (rows,), device=device, generator=generator)
    logits[:, 0] = float("nan")
    logits.scatter_(1, tokens.unsqueeze(1), 1.0)
    logits[::3].scatter_(1, tokens[::3].unsqueeze(1), float("nan"))
    room = setting.room or rows + 3
    results = torch.full((5, room), -7, dtype=INT32, device=device)
    inputs: OpInputs = {
        "logits_RV": strided_rows(logits) if setting.apart else logits,
        "tokens_R": tokens,
        "results_2N": results[:2],
    }
    if setting.last:
        inputs["last_N"] = torch.full((room,), -7, dtype=INT32, device=device)
    return inputs


def case(*args: Any, **kwargs: Any) -> Case:
    setting = KeepTokensCase(*args, **kwargs)
    return Case(setting.label, partial(make, setting), FP32)


def with_what_changed(function: Callable[..., None], **inputs: Any) -> tuple[Tensor, ...]:
    function(**inputs)
    return tuple(inputs[name] for name in ("results_2N", "last_N") if name in inputs)


def launch(**inputs: Any) -> tuple[Tensor, ...]:
    from ridgeline.kernels.keep_tokens import triton

    return with_what_changed(triton.keep_tokens, **inputs)


def cost(logits_RV: Tensor, tokens_R: Tensor, last_N: Tensor | None = None, **_: Any) -> OpCost:
    """One logit a row, and its token."""
    rows = len(tokens_R)
    read = rows * (logits_RV.element_size() + tokens_R.element_size())
    return OpCost(read, rows * INT32.itemsize * (2 if last_N is None else 3))


SMALL = [
    case((1, 1000), BF16),
    case((3, 1000), FP32, last=False),
    case((63, 50), FP16, apart=True),
    case((130, 257), BF16, apart=True),
    case((129, 40), FP32, room=128),  # the last row fills up a shape
    case((200, 7), BF16, room=150, last=False),
]
LARGE = [
    case((512, VOCABULARY), BF16),
    case((17000, VOCABULARY), BF16, last=False),  # past 2^31 entries
]
BENCH = [case((rows, VOCABULARY), dtype) for rows in (1, 16, 256) for dtype in (BF16, FP32)]
COMPILE = [
    case((16, 1024), BF16),
    case((16, 1024), FP32, last=False),
    case((3, 1000), FP16),
]
defined = partial(with_what_changed, reference.keep_tokens)

OP = Op(
    name="keep_tokens",
    summary="A step's tokens and which of them are NaN's, left for the host and the next step",
    **functions(defined, launch, cost, eager=defined),
    **case_lists(SMALL, LARGE, BENCH, COMPILE),
)
