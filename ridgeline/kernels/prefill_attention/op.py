"""What the registry knows of prefill attention: its work, its shapes, what it is timed against.

A case has packed K and V (fresh prompts) or pages; `launch` and `reference` take either.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import sdpa_kernel

from ridgeline.errors import UnsupportedError
from ridgeline.kernels.attention.inputs import PagedCase, contiguous_pages
from ridgeline.kernels.attention.reference import AttentionSpec
from ridgeline.kernels.cost import OpCost
from ridgeline.kernels.inputs import has_floats_of, label
from ridgeline.kernels.op import Case, Op, OpInputs, case_lists
from ridgeline.kernels.pages import Pages, PageTables, holds_codes
from ridgeline.kernels.prefill_attention import reference as definition
from ridgeline.kernels.prefill_attention import sdpa
from ridgeline.kernels.prefill_attention.reference import Packing

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
INT8, FP8, FP8_AMD = torch.int8, torch.float8_e4m3fn, torch.float8_e4m3fnuz


def launch(**inputs: Any) -> Tensor:
    """Our own kernel, also where the public function would hand the work to cuDNN."""
    from ridgeline.kernels.prefill_attention import triton

    if "k_TKH" in inputs:
        return triton.prompt_attention(**inputs)
    return triton.prefill_attention(**inputs)


def reference(**inputs: Any) -> Tensor:
    if "k_TKH" in inputs:
        return definition.prompt_attention(**inputs)
    return definition.prefill_attention(**inputs)


@dataclass(frozen=True)
class PrefillCase(PagedCase):
    new: tuple[int, ...]  # new tokens of each sequence
    before: tuple[int, ...] | None = None  # tokens in the pages before them; None: no pages

    @property
    def label(self) -> str:
        return label(
            _sizes(self.new),
            self.before and f"after {_sizes(self.before)}",
            self.shape_label(paged=self.before is not None),
            self.layout_label,
        )

    @property
    def lengths(self) -> tuple[int, ...]:
        before = self.before or (0,) * len(self.new)
        return tuple(map(sum, zip(self.new, before, strict=True)))


def _sizes(numbers: tuple[int, ...]) -> str:
    if len(set(numbers)) == 1 and len(numbers) > 1:
        return f"{len(numbers)}x{numbers[0]}"
    return "+".join(map(str, numbers))


def make(setting: PrefillCase, device: torch.device, generator: torch.Generator) -> OpInputs:
    num_heads, num_kv_heads = setting.heads
    packed = partial(setting.rows, sum(setting.new), device=device, generator=generator)
    starts = torch.tensor([0, *accumulate(setting.new)], dtype=torch.int32, device=device)
    inputs: OpInputs = {
        "q_TNH": packed(num_heads),
        "packing": Packing(starts, max(setting.new)),
        "spec": setting.spec,
    }
    if setting.before is None:
        return inputs | {"k_TKH": packed(num_kv_heads), "v_TKH": packed(num_kv_heads)}
    return inputs | setting.cache_of(setting.lengths, device, generator)


def case(setting: PrefillCase) -> Case:
    longest = max(n + b for n, b in zip(setting.new, setting.before or setting.new, strict=True))
    return Case(setting.label, partial(make, setting), setting.dtype, setting.head_dim + longest)


def cost(
    q_TNH: Tensor,
    packing: Packing,
    spec: AttentionSpec,
    k_TKH: Tensor | None = None,
    pages: Pages | None = None,
    tables: PageTables | None = None,
    **_: Any,
) -> OpCost:
    """Pairs are those of a query and a key it sees; a key that any query sees is read once."""
    keys = k_TKH if k_TKH is not None else pages and pages.k_pages
    assert keys is not None
    num_kv_heads, head_dim = keys.shape[1], keys.shape[-1]
    new = packing.starts.diff().tolist()
    lengths = new if tables is None else tables.lengths.tolist()
    num_pairs = num_keys = 0
    for count, length in zip(new, lengths, strict=True):
        window = min(spec.window or length, length)
        full = min(max(length - window, 0), count)  # queries that see a whole window
        rest = count - full  # those see 1 + position: the window is not full yet
        first = length - count
        num_pairs += full * window + rest * (first + 1) + rest * (rest - 1) // 2
        num_keys += min(length, window + count - 1) if count else 0
    token_bytes = head_dim * keys.dtype.itemsize + (4 if holds_codes(keys.dtype) else 0)
    size = q_TNH.numel() * q_TNH.dtype.itemsize
    flops = 4.0 * q_TNH.shape[1] * head_dim * num_pairs
    return OpCost(size + 2 * num_keys * num_kv_heads * token_bytes, size, flops, "bf16")


def torch_attention(
    backend: Literal["cudnn", "flash"],
    q_TNH: Tensor,
    packing: Packing,
    spec: AttentionSpec,
    k_TKH: Tensor | None = None,
    v_TKH: Tensor | None = None,
    pages: Pages | None = None,
    **_: Any,
) -> Tensor:
    """torch's attention without pages, window or cap, prompts taken as of equal length. Over a
    prefix every query sees every key, which torch's kernels do faster than a shifted triangle.
    """
    num_sequences = packing.num_sequences
    num_rows = q_TNH.shape[0] // num_sequences * num_sequences
    q_TNH = q_TNH[:num_rows]
    if k_TKH is not None and v_TKH is not None:
        k_TKH, v_TKH = k_TKH[:num_rows], v_TKH[:num_rows]
        return sdpa.equal_prompts(q_TNH, k_TKH, v_TKH, num_sequences, spec, backend)
    assert pages is not None
    k, v = contiguous_pages(pages, num_sequences, q_TNH.dtype)
    q = q_TNH.unflatten(0, (num_sequences, -1)).transpose(1, 2)
    with sdpa_kernel(sdpa.BACKENDS[backend]):
        return functional.scaled_dot_product_attention(q, k, v, scale=spec.scale, enable_gqa=True)


def varlen(
    q_TNH: Tensor,
    packing: Packing,
    spec: AttentionSpec,
    k_TKH: Tensor | None = None,
    v_TKH: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """torch's packed attention of fresh prompts, without window or cap."""
    if k_TKH is None or v_TKH is None:
        raise UnsupportedError("varlen_attn takes no pages")
    return sdpa.any_prompts(q_TNH, k_TKH, v_TKH, packing, spec)


