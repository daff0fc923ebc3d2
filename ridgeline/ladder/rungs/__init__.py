"""The rungs, in the order in which they are climbed: fuse, tensor cores, less overhead, quantize,
custom kernels, batch. One file an area.

Rungs of one stage interact or exclude each other: the one with the largest predicted gain comes
first, and the others are then looked at again from where it led.
"""

from ridgeline.ladder.rungs import (
    batching,
    custom_kernels,
    fuse,
    overhead,
    quantize,
    tensor_cores,
)
from ridgeline.ladder.rungs.base import Offer, Place, Rung

STAGES: tuple[tuple[Rung, ...], ...] = (
    fuse.RUNGS,
    (batching.BATCHING,),
    tensor_cores.RUNGS,
    overhead.RUNGS,
    quantize.SCHEMES,
    quantize.HEAD,
    quantize.PAGES,
    custom_kernels.RUNGS,
    batching.RUNGS,
)

__all__ = ["STAGES", "Offer", "Place", "Rung"]
