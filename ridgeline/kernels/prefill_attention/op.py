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
from ridgeline.kernels.attention.inputs import contiguous_of_size, random_cache
from ridgeline.kernels.attention.reference import AttentionSpec
from ridgeline.kernels.cost import OpCost
from ridgeline.kernels.inputs import label, normal, strided_rows
from ridgeline.kernels.op import Case, Op, OpInputs
from ridgeline.kernels.prefill_attention import reference as definition
from ridgeline.kernels.prefill_attention import sdpa
from ridgeline.kernels.targets import Target

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
FIXED = ("split_tokens", "max_length", "apart", "order_B", "parts")  # what only fixed kernels take
INT8, FP8, FP8_AMD = torch.int8, torch.float8_e4m3fn, torch.float8_e4m3fnuz


def launch(**inputs: Any) -> Tensor:
    """Our own kernel, also where the public function would hand the work to cuDNN."""
    from ridgeline.kernels.deterministic_attention import decode as fixed_decode
    from ridgeline.kernels.deterministic_attention import triton as fixed
    from ridgeline.kernels.prefill_attention import triton

    if "order_B" in inputs:
        inputs["q_BNH"] = inputs.pop("q_TNH")
        skipped = ("starts", "max_new", "apart")
        return fixed_decode.decode_rows(**{k: v for k, v in inputs.items() if k not in skipped})
    if "split_tokens" in inputs:
        return fixed.prefill_attention(**inputs)
    if "k_TKH" in inputs:
        return triton.prompt_attention(**inputs)
    return triton.prefill_attention(**inputs)


def reference(**inputs: Any) -> Tensor:
    inputs = {name: value for name, value in inputs.items() if name not in FIXED}
    if "k_TKH" in inputs:
        return definition.prompt_attention(**inputs)
    return definition.prefill_attention(**inputs)


@dataclass(frozen=True)
class PrefillCase:
    """One case: the sequences, the heads, the cache."""

    new: tuple[int, ...]  # new tokens of each sequence
    before: tuple[int, ...] | None = None  # tokens in the pages before them; None: no pages
    heads: tuple[int, int] = (32, 8)  # query heads, KV heads
    head_dim: int = 128
    page_size: int = 64
    dtype: torch.dtype = BF16
    cache: torch.dtype | None = None  # None: the queries' dtype
    window: int | None = None
    softcap: float | None = None
    strided: bool = False
    spare_pages: int = 3
    split: int | None = None  # fixed.py's, with this many keys a split
    apart: bool | None = None
    parts: int | None = None  # fixed_decode.py's, with this many programs for a row's splits

    @property
    def label(self) -> str:
        return label(
            _sizes(self.new),
            self.before and f"after {_sizes(self.before)}",
            f"{self.heads[0]}/{self.heads[1]}x{self.head_dim}",
            self.before and f"page {self.page_size}",
            self.dtype,
            self.cache and f"cache {label(self.cache)}",
            self.window and f"window {self.window}",
            self.softcap and f"cap {self.softcap:g}",
            self.strided and "strided",
            self.spare_pages > 3 and "far pages",
            self.split and f"split {self.split}",
            self.apart is not None and ("apart" if self.apart else "together"),
            self.parts is not None and f"in order, {self.parts or 'some'} parts",
        )


def _sizes(numbers: tuple[int, ...]) -> str:
    if len(set(numbers)) == 1 and len(numbers) > 1:
        return f"{len(numbers)}x{numbers[0]}"
    return "+".join(map(str, numbers))


def make(setting: PrefillCase, device: torch.device, generator: torch.Generator) -> OpInputs:
    num_heads, num_kv_heads = setting.heads

    def packed(heads: int) -> Tensor:
        shape = (sum(setting.new), heads * setting.head_dim)
        x = normal(shape, setting.dtype, device, generator)
        x = strided_rows(x, gap=setting.head_dim) if setting.strided else x
        return x.view(shape[0], heads, setting.head_dim)

    starts = torch.tensor([0, *accumulate(setting.new)], dtype=torch.int32, device=device)
    inputs: OpInputs = {
        "q_TNH": packed(num_heads),
        "starts": starts,
        "spec": AttentionSpec(setting.head_dim**-0.5, setting.window, setting.softcap),
        "max_new": max(setting.new),
    }
    if setting.split is not None:
        inputs |= {"split_tokens": setting.split, "apart": setting.apart}
        if setting.before is not None and max(setting.new) <= 8:
            inputs["max_length"] = max(map(sum, zip(setting.new, setting.before, strict=True)))
    if setting.parts is not None:
        order = torch.randperm(len(setting.new), device=device, generator=generator)
        inputs |= {"order_B": order.int(), "parts": setting.parts or None}
    if setting.before is None:
        return inputs | {"k_TKH": packed(num_kv_heads), "v_TKH": packed(num_kv_heads)}
    return inputs | random_cache(
        [new + before for new, before in zip(setting.new, setting.before, strict=True)],
        num_kv_heads,
        setting.head_dim,
        setting.page_size,
        setting.cache or setting.dtype,
        device,
        generator,
        setting.spare_pages,
    )


