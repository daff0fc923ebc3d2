"""A workload through the engine, as its clients would send it: throughput, latencies, how full the
batch and the cache were, how long the device stood idle, and the share of the limit reached.

Requests are added when they arrive and times count from their arrival, late adding included. The
limit is the sum over the steps that were run of the least time each can take on this machine; what
batching or prefix sharing saved is in the steps already.

    run = run_workload(engine, named_workload("throughput"), hardware)
    run.output_tokens_per_s, run.first_token.p50, run.share_of_limit
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from ridgeline.data.workload import Workload
from ridgeline.engine import Engine, Sampling
from ridgeline.engine.execution.step_watch import StepWatch
from ridgeline.engine.sampling.outputs import Output
from ridgeline.engine.scheduling.state import Stats
from ridgeline.errors import UsageError
from ridgeline.hardware import Hardware
from ridgeline.hardware.clocks import Clocks
from ridgeline.kernels.compile_times import waited_s
from ridgeline.profiling.step_kinds import limit_of
from ridgeline.progress import Progress
from ridgeline.records import Record, Value

LONGEST_SLEEP_S = 0.05


class Percentiles(NamedTuple):
    """Of seconds."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Percentiles | None:
        """None when there are none."""
        return cls(*np.percentile(seconds, (50, 90, 99)).tolist()) if len(seconds) else None


class RequestLatency(NamedTuple):
    """Of one request, finished or not; None where it came to nothing of the kind."""

    first_s: float | None  # from its arrival to its first token
    per_token_s: float | None  # after it


@dataclass(frozen=True)
class EngineRun:
    """What came of a workload."""

    workload: str
    num_requests: int
    not_finished: tuple[str, ...]  # why, of requests that ended without an answer
    num_prompt_tokens: int
    num_output_tokens: int
    wall_s: float
    first_token: Percentiles | None
    per_output_token: Percentiles | None  # of requests with more than one
    request: Percentiles | None  # from arrival to the end
    num_steps: int
    mean_batch: float  # samples a step
    batch_share: float  # of the largest batch
    mean_page_share: float  # of the pages, in use
    peak_page_share: float
    gap: Percentiles | None  # of the device, before each step
    limit_s: float | None  # None where a ceiling is unknown
    hit_tokens: int  # of the prompts, found in the cache
    num_preemptions: int
    drafted_tokens: int  # drafted and verified
    accepted_tokens: int  # of those, right
    cpu_s: float  # processor time of this process, all its threads together
    latencies: tuple[RequestLatency, ...]  # of all requests, in their order
    setup_s: float = 0.0  # of the wall clock: kernels were compiled, graphs captured
    # How long no request was there, by the number of steps before that.
    empty_s: Mapping[int, float] = field(default_factory=dict)

    @property
    def output_tokens_per_s(self) -> float:
        return self.num_output_tokens / self.wall_s

    @property
    def tokens_per_s(self) -> float:
        """Prompts and outputs together."""
        return (self.num_prompt_tokens + self.num_output_tokens) / self.wall_s

    @property
    def share_of_limit(self) -> float | None:
        return None if self.limit_s is None else self.limit_s / self.wall_s


@dataclass
class WorkloadNotes:
    """What is noted while a workload runs."""

    late_s: dict[Hashable, float] = field(default_factory=dict)  # added after its arrival
    outputs: list[Output] = field(default_factory=list)
    page_shares: list[float] = field(default_factory=list)
    empty_s: dict[int, float] = field(default_factory=dict)


