"""How long a step's passes take through a pipeline: forward and backward tasks of every stage are
simulated in the order that will run (parallel/bubbles.py). Of many micro-batches the middle repeats
itself: beyond a few rounds each further one takes what the busiest device needs for it.

    span = pipeline_span(layout, 512, times, transfer)
"""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.parallel.bubbles import PassTimes, fits_pipeline, step_span
from ridgeline.parallel.layout import Layout

ROUNDS = 3  # of the pipeline's length that are simulated


def pipeline_span(
    layout: Layout, num_micro: int, times: Sequence[PassTimes], transfer: float = 0.0
) -> float:
    if layout.pipeline == 1:
        return num_micro * sum(each.of("F") + each.of("B") for each in times)
    # The order of passes depends on these alone, and is kept by them.
    layout = Layout(pipeline=layout.pipeline, stages=layout.stages, schedule=layout.schedule)
    simulated = _simulated(layout, num_micro)
    span = step_span(layout, simulated, times, transfer)
    return span + (num_micro - simulated) * busiest(layout, times)


def _simulated(layout: Layout, num_micro: int) -> int:
    """As few micro-batches as show the middle, and as many more as a schedule's rounds need."""
    rest = num_micro % layout.pipeline
    enough = ROUNDS * layout.pipeline + rest
    if num_micro <= enough or not fits_pipeline(layout, enough):
        return num_micro
    return enough


def busiest(layout: Layout, times: Sequence[PassTimes]) -> float:
    """Of one micro-batch through all stages of a device, of the device that needs longest."""
    return max(
        sum(times[stage].of("F") + times[stage].of("B") for stage in range(device, len(times),
                                                                           layout.pipeline))
        for device in range(layout.pipeline)
    )  # fmt: skip
