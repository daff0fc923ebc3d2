"""What the registry knows of the step from projection to pages: work, shapes, its baselines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ridgeline.formats.scaling import quantize_rows
from ridgeline.kernels.attention.inputs import with_what_changed
from ridgeline.kernels.cost import OpCost
from ridgeline.kernels.inputs import has_floats_of, label, normal, strided_rows
from ridgeline.kernels.op import Case, Op, OpInputs, case_lists, functions
from ridgeline.kernels.pages import Pages, holds_codes, make_pages
from ridgeline.kernels.rotary.op import make_angles
from ridgeline.kernels.rotary.reference import Angles, rotate
from ridgeline.kernels.rotary_pages import QKNorm, reference

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
INT8, FP8, FNUZ = torch.int8, torch.float8_e4m3fn, torch.float8_e4m3fnuz
WHOLE = 1 << 26  # pages up to this many numbers are compared whole


@dataclass(frozen=True)
class RotaryPagesCase:
    """One case's sizes and choices."""

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    angles: int | None = 0  # 0: all dims are turned; None: none are
    dtype: torch.dtype = BF16
    page_dtype: torch.dtype = BF16
    page_size: int = 64
    normed: bool = False
    gap: int = 0  # columns between the rows of qkv
    spare_pages: int = 2

    @property
    def label(self) -> str:
        return label(
            (self.tokens, self.heads, self.kv_heads, self.head_dim),
            self.dtype,
            "pages",
            (self.page_size,),
            self.page_dtype,
            "no angles" if self.angles is None else self.angles and f"{self.angles} angles",
            self.normed and "norm",
            self.gap and ("strided" if self.gap < 1000 else "far"),
            self.spare_pages > 1000 and "many",
        )