def case(setting: PrefillCase) -> Case:
    longest = max(n + b for n, b in zip(setting.new, setting.before or setting.new, strict=True))
    return Case(setting.label, partial(make, setting), setting.dtype, setting.head_dim + longest)


def setting_of(case: Case) -> PrefillCase:
    assert isinstance(case.make, partial)
    setting = case.make.args[0]
    assert isinstance(setting, PrefillCase)
    return setting


def supports(target: Target, case: Case) -> bool:
    """An fp8 cache is the target's own kind of fp8, or none."""
    cache = setting_of(case).cache
    return cache not in (FP8, FP8_AMD) or cache == target.fp8


def cost(
    q_TNH: Tensor,
    starts: Tensor,
    spec: AttentionSpec,
    k_TKH: Tensor | None = None,
    k_pages_PKSH: Tensor | None = None,
    lengths_B: Tensor | None = None,
    k_scale_PKS: Tensor | None = None,
    **_: Any,
) -> OpCost:
    """Pairs are those of a query and a key it sees; a key that any query sees is read once."""
    keys = k_TKH if k_TKH is not None else k_pages_PKSH
    assert keys is not None
    num_kv_heads, head_dim = keys.shape[1], keys.shape[-1]
    new = starts.diff().tolist()
    lengths = new if lengths_B is None else lengths_B.tolist()
    num_pairs = num_keys = 0
    for count, length in zip(new, lengths, strict=True):
        window = min(spec.window or length, length)
        full = min(max(length - window, 0), count)  # queries that see a whole window
        rest = count - full  # those see 1 + position: the window is not full yet
        first = length - count
        num_pairs += full * window + rest * (first + 1) + rest * (rest - 1) // 2
        num_keys += min(length, window + count - 1) if count else 0
    token_bytes = head_dim * keys.dtype.itemsize + (4 if k_scale_PKS is not None else 0)
    size = q_TNH.numel() * q_TNH.dtype.itemsize
    flops = 4.0 * q_TNH.shape[1] * head_dim * num_pairs
    return OpCost(size + 2 * num_keys * num_kv_heads * token_bytes, size, flops, "bf16")


