"""A first table of what steps cost, from a few steps that belong to nobody, before requests come.

They go through the runner as every step does, with tokens that are written nowhere; so kernels are
compiled and the graphs of these sizes captured by the way. Sizes are measured in the order of how
much they tell, until the time for it is up.

    rehearse(runner, costs, max_drafts=5)
"""

from __future__ import annotations

import time

from ridgeline.engine.execution.graph_kinds import bounds_below
from ridgeline.engine.execution.runner import InFlight, Runner
from ridgeline.engine.requests.request import Sampling
from ridgeline.engine.sampling.extras import DeviceJob
from ridgeline.engine.scheduling.state import StreamKey
from ridgeline.engine.scheduling.step_costs import StepCosts
from ridgeline.engine.scheduling.step_plan import NOT_WRITTEN, StepPlan

KEY: StreamKey = ("rehearsal", 0)
JOBS = {KEY[0]: DeviceJob(Sampling(seed=0), (0,), frozenset())}
SIZES = (1, 4, 16, 2, 8, 32, 64, 128, 256)  # streams in a step
TIMES = 3  # each is run, after once that does not count
SECONDS = 1.0  # after which no further size is begun


def rehearse(
    runner: Runner, costs: StepCosts, max_drafts: int, ahead: bool = False, max_s: float = SECONDS
) -> None:
    """Times of plain steps, and of one stream with drafts, which others follow at once if steps go
    `ahead` of drafts. A size whose plain step was disturbed is measured again when it runs; the
    policy sees to that.
    """
    started = time.monotonic()
    drafted_s = _overlapped_s if ahead else _alone_s
    sizes = [size for size in SIZES if size <= runner.max_batch]
    costs.begin(1, _overlapped_s(runner, decode_plan(1)))
    if max_drafts + 1 <= runner.max_batch:
        costs.begin(max_drafts + 1, _overlapped_s(runner, decode_plan(max_drafts + 1)))
    for drafts in sorted({1, max_drafts, (max_drafts + 1) // 2}):
        costs.begin(1 + drafts, drafted_s(runner, draft_plan(drafts)), most_drafts=drafts)
    # Graphs for longer sequences: captured when one is met, streams would wait for it.
    lengths = bounds_below(runner.max_context - max_drafts) if runner.graphs is not None else ()
    for length in lengths:
        runner.collect(_launch(runner, draft_plan(max_drafts, length)))
    for size in sizes[1:]:
        if time.monotonic() - started < max_s:
            costs.begin(size, _overlapped_s(runner, decode_plan(size)))


def _overlapped_s(runner: Runner, plan: StepPlan) -> float:
    """Seconds a step, where the next is launched before the last one's tokens are here."""
    runner.collect(_launch(runner, plan))
    started = time.monotonic()
    last = None
    for _ in range(TIMES):
        launched = _launch(runner, plan)
        if last is not None:
            runner.collect(last)
        last = launched
    assert last is not None, "a size is run more than once"
    runner.collect(last)
    return (time.monotonic() - started) / TIMES


def _alone_s(runner: Runner, plan: StepPlan) -> float:
    """Seconds of the quickest, each waited for."""
    times = []
    for _ in range(1 + TIMES):
        started = time.monotonic()
        runner.collect(_launch(runner, plan))
        times.append(time.monotonic() - started)
    return min(times[1:])


def _launch(runner: Runner, plan: StepPlan) -> InFlight:
    in_flight = runner.launch(plan, JOBS, lambda key: [0])
    assert not in_flight.failed, f"a step that belongs to nobody failed: {in_flight.failed}"
    return in_flight


def decode_plan(num_rows: int, first_position: int = 0) -> StepPlan:
    """One token for each of some seats."""
    zeros, keys, first = [0] * num_rows, [KEY] * num_rows, [first_position] * num_rows
    return StepPlan(
        step_id=0,
        num_decode_rows=num_rows,
        keys=keys,
        seats=list(range(num_rows)),
        first_positions=first,
        num_tokens=[1] * num_rows,
        token_ids=zeros,
        positions=first,
        slots=[NOT_WRITTEN] * num_rows,
        sample_keys=keys,
        sample_seats=list(range(num_rows)),
        sample_drafts=zeros,
        logit_tokens=list(range(num_rows)),
    )


def draft_plan(num_drafts: int, first_position: int = 0) -> StepPlan:
    """One row with drafts."""
    count = 1 + num_drafts
    return StepPlan(
        step_id=0,
        num_draft_rows=1,
        keys=[KEY],
        seats=[0],
        first_positions=[first_position],
        num_tokens=[count],
        token_ids=[0] * count,
        positions=list(range(first_position, first_position + count)),
        slots=[NOT_WRITTEN] * count,
        sample_keys=[KEY],
        sample_seats=[0],
        sample_drafts=[num_drafts],
        logit_tokens=list(range(count)),
    )


def prompt_plan(num_tokens: int) -> StepPlan:
    """The beginning of one prompt, with a sample."""
    return StepPlan(
        step_id=0,
        keys=[KEY],
        seats=[0],
        first_positions=[0],
        num_tokens=[num_tokens],
        token_ids=[0] * num_tokens,
        positions=list(range(num_tokens)),
        slots=[NOT_WRITTEN] * num_tokens,
        sample_keys=[KEY],
        sample_seats=[0],
        sample_drafts=[0],
        logit_tokens=[num_tokens - 1],
    )
