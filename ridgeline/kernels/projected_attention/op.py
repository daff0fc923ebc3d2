"""What the registry knows of decode attention straight from the projection: its work, its shapes,
what it is timed against.

A case is decode_attention's cache with a projection before it. The newest token's place in the
pages holds NaN before: who reads it instead of taking the token from the projection is seen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ridgeline.kernels.attention.decode_run import DecodeRun
from ridgeline.kernels.attention.inputs import longest_first, newest_slots, with_what_changed
from ridgeline.kernels.attention.reference import AttentionSpec
from ridgeline.kernels.cost import OpCost
from ridgeline.kernels.decode_attention import op as decoding
from ridgeline.kernels.inputs import has_floats_of, label, normal, strided_rows
from ridgeline.kernels.launch import target_of
from ridgeline.kernels.op import Case, ConfigSearch, Op, OpInputs, case_lists, functions
from ridgeline.kernels.pages import Pages, PageTables
from ridgeline.kernels.projected_attention import (
    Apart,
    Projected,
    launched,
    queries_of,
    reference,
    tune_key,
)
from ridgeline.kernels.rotary.op import make_angles
from ridgeline.kernels.rotary_pages import op as storing
from ridgeline.kernels.rotary_pages.op import make_norm

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
INT8, FP8, FP8_AMD = torch.int8, torch.float8_e4m3fn, torch.float8_e4m3fnuz
WHOLE = 1 << 30  # pages up to this many numbers are compared whole: all that are timed are


@dataclass(frozen=True)
class ProjectedCase:
    """One case: decode attention's, and what comes before it."""

    attention: decoding.DecodeCase
    angles: int | None = 0  # 0: all dims are turned; None: none are
    normed: bool = False
    held: bool = False  # every second token is in its page already, and has no slot
    gap: int = 0  # columns between the rows of qkv

    @property
    def label(self) -> str:
        return label(
            self.attention.label,
            "no angles" if self.angles is None else self.angles and f"{self.angles} angles",
            self.normed and "norm",
            self.held and "held",
            self.gap and ("strided" if self.gap < 1000 else "far"),
        )


