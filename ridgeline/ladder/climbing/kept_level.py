"""The rate that a recipe was proved to hold within a latency bound, as `--check` proves it again.

level = KeptLevel(bound, target=0.9, rate=3.1, seconds=60.0, trace=workload)
level_problems(level, bench.prove(state, level.rate, level.seconds))     # empty: it holds
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ridgeline.bench.serve.bound import LatencyBound
from ridgeline.data.workload import Workload
from ridgeline.ladder.measuring.spec import workload_from
from ridgeline.ladder.outcome import RateProof
from ridgeline.ladder.reporting.levels import bound_words
from ridgeline.quality.intervals import share_of_counts


@dataclass(frozen=True)
class KeptLevel:
    bound: LatencyBound
    target: float  # share of requests that must keep it
    rate: float  # requests a second
    seconds: float  # of arrivals
    trace: Workload  # with its arrival times, where it has any

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> KeptLevel:
        bound, trace = LatencyBound(**document["bound"]), workload_from(document["trace"])
        numbers = {name: float(document[name]) for name in ("target", "rate", "seconds")}
        return cls(bound=bound, trace=trace, **numbers)


def level_problems(level: KeptLevel, proof: RateProof) -> list[str]:
    """Fewer requests keep the bound than must, beyond the chance that some are late."""
    share = share_of_counts(proof.num_kept, proof.num_requests)
    if share.high is None or share.high >= level.target:
        return []
    return [f"{level_words(level, proof)}; {level.target:.0%} must: the rate is not held any more"]


def level_words(level: KeptLevel, proof: RateProof) -> str:
    return (
        f"at {proof.rate:.3g} requests/s for {proof.seconds:.0f} s {proof.share:.1%} of "
        f"{proof.num_requests} requests keep {bound_words(level.bound)}"
    )
