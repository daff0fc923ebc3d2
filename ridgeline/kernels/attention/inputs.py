"""Random paged caches for the cases of the attention ops."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ridgeline.formats.scaling import quantize_rows
from ridgeline.kernels.inputs import normal
from ridgeline.kernels.op import OpInputs
from ridgeline.kernels.pages import holds_codes

NO_PAGE = 2**30  # an entry past a sequence's end: reading through it would fault


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
    """Pages in random order, each sequence's table and length; NaN in every place that holds no
    token.
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
    inputs: OpInputs = {}
    for name in ("k", "v"):
        values = normal(shape, torch.float32 if holds_codes(dtype) else dtype, device, generator)
        if holds_codes(dtype):
            values, scale = quantize_rows(values, dtype)
            inputs[f"{name}_scale_PKS"] = scale.masked_fill_(empty, float("nan"))
        else:
            values.masked_fill_(empty.unsqueeze(-1), float("nan"))
        inputs[f"{name}_pages_PKSH"] = values
    inputs["page_table_BM"] = table_BM
    inputs["lengths_B"] = torch.tensor(list(lengths), dtype=torch.int32, device=device)
    return inputs


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
