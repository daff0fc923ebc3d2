"""torch's allocator on a GPU, told to keep one block that grows instead of many of their own sizes.

What a step gives back then fits what the next one asks for, so that little more is reserved than
is used, and a memory plan can say how much.

    grow_blocks("cuda:0")    # before the first tensor there
"""

from __future__ import annotations

import os

import torch

SETTING = "expandable_segments:True"
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def grow_blocks(device: str) -> bool:
    """Whether it was told. What a user has set in the environment stays; ROCm's has no such
    blocks.
    """
    is_set = any(os.environ.get(name) for name in VARIABLES)
    if device == "cpu" or is_set or torch.version.hip is not None:
        return False
    tell = getattr(torch._C, "_accelerator_setAllocatorSettings", None)  # from torch 2.9 on
    if tell is None:
        tell = torch.cuda.memory._set_allocator_settings
    tell(SETTING)
    return True
