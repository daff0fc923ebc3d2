"""What the registry knows of deterministic attention: prefill attention's cases, cut into splits at
fixed positions. Its definition, work and baselines are prefill attention's too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ridgeline.kernels.inputs import has_floats_of, label
from ridgeline.kernels.op import Case, Op, OpInputs, case_lists
from ridgeline.kernels.prefill_attention import op as prefill
from ridgeline.kernels.prefill_attention.op import PAGED, PrefillCase

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
INT8, FP8 = torch.int8, torch.float8_e4m3fn
FEW_NEW = 8  # new tokens of a sequence up to which the longest one is told


def launch(parts: int | None = None, apart: bool | None = None, **inputs: Any) -> Tensor:
    """The kernel of decode rows where an order is given, else that of prompts."""
    from ridgeline.kernels.deterministic_attention import decode, triton

    if inputs["tables"].order is None:
        return triton.prefill_attention(**inputs, apart=apart)
    names = ("pages", "tables", "spec", "split_tokens")
    own = {name: inputs[name] for name in names}
    return decode.decode_rows(inputs["q_TNH"], **own, parts=parts)


def reference(
    split_tokens: int, parts: int | None = None, apart: bool | None = None, **inputs: Any
) -> Tensor:
    """Prefill attention's, which no cut of the work may change."""
    return prefill.reference(**inputs)


@dataclass(frozen=True)
class DeterministicCase:
    prompts: PrefillCase
    split: int  # keys
    apart: bool | None = None  # whether splits have programs of their own; None: as is chosen
    in_order: bool = False  # decode rows, in an order
    parts: int | None = None  # programs for a decode row's splits; None: as is chosen

    @property
    def label(self) -> str:
        return label(
            self.prompts.label,
            f"split {self.split}",
            self.apart is not None and ("apart" if self.apart else "together"),
            self.in_order and f"in order, {self.parts or 'some'} parts",
        )


def make(setting: DeterministicCase, device: torch.device, generator: torch.Generator) -> OpInputs:
    prompts = setting.prompts
    inputs = prefill.make(prompts, device, generator) | {"split_tokens": setting.split}
    tables = inputs["tables"]
    if max(prompts.new) <= FEW_NEW:
        tables = tables._replace(max_length=max(prompts.lengths))
    if setting.in_order:
        order = torch.randperm(len(prompts.new), device=device, generator=generator)
        tables = tables._replace(order=order.int())
    return inputs | {"tables": tables, "apart": setting.apart, "parts": setting.parts}


def case(setting: DeterministicCase) -> Case:
    return replace(prefill.case(setting.prompts), label=setting.label, make=partial(make, setting))


AFTER = replace(PAGED, new=(40, 3), before=(100, 190))
ROWS = replace(PAGED, new=(1, 1, 1), before=(300, 0, 63))
SMALL = [
    *(
        DeterministicCase(prompts, 64, apart)
        for apart in (False, True)
        for prompts in (
            replace(AFTER, dtype=FP32, window=70),
            replace(AFTER, dtype=BF16, cache=INT8),
            replace(AFTER, dtype=FP16, head_dim=80, softcap=5.0),
            replace(AFTER, dtype=FP32, head_dim=12),
            replace(AFTER, dtype=BF16, head_dim=72),
        )
    ),
    DeterministicCase(replace(ROWS, dtype=BF16), 64),
    *(
        DeterministicCase(rows, 64, in_order=True, parts=parts)
        for parts, rows in (
            (None, replace(ROWS, dtype=BF16)),
            (1, replace(ROWS, dtype=FP32, window=70)),
            (2, replace(ROWS, dtype=BF16, cache=INT8, strided=True)),
            (9, replace(ROWS, dtype=FP16, head_dim=80, heads=(3, 1), softcap=5.0)),
            (None, replace(ROWS, dtype=BF16, new=(1, 1), before=(40, 0))),
        )
    ),
]
FIVE_ROWS = PrefillCase((1,) * 5, before=(0, 511, 512, 3000, 7000))
LARGE = [
    DeterministicCase(
        replace(prompts, window=window, cache=cache), 512, in_order=in_order, parts=parts
    )
    for prompts, in_order, parts in (
        (PrefillCase((1000, 1, 63), before=(0, 3000, 1500)), False, None),
        (FIVE_ROWS, False, None),
        (FIVE_ROWS, True, 2),
    )
    for window, cache in ((None, None), (500, None), (None, FP8), (None, INT8))
]
BENCH = [
    DeterministicCase(PrefillCase((2048,) * 4, before=(0,) * 4), 512),
    DeterministicCase(PrefillCase((2048,), before=(8192,)), 512),
    *(
        DeterministicCase(PrefillCase((1,) * batch, before=(1023,) * batch), 512)
        for batch in (1, 64, 256)
    ),
    DeterministicCase(PrefillCase((1,), before=(8191,)), 512),
    *(
        DeterministicCase(
            PrefillCase((1,) * batch, before=(1023,) * batch), 512, in_order=True, parts=parts
        )
        for batch, parts in ((1, None), (64, None), (256, None), (256, 1))
    ),
]
COMPILE = [
    *(
        DeterministicCase(
            PrefillCase(
                new, before=(900,) * len(new), head_dim=head_dim, cache=cache, window=window
            ),
            512,
            apart,
        )
        for new, apart in (((256,), False), ((1, 1), True))
        for head_dim, cache, window in (
            (128, None, None),
            (64, INT8, None),
            (20, None, None),
            (256, None, 300),
            (128, FP8, 300),
        )
    ),
    *(
        DeterministicCase(
            PrefillCase(
                (1, 1), before=(before,) * 2, head_dim=head_dim, cache=cache, window=window
            ),
            512,
            in_order=True,
            parts=2,
        )
        for before, head_dim, cache, window in (
            (900, 128, None, None),
            (300, 128, None, None),
            (900, 64, INT8, None),
            (900, 256, None, 700),
            (900, 128, FP8, 700),
        )
    ),
]

OP = Op(
    name="deterministic_attention",
    summary="attention over pages whose bits do not depend on the batch or on how prompts are cut",
    reference=reference,
    launch=launch,
    cost=prefill.cost,
    **case_lists(map(case, SMALL), map(case, LARGE), map(case, BENCH), map(case, COMPILE)),
    baselines={
        "sdpa_cudnn": partial(prefill.torch_attention, "cudnn"),
        "sdpa_flash": partial(prefill.torch_attention, "flash"),
    },
    supports=has_floats_of,
)
