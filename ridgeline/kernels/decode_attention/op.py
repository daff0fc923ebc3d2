"""What the registry knows of decode attention: its work, its shapes, what it is timed against."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ridgeline.kernels.attention.decode_run import DecodeRun
from ridgeline.kernels.attention.inputs import PagedCase, contiguous_pages, longest_first
from ridgeline.kernels.attention.reference import AttentionSpec
from ridgeline.kernels.cost import OpCost
from ridgeline.kernels.decode_attention import launched, reference, tune_key
from ridgeline.kernels.inputs import has_floats_of, label
from ridgeline.kernels.launch import target_of
from ridgeline.kernels.op import Case, ConfigSearch, Op, OpInputs, case_lists, functions
from ridgeline.kernels.pages import Pages, PageTables

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
INT8, FP8, FP8_AMD = torch.int8, torch.float8_e4m3fn, torch.float8_e4m3fnuz


def launch(run: DecodeRun, config: Any = None, **inputs: Any) -> Tensor:
    """The kernel that the public function would choose, or with `config` the tuner's."""
    return launched(**inputs, run=run._replace(config=config))


def launch_triton(**inputs: Any) -> Tensor:
    from ridgeline.kernels.decode_attention import triton

    return triton.decode_attention(**inputs)


def launch_cuda(defines: tuple[str, ...] = (), **inputs: Any) -> Tensor:
    """The kernel of cuda.cu, which takes sequences up as they come."""
    from ridgeline.kernels.decode_attention import cuda

    return cuda.decode_attention(**inputs, defines=defines)


def define(
    q_BNH: Tensor, pages: Pages, tables: PageTables, spec: AttentionSpec, **_: Any
) -> Tensor:
    """The reference, which no cut of the work may change."""
    return reference.decode_attention(q_BNH, pages, tables, spec)


@dataclass(frozen=True)
class DecodeCase(PagedCase):
    lengths: tuple[int, ...]
    split_tokens: int | None = None
    settled: bool = False
    ordered: bool = False  # the longest first

    @property
    def label(self) -> str:
        first, batch = self.lengths[0], len(self.lengths)
        same = all(length == first for length in self.lengths)
        return label(
            f"{batch}x{first}" if same else f"{batch} of {min(self.lengths)}-{max(self.lengths)}",
            self.shape_label(),
            self.split_tokens and f"split {self.split_tokens}",
            self.layout_label,
            self.settled and "settled",
            self.ordered and "ordered",
        )


def make(setting: DecodeCase, device: torch.device, generator: torch.Generator) -> OpInputs:
    inputs = setting.cache_of(setting.lengths, device, generator)
    inputs["q_BNH"] = setting.rows(len(setting.lengths), setting.heads[0], device, generator)
    inputs["spec"] = setting.spec
    inputs["run"] = DecodeRun(setting.split_tokens, setting.settled)
    if setting.ordered:
        inputs["tables"] = longest_first(inputs["tables"])
    return inputs


def case(setting: DecodeCase) -> Case:
    reduction = setting.head_dim + max(setting.lengths)
    return Case(setting.label, partial(make, setting), setting.dtype, reduction)


def cost(q_BNH: Tensor, pages: Pages, tables: PageTables, spec: AttentionSpec, **_: Any) -> OpCost:
    num_kv_heads, head_dim = pages.k_pages.shape[1], pages.k_pages.shape[3]
    window = spec.window if spec.window is not None else max(tables.lengths.tolist())
    num_tokens = int(tables.lengths.clamp(max=window).sum())
    token_bytes = head_dim * pages.k_pages.dtype.itemsize + (4 if pages.k_scale is not None else 0)
    read = 2 * num_tokens * num_kv_heads * token_bytes + q_BNH.numel() * q_BNH.dtype.itemsize
    flops = 4.0 * q_BNH.shape[1] * head_dim * num_tokens
    return OpCost(read, q_BNH.numel() * q_BNH.dtype.itemsize, flops, "bf16")


def sdpa(q_BNH: Tensor, pages: Pages, spec: AttentionSpec, **_: Any) -> Tensor:
    """torch's attention over contiguous K and V of as many tokens, without window or cap."""
    k, v = contiguous_pages(pages, q_BNH.shape[0], q_BNH.dtype)
    q = q_BNH.unsqueeze(2)
    out = functional.scaled_dot_product_attention(q, k, v, scale=spec.scale, enable_gqa=True)
    return out.squeeze(2)


def mixed_lengths(batch: int, shortest: int, longest: int) -> tuple[int, ...]:
    draw = random.Random(0)
    return tuple(draw.randint(shortest, longest) for _ in range(batch))