def make(setting: RotaryPagesCase, device: torch.device, generator: torch.Generator) -> OpInputs:
    columns = (setting.heads + 2 * setting.kv_heads) * setting.head_dim
    qkv = normal((setting.tokens, columns), setting.dtype, device, generator)
    angles = None
    if setting.angles is not None:
        num_angles = setting.angles or setting.head_dim // 2
        angles = make_angles(setting.tokens, num_angles, device, generator)
    num_pages = -(-setting.tokens // setting.page_size) + setting.spare_pages
    pages = make_pages(
        num_pages,
        setting.page_size,
        setting.kv_heads,
        setting.head_dim,
        setting.page_dtype,
        device,
    )
    for tensor in pages.tensors():
        if tensor.numel() <= WHOLE:  # so that a stray write is seen
            scale = 20.0 if tensor.dtype == INT8 else 1.0
            drawn = normal(tuple(tensor.shape), FP32, device, generator, scale)
            tensor.copy_(drawn.to(tensor.dtype))
    inputs: OpInputs = {
        "qkv_TC": strided_rows(qkv, setting.gap) if setting.gap else qkv,
        "angles": angles,
        "slots_T": make_slots(setting, num_pages, device, generator),
        "pages": pages,
    }
    if setting.normed:
        offset = 1.0 if setting.gap else 0.0
        inputs["norm"] = make_norm(setting.head_dim, setting.dtype, offset, device, generator)
    return inputs


def make_norm(
    head_dim: int,
    dtype: torch.dtype,
    offset: float,
    device: torch.device,
    generator: torch.Generator,
) -> QKNorm:
    q_weight, k_weight = (normal((head_dim,), dtype, device, generator) for _ in range(2))
    return QKNorm(q_weight, k_weight, offset=offset)


def make_slots(
    setting: RotaryPagesCase, num_pages: int, device: torch.device, generator: torch.Generator
) -> Tensor:
    """Runs of places in pages of random order; a token in the very last place, some left out."""
    order = torch.randperm(num_pages - 1, device=device, generator=generator)
    tokens = torch.arange(setting.tokens, device=device)
    slots = order[tokens // setting.page_size] * setting.page_size + tokens % setting.page_size
    if setting.tokens <= 1000:  # timed cases write every token
        slots[2::5] = -1
        slots[0] = num_pages * setting.page_size - 1
    return slots


def case(setting: RotaryPagesCase) -> Case:
    reduction = setting.head_dim if setting.normed else 2
    return Case(setting.label, partial(make, setting), setting.dtype, reduction)


def with_pages(function: Callable[..., Tensor], **inputs: Any) -> tuple[Tensor, ...]:
    return with_what_changed(function, WHOLE, inputs["slots_T"], **inputs)


def launch(**inputs: Any) -> tuple[Tensor, ...]:
    from ridgeline.kernels.rotary_pages import triton

    return with_pages(triton.rotary_pages, **inputs)


def cost(
    qkv_TC: Tensor, angles: Angles | None, slots_T: Tensor, pages: Pages, norm: QKNorm | None = None
) -> OpCost:
    num_tokens, columns = qkv_TC.shape
    num_kv_heads, head_dim = pages.k_pages.shape[1], pages.k_pages.shape[3]
    angle_bytes = 2 * angles[0].nbytes if angles is not None else 0
    norm_bytes = 2 * norm.q_weight.nbytes if norm is not None else 0
    codes = holds_codes(pages.k_pages.dtype)
    head_bytes = head_dim * pages.k_pages.element_size() + (4 if codes else 0)
    q_bytes = num_tokens * (columns - 2 * num_kv_heads * head_dim) * qkv_TC.element_size()
    return OpCost(
        qkv_TC.nbytes + angle_bytes + norm_bytes + slots_T.nbytes,
        q_bytes + 2 * num_tokens * num_kv_heads * head_bytes,
    )


def eager(
    qkv_TC: Tensor, angles: Angles | None, slots_T: Tensor, pages: Pages, norm: QKNorm | None = None
) -> Tensor:
    """torch's own ops, in the order a model would call them; every token is written."""
    num_kv_heads, page_size, head_dim = pages.k_pages.shape[1:]
    heads = qkv_TC.unflatten(-1, (-1, head_dim))
    sizes = (heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads)
    q, k, v = heads.split(sizes, dim=1)
    if norm is not None:
        q = functional.rms_norm(q, (head_dim,), norm.q_weight, norm.eps)
        k = functional.rms_norm(k, (head_dim,), norm.k_weight, norm.eps)
    if angles is not None:
        q, k = rotate(q, *angles), rotate(k, *angles)
    page, place = slots_T // page_size, slots_T % page_size
    for held, scales, x in ((pages.k_pages, pages.k_scale, k), (pages.v_pages, pages.v_scale, v)):
        if scales is None:
            held[page, :, place] = x
            continue
        codes, row_scales = quantize_rows(x, held.dtype)
        held.view(torch.uint8)[page, :, place] = codes.view(torch.uint8)
        scales[page, :, place] = row_scales
    return q


SHAPES = [
    RotaryPagesCase(1, 1, 1, 64, page_size=16),
    RotaryPagesCase(63, 4, 2, 64, page_size=32),
    RotaryPagesCase(5, 6, 3, 80, page_size=256),
    RotaryPagesCase(7, 20, 10, 96, angles=36),
    RotaryPagesCase(9, 8, 1, 128, angles=32, page_size=128),
    RotaryPagesCase(3, 3, 3, 256, page_size=16),
    RotaryPagesCase(4, 4, 2, 64, angles=None),
    RotaryPagesCase(6, 4, 2, 12, page_size=16),
    RotaryPagesCase(11, 3, 1, 20, angles=5, page_size=32),
    RotaryPagesCase(5, 2, 2, 72),
    RotaryPagesCase(5, 2, 1, 33, angles=None),
]
SMALL = [
    case(replace(setting, dtype=dtype, page_dtype=page_dtype, normed=normed, gap=gap))
    for setting in SHAPES
    for dtype, page_dtype, normed, gap in [
        (FP32, FP32, False, 0),
        (BF16, BF16, True, 16),
        (BF16, FP8, True, 0),
        (FP16, INT8, False, 16),
    ]
] + [case(replace(SHAPES[1], page_dtype=FNUZ))]
LARGE = [
    case(replace(setting, dtype=dtype, page_dtype=page_dtype, normed=normed))
    for setting in [
        RotaryPagesCase(1000, 32, 8, 128, page_size=16),
        RotaryPagesCase(777, 64, 8, 128, page_size=256),
        RotaryPagesCase(1000, 40, 10, 80),
        RotaryPagesCase(1000, 4, 2, 12),
        RotaryPagesCase(300, 16, 2, 72),
        RotaryPagesCase(300, 16, 16, 256, angles=64),
    ]
    for dtype, page_dtype, normed in [
        (FP32, FP32, True),
        (BF16, BF16, False),
        (BF16, BF16, True),
        (FP16, FP16, True),
        (BF16, FP8, True),
        (BF16, INT8, False),
    ]
] + [  # past 2^31 elements
    case(RotaryPagesCase(3, 32, 8, 128, gap=1 << 30)),
    case(RotaryPagesCase(600, 32, 8, 128, page_dtype=INT8, page_size=256, spare_pages=9000)),
    case(RotaryPagesCase(600, 32, 8, 128, page_size=256, spare_pages=9000)),
]
BENCH = [
    case(replace(setting, page_dtype=page_dtype, normed=normed))
    for setting in [RotaryPagesCase(8192, 32, 8, 128), RotaryPagesCase(8192, 64, 8, 128)]
    for page_dtype, normed in [(BF16, False), (BF16, True), (FP8, True), (INT8, False)]
] + [
    case(RotaryPagesCase(16384, 32, 32, 80)),
    case(RotaryPagesCase(8192, 32, 8, 128, page_size=16)),
]
COMPILE = [
    case(setting)
    for setting in [
        RotaryPagesCase(4, 32, 8, 128),
        RotaryPagesCase(4, 32, 8, 128, normed=True),
        RotaryPagesCase(4, 32, 8, 128, page_dtype=INT8),
        RotaryPagesCase(4, 32, 8, 128, page_dtype=FP8, normed=True),
        RotaryPagesCase(4, 32, 8, 128, page_dtype=FNUZ, normed=True),
        RotaryPagesCase(4, 32, 32, 80, page_dtype=INT8),
        RotaryPagesCase(4, 32, 8, 96, angles=36, normed=True),
        RotaryPagesCase(4, 32, 8, 128, angles=32, page_dtype=FP8),
        RotaryPagesCase(4, 16, 8, 256, page_dtype=FP8, normed=True),
        RotaryPagesCase(4, 4, 2, 12, page_size=16),
        RotaryPagesCase(4, 6, 2, 20, page_dtype=INT8, normed=True),
    ]
]

OP = Op(
    name="rotary_pages",
    summary="q/k norm, rotary embedding, K and V into pages, as values or 8-bit codes",
    **functions(partial(with_pages, reference.rotary_pages), launch, cost, eager=eager),
    **case_lists(SMALL, LARGE, BENCH, COMPILE),
    supports=has_floats_of,
)
