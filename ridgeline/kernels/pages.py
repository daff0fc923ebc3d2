"""Where K and V of past tokens lie: pages of the KV cache. The one place that states the layout.

Letters: P pages, K KV heads, S tokens a page, H head dim.

- Keys and values are two tensors, `k_pages_PKSH` and `v_pages_PKSH`, each contiguous. Heads come
  before places, so that what attention reads for one head of one page is S·H numbers in a row: one
  block to load, and no stride over other heads.
- A token's *slot* is `page · S + place`. A sequence is a list of pages (its page table): its token
  i lies in page `page_table[i // S]` at place `i % S`. A negative slot means "do not write".
- Pages hold bf16, fp16 or fp32 as they are, or 8-bit codes (int8, fp8). Codes always come with
  their fp32 scales, one for each token and head: `k_scale_PKS` and `v_scale_PKS`, where
  `value = code · scale` (formats/scaling.py). There is no scale that may be left out.

    pages = make_pages(1024, 64, 8, 128, torch.bfloat16, device)
    k_LKH = gather_tokens(pages.k_pages, page_table, length, pages.k_scale)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.errors import UnsupportedError
from ridgeline.formats.scaling import LARGEST, quantize_rows

PAGE_SIZES = (16, 32, 64, 128, 256)  # powers of two, so that a slot splits with a shift and a mask


class Pages(NamedTuple):
    """The pages of one layer."""

    k_pages: Tensor  # [P, K, S, H]
    v_pages: Tensor
    k_scale: Tensor | None  # [P, K, S], fp32; None when the pages hold values, not codes
    v_scale: Tensor | None

    def tensors(self) -> list[Tensor]:
        """Those that there are."""
        return [tensor for tensor in self if tensor is not None]


class PageTables(NamedTuple):
    """Which pages each of B sequences has, and how many tokens lie in them. The last two fields
    change how much work a kernel does, not its result.
    """

    page_table: Tensor  # [B, M], int32; entries past a sequence's end may hold anything
    lengths: Tensor  # [B], int32
    max_length: int | None = None  # tokens; no sequence has more
    order: Tensor | None = None  # [B], int32: in which order to take them up, the longest first

    def longest(self, page_size: int) -> int:
        """Tokens; known without reading the lengths, so that a captured graph serves any."""
        capacity = self.page_table.shape[1] * page_size
        return max(1, capacity if self.max_length is None else min(capacity, self.max_length))


def make_pages(
    num_pages: int,
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Pages:
    """Fresh pages of zeros: one that is read before it is written does no harm."""
    check_page_size(page_size)
    shape = (num_pages, num_kv_heads, page_size, head_dim)
    k_pages, v_pages = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
    if not holds_codes(dtype):
        return Pages(k_pages, v_pages, None, None)
    k_scale, v_scale = (torch.zeros(shape[:3], device=device) for _ in range(2))
    return Pages(k_pages, v_pages, k_scale, v_scale)


def check_page_size(page_size: int) -> None:
    if page_size not in PAGE_SIZES:
        allowed = ", ".join(map(str, PAGE_SIZES))
        raise UnsupportedError(f"page_size={page_size} is not one of {allowed}")


def check_pages(pages: Pages) -> None:
    """What kernels over pages rely on and cannot see."""
    k_pages, v_pages, k_scale, v_scale = pages
    check_page_size(k_pages.shape[2])
    assert k_pages.shape == v_pages.shape, "K and V pages differ in shape"
    assert k_pages.dtype == v_pages.dtype, "K and V pages differ in dtype"
    _check_scales(k_pages, k_scale)
    _check_scales(v_pages, v_scale)
    if not all(tensor.is_contiguous() for tensor in pages.tensors()):
        raise ValueError("pages and their scales are contiguous; a view of some was given")


def holds_codes(dtype: torch.dtype) -> bool:
    """Whether pages of this dtype hold 8-bit codes, and so have scales."""
    return dtype in LARGEST


def gather_tokens(
    pages_PKSH: Tensor, page_table: Tensor, length: int, scales: Tensor | None = None
) -> Tensor:
    """The first `length` tokens of the sequence with this page table, as fp32 [length, K, H]."""
    _check_scales(pages_PKSH, scales)
    tokens = torch.arange(length, device=pages_PKSH.device)
    page_size = pages_PKSH.shape[2]
    pages, places = page_table[tokens // page_size].long(), tokens % page_size
    values = pages_PKSH[pages, :, places].float()
    return values if scales is None else values * scales[pages, :, places].unsqueeze(-1)


def write_tokens(
    pages_PKSH: Tensor, slots_T: Tensor, values_TKH: Tensor, scales: Tensor | None = None
) -> None:
    """Put each token's fp32 values in its slot, as codes where the pages hold codes. In place."""
    _check_scales(pages_PKSH, scales)
    kept = slots_T >= 0
    slots, values = slots_T[kept].long(), values_TKH[kept]
    pages, places = slots // pages_PKSH.shape[2], slots % pages_PKSH.shape[2]
    if scales is None:
        pages_PKSH[pages, :, places] = values.to(pages_PKSH.dtype)
        return
    codes, row_scales = quantize_rows(values, pages_PKSH.dtype)
    # Bytes, because torch does not index-put every 8-bit float.
    pages_PKSH.view(torch.uint8)[pages, :, places] = codes.view(torch.uint8)
    scales[pages, :, places] = row_scales


def _check_scales(pages_PKSH: Tensor, scales: Tensor | None) -> None:
    if holds_codes(pages_PKSH.dtype) != (scales is not None):
        wanted = "need" if scales is None else "have no"
        raise ValueError(f"pages of {pages_PKSH.dtype} {wanted} scales")
