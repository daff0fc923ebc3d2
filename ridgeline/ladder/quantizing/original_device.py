"""Where the original lies while it is quantized: on the device, or on the host where it would leave
no room there. From the host, blocks are handed to the device one by one, to be rounded and to tell
what the original says of the text (quality/walked.py).

    if is_walked("auto", config, torch.bfloat16, schemes, "cuda:0"): model = load_model(path, "cpu")
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from ridgeline.errors import OutOfMemoryError
from ridgeline.hardware.detection import available_memory
from ridgeline.hardware.units import human_bytes
from ridgeline.models import ModelConfig
from ridgeline.models.cost import num_expert_parameters, num_parameters
from ridgeline.quality.divergence import KEPT_BYTES
from ridgeline.quantization.scheme import Scheme
from ridgeline.quantization.sizes import head_matrix, plain_bytes, weight_bytes

OriginalDevice = Literal["auto", "device", "host"]
# GPTQ of an 8B model that lay on the host held 9.1 GiB of an H200: 22 to 23 blocks of 0.41 GiB.
WORK_BLOCKS = 23
LARGE_BYTES = 8 << 30  # to copy its blocks takes seconds of the minutes that finding codes takes


def is_walked(
    original: OriginalDevice,
    config: ModelConfig,
    dtype: torch.dtype,
    schemes: Sequence[Scheme],
    device: str,
    often: bool = False,
) -> bool:
    """Whether the original stays on the host; OutOfMemoryError where it has no room there either,
    or the device has none for a block's work or for the smallest model that could come of it. A
    large one stays there by itself, so that the device holds what is at work, unless it is to be
    run often.
    """
    plain = weight_bytes(config, dtype)
    changed = min(weight_bytes(config, dtype, scheme) for scheme in schemes)
    work = work_bytes(config, dtype)
    free = available_memory(device)
    is_large = not often and plain > LARGE_BYTES and 2 * plain < available_memory("cpu")
    has_room = plain + max(changed, work) <= free
    walked = original == "host" or (
        original == "auto" and device != "cpu" and (is_large or not has_room)
    )
    if not walked:
        return False
    if plain > available_memory("cpu"):
        raise OutOfMemoryError(
            f"the original takes {human_bytes(plain)}, and {human_bytes(available_memory('cpu'))} "
            "of host memory are free; use a machine with more"
        )
    if max(changed, work) > free:
        raise OutOfMemoryError(
            f"quantizing takes {human_bytes(work)} of {device} and running the result "
            f"{human_bytes(changed)}, and {human_bytes(free)} are free there; use --device cpu"
        )
    return True


def work_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """What finding codes and comparing logits take of the device, at most: a block and its copies,
    what methods hold of its projections, the head, and logits.
    """
    head = plain_bytes(head_matrix(config), dtype)
    blocks = num_parameters(config) * dtype.itemsize - head * (2 - config.tied_embeddings)
    experts = num_expert_parameters(config) * dtype.itemsize
    a_block = (2 * experts + WORK_BLOCKS * (blocks - experts)) // config.num_layers
    return max(a_block, head + KEPT_BYTES)