def run_workload(
    engine: Engine,
    workload: Workload,
    hardware: Hardware,
    progress: Progress | None = None,
    limit_s: float = math.inf,
    *,
    with_limit: bool = True,
    watch: StepWatch | None = None,
) -> EngineRun:
    """Every request to its end, from an empty prefix cache; what is not done after `limit_s` is
    cancelled. `with_limit`: whether the least time of its steps is counted, which takes a while
    where there are many. `watch`: one of the caller's, who looks at the steps afterwards.
    """
    prompts = [
        workload.prompt_ids(index, engine.model.config.vocab_size)
        for index in range(len(workload.requests))
    ]
    engine.forget_prefixes()
    before, setup_before = engine.stats, setup_s(engine)
    engine.runner.watch = watch = watch or StepWatch(engine.runner.device)
    try:
        started, cpu_started = time.monotonic(), time.process_time()
        replayed = _replay(engine, workload, prompts, watch, progress, limit_s)
        wall_s, cpu_s = time.monotonic() - started, time.process_time() - cpu_started
    finally:
        engine.runner.watch = None
    known = hardware if with_limit else None
    result = _summary(engine, workload, replayed, watch, wall_s, known, before)
    return replace(result, cpu_s=cpu_s, setup_s=setup_s(engine) - setup_before)


def setup_s(engine: Engine) -> float:
    """What compiling steps and capturing them has taken, until now; of steps that are not captured
    where someone listens to the compiler.
    """
    graphs = engine.runner.graphs
    return waited_s() + (0.0 if graphs is None else graphs.setup_s)


def _replay(
    engine: Engine,
    workload: Workload,
    prompts: list[list[int]],
    watch: StepWatch,
    progress: Progress | None,
    limit_s: float,
) -> WorkloadNotes:
    replayed, waiting = WorkloadNotes(), deque(enumerate(workload.requests))
    start = time.monotonic()
    while waiting or engine.has_work:
        now = time.monotonic() - start
        if now > limit_s:
            waiting.clear()
            for index in replayed.late_s:
                engine.cancel(index)
        while waiting and waiting[0][1].arrival_s <= now:
            index, request = waiting.popleft()
            sampling = Sampling(
                temperature=workload.temperature,
                max_tokens=request.num_output_tokens,
                ignore_eos=True,
                seed=index,
            )
            replayed.late_s[index] = time.monotonic() - start - request.arrival_s
            engine.add(prompts[index], sampling, request_id=index)
        if engine.has_work:
            replayed.outputs += _outputs(engine, replayed)
            stats = engine.stats
            replayed.page_shares.append(stats.num_pages_used / engine.scheduler.config.num_pages)
        elif waiting:
            time.sleep(min(LONGEST_SLEEP_S, waiting[0][1].arrival_s - now))
            num_steps, slept_s = len(watch.steps), time.monotonic() - start - now
            replayed.empty_s[num_steps] = replayed.empty_s.get(num_steps, 0.0) + slept_s
        if progress is not None:
            progress(f"workload {workload.name}", len(replayed.outputs), len(workload.requests))
    replayed.outputs += _outputs(engine, replayed)  # of what was cancelled last
    return replayed


def _outputs(engine: Engine, replayed: WorkloadNotes) -> list[Output]:
    """What a step brought; others were cancelled before this began."""
    events = engine.step()
    ours = replayed.late_s
    return [event for event in events if isinstance(event, Output) and event.request_id in ours]


def _summary(
    engine: Engine,
    workload: Workload,
    replayed: WorkloadNotes,
    watch: StepWatch,
    wall_s: float,
    hardware: Hardware | None,
    before: Stats,
) -> EngineRun:
    finished = [output for output in replayed.outputs if output.status == "finished"]
    late, after = replayed.late_s, engine.stats
    firsts = [_first_s(output, late) for output in finished]
    steps = [watched.plan for watched in watch.steps]
    batches = [len(plan.sample_keys) for plan in steps]
    return EngineRun(
        workload=workload.name,
        num_requests=len(workload.requests),
        not_finished=tuple(
            f"{output.request_id}: {output.status}: {output.reason}"
            for output in replayed.outputs
            if output.status != "finished"
        ),
        num_prompt_tokens=sum(output.num_prompt_tokens for output in finished),
        num_output_tokens=sum(len(output.tokens) for output in finished),
        wall_s=wall_s,
        first_token=Percentiles.of(firsts),
        per_output_token=Percentiles.of([_per_token_s(o) for o in finished if len(o.tokens) > 1]),
        request=Percentiles.of([output.total_s + late[output.request_id] for output in finished]),
        num_steps=len(steps),
        mean_batch=sum(batches) / max(len(steps), 1),
        batch_share=sum(batches) / max(len(steps), 1) / engine.scheduler.config.max_batch,
        mean_page_share=sum(replayed.page_shares) / max(len(replayed.page_shares), 1),
        peak_page_share=max(replayed.page_shares, default=0.0),
        gap=Percentiles.of(watch.gaps_s()),
        limit_s=None if hardware is None else limit_of(steps, engine.local.costs, hardware),
        cpu_s=0.0,
        latencies=_latencies(replayed, len(workload.requests)),
        empty_s=replayed.empty_s,
        **{
            name: getattr(after, name) - getattr(before, name)
            for name in ("hit_tokens", "num_preemptions", "drafted_tokens", "accepted_tokens")
        },
    )


