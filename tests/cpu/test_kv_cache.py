"""Pages of a CPU's cache: memory that the system gives when it is first written."""

from __future__ import annotations

import subprocess
import sys

import torch
from packed import TINY

from ridgeline.engine.attention.kv_cache import KVCache
from ridgeline.models.families import describe_hf

CONFIG = describe_hf(TINY, origin="tiny").config
HELD = """
import resource, torch
from pathlib import Path
from ridgeline.engine.attention.kv_cache import KVCache
from ridgeline.hardware.freed_memory import keep_freed_memory
from ridgeline.models.families import describe_hf

def held_mib():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20

def cache():
    return KVCache(config, torch.float32, {num_pages}, 64, torch.device("cpu"))

keep_freed_memory()
config = describe_hf({values}, origin="tiny").config
first = cache()
above = torch.ones(4 << 20)
del first
before = held_mib()
second = cache()
size = sum(each.nbytes for pages in second.layers for each in pages.tensors())
print(held_mib() - before, size / 2**20)
"""


def test_pages_are_zero_and_take_what_is_written() -> None:
    kv = KVCache(CONFIG, torch.float32, 3, 64, torch.device("cpu"))
    for pages in kv.layers:
        for tensor in pages.tensors():
            assert tensor.shape[0] == 3
            assert not tensor.any()
    kv.layers[0].k_pages[0] = 2.0
    kv.copy_pages([(0, 2)])
    assert (kv.layers[0].k_pages[2] == 2.0).all()
    assert not kv.layers[0].k_pages[1].any()


def test_a_process_that_keeps_freed_memory_holds_no_page_before_it_is_written() -> None:
    """As one that trained does: what another cache had before, calloc would write with zeros."""
    program = HELD.format(values=TINY, num_pages=40_000)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    held, size = map(float, done.stdout.split())
    assert size > 500
    assert held < 0.05 * size
