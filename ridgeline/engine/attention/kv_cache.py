"""The pages of all layers on one device: made once, copied page by page where requests part ways.

What lies in a page is kernels/pages.py's, which pages are whose is the scheduler's.

    kv = KVCache(config, torch.bfloat16, num_pages=1024, page_size=64, device="cuda:0")
    kv.copy_pages([(3, 17)])            # page 17 now holds what page 3 holds, in every layer
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from ridgeline.engine.steps.transfer import to_device
from ridgeline.kernels.pages import Pages, check_page_size, holds_codes, make_pages
from ridgeline.models import ModelConfig


class KVCache:
    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        num_pages: int,
        page_size: int,
        device: torch.device,
    ) -> None:
        self.num_pages, self.page_size, self.device = num_pages, page_size, device
        self.holds_nan = False  # whether a token that was no number has ever been written
        make = _lazy_pages if device.type == "cpu" else make_pages
        self.layers = [
            make(num_pages, page_size, config.num_kv_heads, config.head_dim, dtype, device)
            for _ in config.layers
        ]

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """Pairs of pages, from and to; no page is both."""
        if not copies:
            return
        sources, targets = to_device(copies, self.device).unbind(1)
        for pages in self.layers:
            for tensor in pages.tensors():
                # Bytes, because torch does not index-put every 8-bit float.
                held = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
                held[targets] = held[sources]


def _lazy_pages(
    num_pages: int,
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Pages:
    """`make_pages` for a CPU, of memory that the system gives page by page when it is first
    written: an engine starts at once, and holds what it has used.
    """
    check_page_size(page_size)
    shape = (num_pages, num_kv_heads, page_size, head_dim)
    k_pages, v_pages = (_lazy_zeros(shape, dtype) for _ in range(2))
    if not holds_codes(dtype):
        return Pages(k_pages, v_pages, None, None)
    k_scale, v_scale = (_lazy_zeros(shape[:3], torch.float32) for _ in range(2))
    return Pages(k_pages, v_pages, k_scale, v_scale)


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Straight from the system: torch.zeros writes them all, and so does calloc where an allocator
    keeps what was freed (hardware/freed_memory.py).
    """
    count = math.prod(shape)
    raw = mmap.mmap(-1, max(count * dtype.itemsize, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system that was built without them
            raw.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(raw, dtype=dtype, count=count).view(shape)