def make(setting: ProjectedCase, device: torch.device, generator: torch.Generator) -> OpInputs:
    given = setting.attention
    num_heads, num_kv_heads = given.heads
    head_dim, batch = given.head_dim, len(given.lengths)
    inputs = given.cache_of(given.lengths, device, generator)
    columns = (num_heads + 2 * num_kv_heads) * head_dim
    qkv = normal((batch, columns), given.dtype, device, generator)
    qkv = strided_rows(qkv, setting.gap) if setting.gap else qkv
    angles = norm = None
    if setting.angles is not None:
        angles = make_angles(batch, setting.angles or head_dim // 2, device, generator)
    slots = newest_slots(inputs["tables"], given.page_size)
    if setting.normed:
        offset = 1.0 if setting.gap else 0.0
        norm = make_norm(head_dim, given.dtype, offset, device, generator)
    inputs |= {"rows": Projected(qkv, angles, slots, norm), "spec": given.spec}
    if given.ordered:
        inputs["tables"] = longest_first(inputs["tables"])
    poison(inputs["pages"], slots)
    if setting.held:
        written = slots.clone()
        written[1::2] = -1
        reference.projected_attention(**inputs)
        inputs["rows"] = inputs["rows"]._replace(slots=written)
    return inputs | {"run": DecodeRun(given.split_tokens)}


def poison(pages: Pages, slots_B: Tensor) -> None:
    """NaN where the newest tokens go: in values, or in the scales of codes."""
    page_size, slots = pages.k_pages.shape[2], slots_B[slots_B >= 0].long()
    codes = pages.k_scale is not None
    for x in (pages.k_scale, pages.v_scale) if codes else (pages.k_pages, pages.v_pages):
        assert x is not None
        x[slots // page_size, :, slots % page_size] = float("nan")


def with_pages(function: Callable[..., Tensor], **inputs: Any) -> tuple[Tensor, ...]:
    return with_what_changed(function, WHOLE, inputs["rows"].slots, **inputs)


def defined(run: DecodeRun, **inputs: Any) -> tuple[Tensor, ...]:
    """The reference, which no cut of the work may change."""
    return with_pages(reference.projected_attention, **inputs)


def fused(**inputs: Any) -> Tensor:
    """The one kernel, whatever was measured to be faster."""
    from ridgeline.kernels.projected_attention import triton

    return triton.projected_attention(**inputs)


def launch(run: DecodeRun, config: Any = None, **inputs: Any) -> tuple[Tensor, ...]:
    """Triton's kernel but where a tuner asks for another, so that tests and compiler see it."""
    from ridgeline.kernels.projected_attention import triton

    function = fused if config is None or isinstance(config, triton.Fused) else launched
    return with_pages(function, **inputs, run=run._replace(config=config))


def clustered(**inputs: Any) -> Tensor:
    """The kernel in CUDA C++, which has no splits and takes sequences up as they come."""
    from ridgeline.kernels.projected_attention import cuda

    return cuda.projected_attention(**inputs)


def apart(run: DecodeRun, **inputs: Any) -> Tensor:
    return launched(**inputs, run=run._replace(config=Apart()))


def case(setting: ProjectedCase) -> Case:
    given = setting.attention
    reduction = given.head_dim + max(given.lengths)
    return Case(setting.label, partial(make, setting), given.dtype, reduction)


def cost(
    rows: Projected, pages: Pages, tables: PageTables, spec: AttentionSpec, **_: Any
) -> OpCost:
    """decode_attention's and rotary_pages', but for q between them and the newest K and V, which
    are not read again.
    """
    q_BNH = queries_of(rows.qkv, pages)
    attended = decoding.cost(q_BNH, pages, tables, spec)
    stored = storing.cost(rows.qkv, rows.angles, rows.slots, pages, rows.norm)
    q_bytes = q_BNH.numel() * q_BNH.element_size()
    newest_bytes = stored.written_bytes - q_bytes
    return OpCost(
        attended.read_bytes + stored.read_bytes - q_bytes - newest_bytes,
        attended.written_bytes + newest_bytes,
        attended.flops,
        attended.matrix_dtype,
    )


def search(rows: Projected, pages: Pages, tables: PageTables, **_: Any) -> ConfigSearch:
    """Cuts of one kernel, and the two: one list, so that the fastest is what is found."""
    from ridgeline.kernels.projected_attention import cuda, triton

    qkv_BC, (num_kv_heads, page_size, head_dim) = rows.qkv, pages.k_pages.shape[1:]
    num_rows, longest = len(qkv_BC) * num_kv_heads, tables.longest(page_size)
    dtype, target = pages.k_pages.dtype, target_of(qkv_BC)
    configs: list[Any] = [*triton.configs(num_rows, longest, head_dim, dtype, target), Apart()]
    if cuda.unsupported(qkv_BC, pages) is None:
        configs += cuda.configs(num_rows, head_dim, dtype, target)
    return ConfigSearch("projected_attention", tune_key(qkv_BC, pages, tables), configs)


TINY = decoding.TINY
SMALL = [
    *(ProjectedCase(replace(TINY, dtype=dtype), gap=16) for dtype in (FP32, BF16, FP16)),
    *(
        ProjectedCase(replace(TINY, dtype=dtype, cache=cache), normed=cache == FP8)
        for dtype in (FP32, BF16, FP16)
        for cache in (INT8, FP8)
    ),
    ProjectedCase(replace(TINY, dtype=FP32, cache=BF16, heads=(8, 1)), normed=True),
    ProjectedCase(
        replace(TINY, dtype=FP32, head_dim=80, heads=(3, 1), page_size=32), 16, normed=True
    ),
    ProjectedCase(replace(TINY, head_dim=96, heads=(2, 2), page_size=128, cache=INT8), 36),
    ProjectedCase(replace(TINY, dtype=FP32, head_dim=128, heads=(7, 1), softcap=5.0), None, gap=16),
    ProjectedCase(replace(TINY, dtype=FP16, head_dim=256, heads=(32, 1), page_size=256), 64),
    # The newest token alone in its split (129, 257), at a split's end (128, 256), a sequence of it.
    ProjectedCase(replace(TINY, dtype=FP32, lengths=(129, 128, 1, 0, 257), split_tokens=128)),
    ProjectedCase(
        replace(TINY, dtype=FP32, lengths=(257, 256, 1, 300), split_tokens=128, window=1)
    ),
    ProjectedCase(
        replace(TINY, dtype=FP32, lengths=(129, 130, 258, 2), split_tokens=128, window=2)
    ),
    ProjectedCase(
        replace(TINY, dtype=FP32, lengths=(600, 129, 7), split_tokens=128, window=150),
        normed=True,
        gap=16,
    ),
    ProjectedCase(
        replace(TINY, lengths=(513, 300), split_tokens=128, window=257, head_dim=80, cache=FP8),
        normed=True,
    ),
    ProjectedCase(
        replace(TINY, dtype=FP32, lengths=(300, 40, 129), window=1, softcap=20.0, cache=INT8)
    ),
    ProjectedCase(replace(TINY, dtype=FP32, lengths=(0, 0))),
    ProjectedCase(replace(TINY, lengths=(5, 70, 0, 33), ordered=True), normed=True),
    ProjectedCase(replace(TINY, dtype=FP32, lengths=(70, 1, 33, 16), split_tokens=128), held=True),
    ProjectedCase(
        replace(TINY, dtype=FP32, lengths=(40, 129, 7), cache=INT8), held=True, normed=True
    ),
    ProjectedCase(replace(TINY, dtype=FP32, head_dim=12, page_size=32), 5, gap=16),
    ProjectedCase(replace(TINY, head_dim=72, lengths=(300, 129), split_tokens=128, softcap=5.0)),
    ProjectedCase(replace(TINY, dtype=FP32, head_dim=33, lengths=(40, 7)), None, normed=True),
]
LENGTHS = (4097, 1, 63, 1000, 0, 32768, 4096)
LARGE = [
    ProjectedCase(
        decoding.DecodeCase(LENGTHS, heads=heads, dtype=dtype, window=window, softcap=softcap).over(
            head_dim, page_size, cache
        ),
        angles,
        normed,
        gap=16 if normed else 0,
    )
    for head_dim, page_size, heads, angles in [
        (64, 16, (32, 8), 0),
        (80, 32, (16, 16), 16),
        (96, 64, (32, 8), 36),
        (128, 64, (32, 8), 0),
        (128, 16, (64, 8), 32),
        (256, 256, (8, 1), 64),
        (72, 64, (16, 4), None),
        (250, 64, (16, 4), 0),
    ]
    for dtype, cache, normed in [
        (BF16, None, True),
        (FP16, None, False),
        (BF16, FP8, True),
        (BF16, INT8, False),
    ]
    for window, softcap in [(None, None), (1000, 30.0)]
] + [
    ProjectedCase(decoding.DecodeCase((1000, 5000, 257), dtype=FP32), normed=True),
    ProjectedCase(decoding.DecodeCase(decoding.mixed_lengths(100, 0, 900), ordered=True)),
    ProjectedCase(decoding.DecodeCase((1000, 5000, 64, 65)), held=True),
    # past 2^31 elements
    ProjectedCase(decoding.DecodeCase((1000, 500, 70)), gap=1 << 30),
    ProjectedCase(decoding.DecodeCase((1000, 5000), spare_pages=40_000)),
    ProjectedCase(decoding.DecodeCase((1000, 5000), spare_pages=20_000, page_size=128, cache=INT8)),
]
BENCH = [
    ProjectedCase(decoding.DecodeCase((length,) * batch, cache=cache))
    for cache in (None, FP8, INT8)
    for batch, length in [(1, 1024), (1, 4096), (16, 1024), (64, 1024), (64, 8192)]
] + [
    ProjectedCase(decoding.DecodeCase((32768,))),
    ProjectedCase(decoding.DecodeCase((1024,)), normed=True),
    ProjectedCase(decoding.DecodeCase(decoding.mixed_lengths(256, 100, 2048), ordered=True)),
]
COMPILE = [
    ProjectedCase(
        decoding.DecodeCase((1024,), heads=heads, head_dim=head_dim, cache=cache), angles, normed
    )
    for head_dim, heads, cache, angles, normed in [
        (128, (32, 8), None, 0, False),
        (128, (32, 8), None, 0, True),
        (128, (8, 8), None, 0, False),
        (128, (64, 8), None, 32, True),
        (128, (32, 8), FP8, 0, True),
        (128, (32, 8), FP8_AMD, 0, True),
        (128, (32, 8), INT8, 0, False),
        (64, (32, 8), None, 0, False),
        (80, (32, 32), None, 16, False),
        (96, (32, 8), None, 36, True),
        (256, (16, 8), None, 0, True),
        (256, (8, 1), INT8, 64, True),
        (20, (8, 2), INT8, 5, True),
        (72, (8, 2), None, None, False),
    ]
] + [
    ProjectedCase(decoding.DecodeCase((1024,) * 100, ordered=True)),
    ProjectedCase(decoding.DecodeCase((64,), window=32, softcap=30.0, page_size=16), normed=True),
]

OP = Op(
    name="projected_attention",
    summary="q/k norm, rotary embedding, the page write and decode attention as one kernel",
    **functions(defined, launch, cost, **{"two kernels": apart}),
    **case_lists(map(case, SMALL), map(case, LARGE), map(case, BENCH), map(case, COMPILE)),
    variants={
        "two kernels": partial(with_pages, apart),
        "cuda": partial(with_pages, clustered),
    },
    search=search,
    supports=has_floats_of,
)
