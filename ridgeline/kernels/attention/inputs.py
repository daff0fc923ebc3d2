"""What the cases of the attention ops share: their heads, pages and scores, and random caches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from ridgeline.formats.scaling import quantize_rows
from ridgeline.kernels.attention.reference import AttentionSpec
from ridgeline.kernels.inputs import label, normal, strided_rows
from ridgeline.kernels.op import OpInputs
from ridgeline.kernels.pages import Pages, PageTables, holds_codes

BF16 = torch.bfloat16
NO_PAGE = 2**30  # an entry past a sequence's end: reading through it would fault


@dataclass(frozen=True, kw_only=True)
class PagedCase:
    """One case: the heads, the cache, the scores; an op's own adds the sequences."""

    heads: tuple[int, int] = (32, 8)  # query heads, KV heads
    head_dim: int = 128
    page_size: int = 64
    dtype: torch.dtype = BF16
    cache: torch.dtype | None = None  # None: the queries' dtype
    window: int | None = None
    softcap: float | None = None
    strided: bool = False
    spare_pages: int = 3

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(self.head_dim**-0.5, self.window, self.softcap)

    def shape_label(self, paged: bool = True) -> str:
        return label(
            f"{self.heads[0]}/{self.heads[1]}x{self.head_dim}",
            paged and f"page {self.page_size}",
            self.dtype,
            self.cache and f"cache {label(self.cache)}",
            self.window and f"window {self.window}",
            self.softcap and f"cap {self.softcap:g}",
        )

    def over(
        self, head_dim: int, page_size: int, cache: torch.dtype | None, strided: bool = False
    ) -> Self:
        """The same over heads and pages of these sizes."""
        sized = replace(self, head_dim=head_dim, page_size=page_size)
        return replace(sized, cache=cache, strided=strided)

    @property
    def layout_label(self) -> str:
        return label(self.strided and "strided", self.spare_pages > 3 and "far pages")

    def rows(
        self, num_rows: int, num_heads: int, device: torch.device, generator: torch.Generator
    ) -> Tensor:
        """Heads of as many tokens, [T, num_heads, H]; with `strided` the rows apart."""
        x = normal((num_rows, num_heads * self.head_dim), self.dtype, device, generator)
        x = strided_rows(x, gap=2 * self.heads[1] * self.head_dim) if self.strided else x
        return x.unflatten(1, (num_heads, self.head_dim))

    def cache_of(
        self, lengths: Sequence[int], device: torch.device, generator: torch.Generator
    ) -> OpInputs:
        return random_cache(
            lengths,
            self.heads[1],
            self.head_dim,
            self.page_size,
            self.cache or self.dtype,
            device,
            generator,
            self.spare_pages,
        )


def random_cache(
    lengths: Sequence[int],
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
    spare_pages: int = 3,
) -> OpInputs:
    """`pages` in random order, and `tables` of the sequences' pages and lengths; NaN in every
    place that holds no token.
    """
    counts = [-(-length // page_size) for length in lengths]
    num_pages = sum(counts) + spare_pages
    order = torch.randperm(num_pages, device=device, generator=generator).int()
    table_BM = torch.full((len(lengths), max(*counts, 1)), NO_PAGE, dtype=torch.int32)
    table_BM = table_BM.to(device)
    holds_token = torch.zeros(num_pages, page_size, dtype=torch.bool, device=device)
    taken = 0
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        pages = order[num_pages - taken - count : num_pages - taken].flip(0)
        table_BM[row, :count] = pages
        tokens = torch.arange(length, device=device)
        holds_token[pages[tokens // page_size].long(), tokens % page_size] = True
        taken += count
    empty = ~holds_token[:, None, :]
    shape = (num_pages, num_kv_heads, page_size, head_dim)

    def filled() -> tuple[Tensor, Tensor | None]:
        values = normal(shape, torch.float32 if holds_codes(dtype) else dtype, device, generator)
        if not holds_codes(dtype):
            return values.masked_fill_(empty.unsqueeze(-1), float("nan")), None
        codes, scale = quantize_rows(values, dtype)
        return codes, scale.masked_fill_(empty, float("nan"))

    (k_pages, k_scale), (v_pages, v_scale) = filled(), filled()
    lengths_B = torch.tensor(list(lengths), dtype=torch.int32, device=device)
    return {
        "pages": Pages(k_pages, v_pages, k_scale, v_scale),
        "tables": PageTables(table_BM, lengths_B),
    }


def newest_slots(tables: PageTables, page_size: int) -> Tensor:
    """Where each sequence's newest token lies; -1 where the length is zero."""
    newest = tables.lengths.long() - 1
    pages = tables.page_table.gather(1, (newest.clamp(min=0) // page_size).unsqueeze(1))
    slots = pages.squeeze(1).long() * page_size + newest % page_size
    return torch.where(newest >= 0, slots, -1).int()


def rows_of(inputs: OpInputs, queries: str, rows: slice) -> OpInputs:
    """Some of the sequences: their rows of the inputs of that name, their pages and lengths."""
    return {queries: inputs[queries][rows], "tables": sequences_of(inputs["tables"], rows)}


def sequences_of(tables: PageTables, rows: slice) -> PageTables:
    return tables._replace(page_table=tables.page_table[rows], lengths=tables.lengths[rows])


def longest_first(tables: PageTables) -> PageTables:
    return tables._replace(order=tables.lengths.argsort(descending=True).int())


def contiguous_of_size(pages_PKSH: Tensor, batch: int, dtype: torch.dtype) -> Tensor:
    """As many tokens as the pages hold, as [B, K, tokens, H] for a kernel that knows no pages: the
    same memory seen another way, so that no copy is timed. torch's attention takes no 8-bit codes:
    for them it is memory of `dtype` that holds anything.
    """
    num_pages, num_kv_heads, page_size, head_dim = pages_PKSH.shape
    shape = (batch, num_kv_heads, num_pages * page_size // batch, head_dim)
    if holds_codes(pages_PKSH.dtype):
        return torch.empty(shape, dtype=dtype, device=pages_PKSH.device)
    return pages_PKSH.flatten()[: math.prod(shape)].view(shape)


def contiguous_pages(pages: Pages, batch: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`contiguous_of_size` of K and of V."""
    k = contiguous_of_size(pages.k_pages, batch, dtype)
    return k, contiguous_of_size(pages.v_pages, batch, dtype)


def with_what_changed(
    function: Callable[..., Tensor], whole: int, slots: Tensor, **inputs: Any
) -> tuple[Tensor, ...]:
    """What a function that writes into pages returns, and the pages and scales after it; of pages
    of more than `whole` numbers, the tokens written at these slots.
    """
    out = function(**inputs)
    changed = inputs["pages"].tensors()
    if changed[0].numel() > whole:
        page_size, written = changed[0].shape[2], slots.long()
        written = written[written >= 0]
        changed = [x[written // page_size, :, written % page_size] for x in changed]
    return out, *changed