TINY = PrefillCase((20, 1, 33), heads=(4, 2), head_dim=64)
PAGED = replace(TINY, before=(50, 70, 0), page_size=16)
SMALL = [
    *(replace(TINY, dtype=dtype) for dtype in (FP32, BF16, FP16)),
    *(replace(PAGED, dtype=dtype) for dtype in (FP32, BF16, FP16)),
    *(replace(PAGED, dtype=d, cache=c) for d in (FP32, BF16, FP16) for c in (INT8, FP8)),
    replace(TINY, dtype=FP32, head_dim=80, heads=(3, 1), strided=True, new=(1, 100)),
    replace(TINY, dtype=FP32, new=(0, 7, 0, 70, 0), window=5),
    replace(TINY, dtype=FP32, new=(150,), window=40, softcap=5.0),
    replace(TINY, dtype=FP32, new=(130, 3), window=1),
    replace(TINY, dtype=FP32, new=(1,) * 9),
    replace(PAGED, dtype=FP32, head_dim=96, heads=(2, 2), page_size=128, strided=True),
    replace(PAGED, dtype=FP32, head_dim=128, heads=(7, 1), page_size=64, softcap=5.0),
    replace(PAGED, dtype=FP16, head_dim=256, heads=(16, 1), page_size=256, cache=INT8),
    replace(PAGED, dtype=FP32, new=(65, 4), before=(200, 90), window=70, page_size=32),
    replace(PAGED, new=(65, 4), before=(200, 90), window=150, head_dim=80, cache=FP8),
    replace(TINY, dtype=FP32, head_dim=12, strided=True),
    replace(TINY, head_dim=20, heads=(3, 1)),
    replace(TINY, dtype=FP32, head_dim=33, new=(40, 7)),
    replace(PAGED, dtype=FP32, head_dim=12),
    replace(PAGED, dtype=FP16, head_dim=20, heads=(3, 1), cache=INT8),
    replace(PAGED, head_dim=72, cache=FP8, window=30),
]
HEADS_AND_PAGES = [
    *((64, 16), (80, 32), (96, 64), (128, 128), (256, 256), (128, 16)),
    *((12, 64), (20, 32), (72, 64), (250, 64)),
]
LARGE = [
    PrefillCase((1000, 1, 63, 2048), before, dtype=dtype, window=window, softcap=softcap).over(
        head_dim, page_size, cache, strided=page_size == 32
    )
    for head_dim, page_size in HEADS_AND_PAGES
    for before, dtype, cache in [
        (None, BF16, None),
        (None, FP16, None),
        ((0, 3000, 64, 1000), BF16, None),
        ((0, 3000, 64, 1000), BF16, FP8),
        ((0, 3000, 64, 1000), FP16, INT8),
    ]
    for window, softcap in [(None, None), (500, 30.0)]
] + [
    PrefillCase((1000, 500), before=(100, 500), spare_pages=40_000),  # past 2^31 elements
    PrefillCase((4096,), heads=(64, 1), head_dim=64, strided=True),
]
BENCH = [
    *(PrefillCase((length,)) for length in (2048, 4096, 8192, 16384)),
    PrefillCase((2048,) * 16),
    PrefillCase((1024,) * 8, heads=(32, 8), head_dim=64),
    PrefillCase((2048,) * 8, before=(0,) * 8),
    *(PrefillCase((2048,), before=(before,)) for before in (8192, 30720)),
    PrefillCase((2048,), before=(8192,), page_size=16),
    PrefillCase((2048,), before=(8192,), cache=FP8),
    PrefillCase((8,) * 32, before=(2048,) * 32),
    PrefillCase((8192,), window=1024),
    PrefillCase((4096,), heads=(16, 8), head_dim=256, softcap=50.0),
]
COMPILE = [
    PrefillCase((256, 2), before).over(head_dim, page_size, cache)
    for before, head_dim, page_size, cache in [
        (None, 128, 64, None),
        (None, 64, 64, None),
        (None, 80, 64, None),
        (None, 72, 64, None),
        (None, 12, 64, None),
        (None, 256, 64, None),
        ((64, 9), 128, 64, None),
        ((64, 9), 128, 16, None),
        ((64, 9), 128, 64, FP8),
        ((64, 9), 128, 16, FP8_AMD),
        ((64, 9), 128, 64, INT8),
        ((64, 9), 256, 16, INT8),
        ((64, 9), 20, 64, None),
        ((64, 9), 12, 16, INT8),
    ]
] + [
    PrefillCase((256,), window=32, softcap=30.0),
    PrefillCase((256,), before=(64,), window=32, head_dim=256),
    PrefillCase((4,), before=(64,)),
]

OP = Op(
    name="prefill_attention",
    summary="attention of packed prompts, or chunks of prompts over a paged prefix",
    reference=reference,
    launch=launch,
    cost=cost,
    **case_lists(map(case, SMALL), map(case, LARGE), map(case, BENCH), map(case, COMPILE)),
    baselines={
        "sdpa_cudnn": partial(torch_attention, "cudnn"),
        "sdpa_flash": partial(torch_attention, "flash"),
        "varlen": varlen,
    },
    supports=has_floats_of,
)