TINY = DecodeCase((70, 1, 33), heads=(4, 2), head_dim=64, page_size=16)
SMALL = [
    *(replace(TINY, dtype=dtype) for dtype in (FP32, BF16, FP16)),
    *(replace(TINY, dtype=d, cache=c) for d in (FP32, BF16, FP16) for c in (INT8, FP8)),
    replace(TINY, dtype=FP32, head_dim=80, heads=(3, 1), page_size=32, strided=True),
    replace(TINY, head_dim=96, heads=(2, 2), page_size=128, cache=INT8),
    replace(TINY, dtype=FP32, head_dim=128, heads=(7, 1), page_size=64, softcap=5.0),
    replace(TINY, dtype=FP16, head_dim=256, heads=(32, 1), page_size=256, strided=True),
    replace(TINY, dtype=FP32, lengths=(300, 0, 128, 129), split_tokens=128),
    replace(TINY, dtype=FP32, lengths=(1000, 63, 512), split_tokens=256, cache=FP8),
    replace(TINY, dtype=FP32, lengths=(600, 129, 7), split_tokens=128, window=150, page_size=256),
    replace(TINY, dtype=FP32, lengths=(600, 40), window=1, split_tokens=128, softcap=20.0),
    replace(TINY, lengths=(520, 300), window=257, split_tokens=128, head_dim=80, cache=FP8),
    replace(TINY, dtype=FP32, lengths=(0, 0)),
    replace(TINY, lengths=(5, 70, 0, 33), ordered=True),
    replace(TINY, dtype=FP32, head_dim=12, strided=True),
    replace(TINY, head_dim=12, heads=(16, 4), cache=FP8, lengths=(200, 33), split_tokens=128),
    replace(TINY, dtype=FP16, head_dim=20, heads=(3, 1), cache=INT8),
    replace(TINY, head_dim=72, lengths=(300, 129), split_tokens=128, window=150, softcap=5.0),
    replace(TINY, dtype=FP32, head_dim=33, lengths=(40, 7)),
]
HEADS_AND_PAGES = [
    *((64, 16), (80, 32), (96, 64), (128, 128), (256, 256), (128, 16)),
    *((12, 64), (20, 32), (72, 64), (250, 64)),
]
LARGE = [
    DecodeCase((4097, 1, 63, 1000, 0, 32768), dtype=dtype, window=window, softcap=softcap).over(
        head_dim, page_size, cache, strided=page_size == 32
    )
    for head_dim, page_size in HEADS_AND_PAGES
    for dtype, cache in [(BF16, None), (FP16, None), (BF16, FP8), (BF16, INT8), (FP16, INT8)]
    for window, softcap in [(None, None), (1000, 30.0)]
] + [
    DecodeCase((1000, 5000), settled=True),
    DecodeCase(mixed_lengths(100, 0, 900), ordered=True),
    DecodeCase((1000, 5000), spare_pages=40_000),  # past 2^31 elements
    DecodeCase((1000, 5000), spare_pages=20_000, page_size=128, cache=INT8),
]
BENCH = [
    *(
        DecodeCase((length,) * batch)
        for batch, length in [(1, 32768), (1, 4096), (8, 8192), (64, 1024), (64, 8192), (64, 32768)]
    ),
    *(DecodeCase((length,), settled=True) for length in (4096, 32768)),
    *(DecodeCase((1024,) * 256, page_size=page_size) for page_size in (16, 64, 256)),
    *(DecodeCase(mixed_lengths(256, 100, 2048), ordered=ordered) for ordered in (False, True)),
    *(
        DecodeCase((length,) * batch, cache=cache)
        for cache in (FP8, INT8)
        for batch, length in [(1, 32768), (64, 1024), (64, 8192)]
    ),
    DecodeCase((8192,) * 64, window=4096),
    DecodeCase((8192,) * 64, heads=(16, 8), head_dim=256, softcap=50.0),
]
COMPILE = [
    DecodeCase((1024,)).over(head_dim, page_size, cache)
    for head_dim, page_size, cache in [
        (128, 64, None),
        (128, 16, None),
        (128, 64, FP8),
        (128, 16, FP8_AMD),
        (128, 64, INT8),
        (80, 64, None),
        (72, 64, None),
        (12, 16, None),
        (20, 64, INT8),
        (256, 64, None),
        (256, 16, INT8),
    ]
] + [
    DecodeCase((1024,) * 100, ordered=True),
    DecodeCase((64,), window=32, softcap=30.0),
    DecodeCase((8192,), heads=(8, 2)),  # as many splits as a chunk of the merge holds
]


def search(
    q_BNH: Tensor, pages: Pages, tables: PageTables, run: DecodeRun, **_: Any
) -> ConfigSearch:
    """Triton's tiles, and where cuda.cu was built the cuts of its work: one list, so that the
    faster of the two is what the public function finds.
    """
    from ridgeline.kernels.decode_attention import cuda, triton

    key = tune_key(q_BNH, pages, tables, run.settled)
    target, dtype, head_dim = target_of(q_BNH), pages.k_pages.dtype, q_BNH.shape[2]
    configs: list[Any] = [triton.choose_tiles(head_dim, dtype, target)]
    if cuda.supported(q_BNH, pages):
        configs += cuda.cuts(head_dim, dtype, target)
    return ConfigSearch("decode_attention", key, configs)


OP = Op(
    name="decode_attention",
    summary="attention of one new token a sequence over a paged cache, split along the sequence",
    **functions(define, launch, cost, sdpa=sdpa),
    **case_lists(map(case, SMALL), map(case, LARGE), map(case, BENCH), map(case, COMPILE)),
    variants={
        "triton": launch_triton,
        "cuda": launch_cuda,
        "portable": partial(launch_cuda, defines=("RIDGELINE_PORTABLE",)),
    },
    search=search,
    supports=has_floats_of,
)
