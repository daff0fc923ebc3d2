"""A recipe under the user's own traffic: requests come when the trace says, and each either keeps
the latency bound or does not. Rounds say how fast a recipe is; this says whether it is fast enough
for those who wait.

    pace = paced(engine, workload, Bound(ttft_s=0.5), hardware)
    pace.share, pace.words()
"""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.bench.engine import run_workload
from ridgeline.bench.serve.bound import USUAL_SHARE, LatencyBound
from ridgeline.data.workload import Workload
from ridgeline.engine import Engine
from ridgeline.errors import UsageError
from ridgeline.hardware import Hardware
from ridgeline.ladder.outcome import TrafficPace

SPAN_S = 20.0  # of the trace that is replayed
LIMIT_S = 2 * SPAN_S


def opening(workload: Workload, span_s: float = SPAN_S) -> Workload:
    """The trace from its first request on, for a while."""
    first = workload.requests[0].arrival_s
    return workload.between(first, first + span_s)


def check_arrivals(workload: Workload, bound: LatencyBound) -> None:
    if bound and workload.duration_s == 0:
        raise UsageError(
            f"--ttft-ms and --tpot-ms need arrival times, and workload {workload.name} has none; "
            "give a trace"
        )


def paced(
    engine: Engine, workload: Workload, bound: LatencyBound, hardware: Hardware
) -> TrafficPace:
    """What is not done when the replay ends is judged by what came until then: a recipe that falls
    behind its trace would go on for minutes.
    """
    run = run_workload(engine, workload, hardware, limit_s=LIMIT_S)
    firsts = [first for first, _ in run.latencies]
    later = [per_token for _, per_token in run.latencies if per_token is not None]
    kept = sum(bound.holds(*each) for each in run.latencies)
    return TrafficPace(len(workload.requests), kept, _high(firsts), _high(later))


def _high(values: Sequence[float]) -> float | None:
    """What the asked share of requests stays within."""
    ordered = sorted(values)
    return ordered[min(int(USUAL_SHARE * len(ordered)), len(ordered) - 1)] if ordered else None
