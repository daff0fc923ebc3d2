"""Graphs captured while nobody asks for anything, so that the first requests of a server do not
wait for them. Several ranks, which would have to agree on it, capture theirs as they go.

A graph is made when a step of its size is first met, which takes as long as dozens of steps: longer
still where a kernel has to be compiled. Between requests a server has the time. The steps belong to
nobody, as in rehearsal.py, and come one at a time: whoever arrives waits for one at most. Half of
the graphs that may be made are left to what requests turn out to need.

    ahead = Ahead(runner)
    while nobody_is_there() and ahead.one(): ...
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import islice

from ridgeline.engine.execution.faults import reason_of
from ridgeline.engine.execution.graph_kinds import (
    DECODE_SIZES,
    PROMPT_SIZES,
    GraphLimits,
    bounds_below,
    graph_kind,
)
from ridgeline.engine.execution.rehearsal import JOBS, decode_plan, prompt_plan
from ridgeline.engine.execution.runner import Runner
from ridgeline.engine.memory.footprint import NUM_GRAPHS
from ridgeline.engine.scheduling.step_plan import StepPlan

log = logging.getLogger(__name__)


class Ahead:
    """`runner` is the one that computes, not one that watches it."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        alone = type(runner) is Runner and runner.graphs is not None
        self._left: Iterator[StepPlan] = self._missing() if alone else iter(())

    def one(self) -> bool:
        """Capture the next graph that is missing; False when there is none."""
        plan = next(self._left, None)
        if plan is None:
            return False
        watch, self.runner.watch = self.runner.watch, None  # these steps are no work of the server
        try:
            self.runner.collect(self.runner.launch(plan, JOBS, lambda key: [0]))
        except Exception as error:  # a device that is lost will say so to the next request
            log.warning("no more graphs are captured ahead: %s", reason_of(error))
            self._left = iter(())
        finally:
            self.runner.watch = watch
        return True

    def _missing(self) -> Iterator[StepPlan]:
        graphs = self.runner.graphs
        assert graphs is not None, "they are asked for where there are some"
        for plan in plans(graphs.limits):
            length = 1 + max(plan.first_positions[: plan.num_decode_rows], default=0)
            kind = graph_kind(plan, graphs.limits, length)
            if len(graphs.captured) >= NUM_GRAPHS // 2 or graphs.used_bytes >= graphs.budget_bytes:
                return
            if kind is not None and kind not in graphs.captured and kind not in graphs.refused:
                yield plan


def plans(limits: GraphLimits) -> Iterator[StepPlan]:
    """Steps of nobody, one for each graph, the likeliest first: short sequences, then longer ones,
    each with few streams before many.
    """
    most = min(limits.max_batch, limits.max_tokens)
    sizes = [size for size in DECODE_SIZES if size <= most]
    yield from (decode_plan(size) for size in sizes)
    largest = min(limits.max_context, limits.max_tokens)
    yield from (prompt_plan(size) for size in PROMPT_SIZES if size <= largest)
    for length in islice(bounds_below(limits.max_context), 1):
        yield from (decode_plan(size, first_position=length) for size in sizes)