def torch_attention(
    backend: Literal["cudnn", "flash"],
    q_TNH: Tensor,
    starts: Tensor,
    spec: AttentionSpec,
    k_TKH: Tensor | None = None,
    v_TKH: Tensor | None = None,
    k_pages_PKSH: Tensor | None = None,
    v_pages_PKSH: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """torch's attention without pages, window or cap, prompts taken as of equal length. Over a
    prefix every query sees every key, which torch's kernels do faster than a shifted triangle.
    """
    num_sequences = starts.shape[0] - 1
    num_rows = q_TNH.shape[0] // num_sequences * num_sequences
    q_TNH = q_TNH[:num_rows]
    if k_TKH is not None and v_TKH is not None:
        k_TKH, v_TKH = k_TKH[:num_rows], v_TKH[:num_rows]
        return sdpa.equal_prompts(q_TNH, k_TKH, v_TKH, num_sequences, spec, backend)
    assert k_pages_PKSH is not None
    assert v_pages_PKSH is not None
    k = contiguous_of_size(k_pages_PKSH, num_sequences, q_TNH.dtype)
    v = contiguous_of_size(v_pages_PKSH, num_sequences, q_TNH.dtype)
    q = q_TNH.unflatten(0, (num_sequences, -1)).transpose(1, 2)
    with sdpa_kernel(sdpa.BACKENDS[backend]):
        return functional.scaled_dot_product_attention(q, k, v, scale=spec.scale, enable_gqa=True)


def varlen(
    q_TNH: Tensor,
    starts: Tensor,
    spec: AttentionSpec,
    max_new: int,
    k_TKH: Tensor | None = None,
    v_TKH: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """torch's packed attention of fresh prompts, without window or cap."""
    if k_TKH is None or v_TKH is None:
        raise UnsupportedError("varlen_attn takes no pages")
    return sdpa.any_prompts(q_TNH, k_TKH, v_TKH, starts, spec, max_new)


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
    *(
        replace(PAGED, dtype=dtype, new=(40, 3), before=(100, 190), split=64, apart=apart, **more)
        for apart in (False, True)
        for dtype, more in (
            (FP32, {"window": 70}),
            (BF16, {"cache": INT8}),
            (FP16, {"head_dim": 80, "softcap": 5.0}),
        )
    ),
    replace(PAGED, dtype=BF16, new=(1, 1, 1), before=(300, 0, 63), split=64),
    *(
        replace(PAGED, new=(1, 1, 1), before=(300, 0, 63), split=64, parts=parts, **more)
        for parts, more in (
            (0, {"dtype": BF16}),
            (1, {"dtype": FP32, "window": 70}),
            (2, {"dtype": BF16, "cache": INT8, "strided": True}),
            (9, {"dtype": FP16, "head_dim": 80, "heads": (3, 1), "softcap": 5.0}),
        )
    ),
    replace(PAGED, dtype=BF16, new=(1, 1), before=(40, 0), split=64, parts=0),
    replace(TINY, dtype=FP32, head_dim=12, strided=True),
    replace(TINY, head_dim=20, heads=(3, 1)),
    replace(TINY, dtype=FP32, head_dim=33, new=(40, 7)),
    replace(PAGED, dtype=FP32, head_dim=12),
    replace(PAGED, dtype=FP16, head_dim=20, heads=(3, 1), cache=INT8),
    replace(PAGED, head_dim=72, cache=FP8, window=30),
    *(
        replace(PAGED, dtype=d, head_dim=h, new=(40, 3), before=(100, 190), split=64, apart=apart)
        for apart in (False, True)
        for d, h in ((FP32, 12), (BF16, 72))
    ),
]
HEADS_AND_PAGES = [
    *((64, 16), (80, 32), (96, 64), (128, 128), (256, 256), (128, 16)),
    *((12, 64), (20, 32), (72, 64), (250, 64)),
]
LARGE = [
    replace(
        PrefillCase((1000, 1, 63, 2048), before=before),
        head_dim=head_dim,
        page_size=page_size,
        dtype=dtype,
        cache=cache,
        window=window,
        softcap=softcap,
        strided=page_size == 32,
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
    *(
        PrefillCase(new, before=before, window=window, cache=cache, split=512)
        for new, before in (((1000, 1, 63), (0, 3000, 1500)), ((1,) * 5, (0, 511, 512, 3000, 7000)))
        for window, cache in ((None, None), (500, None), (None, FP8), (None, INT8))
    ),
    *(
        PrefillCase(
            (1,) * 5, (0, 511, 512, 3000, 7000), window=window, cache=cache, split=512, parts=2
        )
        for window, cache in ((None, None), (500, None), (None, FP8), (None, INT8))
    ),
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
    PrefillCase((2048,) * 4, before=(0,) * 4, split=512),
    PrefillCase((2048,), before=(8192,), split=512),
    *(PrefillCase((1,) * batch, before=(1023,) * batch, split=512) for batch in (1, 64, 256)),
    PrefillCase((1,), before=(8191,), split=512),
    *(
        PrefillCase((1,) * batch, before=(1023,) * batch, split=512, parts=parts)
        for batch, parts in ((1, 0), (64, 0), (256, 0), (256, 1))
    ),
]
COMPILE = [
    replace(
        PrefillCase((256, 2)), before=before, head_dim=head_dim, page_size=page_size, cache=cache
    )
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
    *(
        PrefillCase(
            new, before=(900,) * len(new), head_dim=head_dim, split=512, apart=apart, **more
        )
        for new, apart in (((256,), False), ((1, 1), True))
        for head_dim, more in (
            (128, {}),
            (64, {"cache": INT8}),
            (20, {}),
            (256, {"window": 300}),
            (128, {"window": 300, "cache": FP8}),
        )
    ),
    *(
        PrefillCase((1, 1), before=(before,) * 2, head_dim=head_dim, split=512, parts=2, **more)
        for before, head_dim, more in (
            (900, 128, {}),
            (300, 128, {}),
            (900, 64, {"cache": INT8}),
            (900, 256, {"window": 700}),
            (900, 128, {"window": 700, "cache": FP8}),
        )
    ),
]

OP = Op(
    name="prefill_attention",
    summary="attention of packed prompts, or chunks of prompts over a paged prefix",
    reference=reference,
    launch=launch,
    cost=cost,
    small_cases=[case(setting) for setting in SMALL],
    cases=[case(setting) for setting in SMALL + LARGE],
    bench_cases=[case(setting) for setting in BENCH],
    compile_cases=[case(setting) for setting in COMPILE],
    baselines={
        "sdpa_cudnn": partial(torch_attention, "cudnn"),
        "sdpa_flash": partial(torch_attention, "flash"),
        "varlen": varlen,
    },
    supports=supports,
)