def _latencies(replayed: WorkloadNotes, num_requests: int) -> tuple[RequestLatency, ...]:
    outputs = {output.request_id: output for output in replayed.outputs}
    nothing = RequestLatency(None, None)
    return tuple(
        nothing
        if (output := outputs.get(index)) is None or output.first_token_s is None
        else RequestLatency(_first_s(output, replayed.late_s), _later_s(output))
        for index in range(num_requests)
    )


def _first_s(output: Output, late_s: Mapping[Hashable, float]) -> float:
    assert output.first_token_s is not None, "it has its first token"
    return output.first_token_s + late_s[output.request_id]


def _per_token_s(output: Output) -> float:
    assert output.first_token_s is not None, "it has its first token"
    return (output.total_s - output.first_token_s) / max(len(output.tokens) - 1, 1)


def _later_s(output: Output) -> float | None:
    """A request that asked for one token waits for no other; one that was cancelled did, at least
    as long as this.
    """
    is_whole = output.status == "finished" and len(output.tokens) == 1
    return None if is_whole else _per_token_s(output)


def check_fits(workload: Workload, max_context: int) -> None:
    """An error for a workload with requests that the context does not take."""
    longest = max(request.num_tokens for request in workload.requests)
    if longest > max_context:
        raise UsageError(
            f"workload {workload.name} has a request of {longest} tokens; max_context is "
            f"{max_context}; raise --max-context, or leave such requests out with --fitting"
        )


def as_record(
    name: str,
    runs: Sequence[EngineRun],
    hardware: Hardware,
    clocks: Clocks | None = None,
    **more: Value,
) -> Record:
    """The median run, with the spread of all in what is compared; `clocks` while they ran."""
    rates = sorted(run.output_tokens_per_s for run in runs)
    run = sorted(runs, key=lambda each: each.output_tokens_per_s)[len(runs) // 2]
    share, source = run.share_of_limit, None
    if share is not None:
        read = hardware.ceiling("read_bandwidth") or hardware.ceiling("memory_bandwidth")
        source = read.source if read is not None else None
    values = {
        "output_tokens_per_s": Value(
            run.output_tokens_per_s,
            "token/s",
            spread=(rates[-1] - rates[0]) / rates[len(rates) // 2] if len(rates) > 1 else None,
            num_samples=len(rates),
            share_of_ceiling=share,
            ceiling_source=source,
        ),
        "tokens_per_s": Value(run.tokens_per_s, "token/s"),
        "wall": Value(run.wall_s, "s"),
        "steps": Value(float(run.num_steps), "1"),
        "mean_batch": Value(run.mean_batch, "1"),
        "batch_share": Value(run.batch_share, "1"),
        "mean_page_share": Value(run.mean_page_share, "1"),
        "peak_page_share": Value(run.peak_page_share, "1"),
        "hit_tokens": Value(float(run.hit_tokens), "token"),
        "preemptions": Value(float(run.num_preemptions), "1"),
        "drafted_tokens": Value(float(run.drafted_tokens), "token"),
        "accepted_tokens": Value(float(run.accepted_tokens), "token"),
        **more,
    }
    for what in ("first_token", "per_output_token", "request", "gap"):
        result: Percentiles | None = getattr(run, what)
        for key, seconds in result._asdict().items() if result is not None else ():
            values[f"{what}_{key}"] = Value(seconds, "s")
    return Record.create(name, hardware, values, notes=run.not_finished[:10], clocks=clocks)
