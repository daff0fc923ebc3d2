"""The rungs, in the order in which they are climbed: fuse, less overhead or tensor cores, custom
kernels, quantize, batch. One file an area.

A stage comes before those whose gain it lets through: codes in 4 bits give nothing by kernels that
were not made for them. A GPU that waits for launches gains nothing by 16 bits, and one that is busy
with fp32 products nothing by graphs: these two are one stage.

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
from ridgeline.ladder.rungs.base import ClimbFacts, Offer, Rung, RungContext

STAGES: tuple[tuple[Rung, ...], ...] = (
    fuse.RUNGS,
    (batching.BATCHING,),
    overhead.RUNGS + tensor_cores.RUNGS,
    custom_kernels.RUNGS,
    quantize.SCHEMES,
    quantize.HEAD,
    quantize.COPIES,
    quantize.PAGES,
    batching.RUNGS,
)

# What may still be gained where the engine runs with its defaults: it is fused, overlapped,
# replayed and tuned where the device can be, and requests share steps.
MOVES: tuple[Rung, ...] = (
    fuse.FUSED,
    *tensor_cores.RUNGS,
    *quantize.SCHEMES,
    *quantize.HEAD,
    *quantize.COPIES,
    *quantize.PAGES,
    *batching.RUNGS,
)

__all__ = ["MOVES", "STAGES", "ClimbFacts", "Offer", "Rung", "RungContext"]
