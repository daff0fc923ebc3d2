"""Less overhead: a step as a captured graph instead of hundreds of launches, and the next step
launched before the last one's tokens reach the host.
"""

from __future__ import annotations

from ridgeline.ladder.rungs.base import Offer, Rung, RungContext
from ridgeline.ladder.rungs.quantize import WEIGHTS


def graphs(context: RungContext) -> Offer | str:
    if context.facts.on_cpu:
        return "a CPU launches nothing"
    return Offer(
        {"graphs": True}, "small steps, and the choice of tokens, are replayed as captured graphs"
    )


def overlap(context: RungContext) -> Offer | str:
    if context.facts.on_cpu:
        return "a CPU computes a step when it is launched: there is nothing to overlap"
    return Offer({"overlap": True}, "the device need not wait until the host has read its tokens")


FASTER = ("bf16", "fp16", "tuned", *WEIGHTS)  # the less a step takes, the more of it is overhead
RUNGS = (
    Rung("graphs", "overhead", "steps as captured graphs", graphs, again_after=FASTER),
    Rung("overlap", "overhead", "the next step launched ahead", overlap, again_after=FASTER),
)
