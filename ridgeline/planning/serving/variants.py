"""One option run in other ways than as so many equal replicas that always run: with as many as the
load asks for, or with prompts and decoding apart. `ridgeline serve` starts replicas; what starts
and stops them by the load, and what carries pages between them, is not part of it.

    autoscaled(option, workload, slo, "prefix", AutoscaleWish(least=1))
    disaggregated(option, cluster.pools, workload, slo, "prefix", SplitWish())
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ridgeline.data.workload import Workload
from ridgeline.errors import UsageError
from ridgeline.planning.clusters.cluster import GpuPool
from ridgeline.planning.serving.fleets.disaggregated import KvLink, SplitFleet, link_between
from ridgeline.planning.serving.fleets.fleet import Fleet, Policy
from ridgeline.planning.serving.fleets.scaling import Scaling, usual_start_s
from ridgeline.planning.serving.fleets.served import RunReport, ServiceLevel, is_carried
from ridgeline.planning.serving.options import ServingOption

TARGETS = (4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)  # requests a replica, where none is given
MOST_SPLITS = 7  # that are tried, of all
SECONDS_OF_HOUR = 3600.0


@dataclass(frozen=True)
class AutoscaleWish:
    least: int  # replicas
    target: float | None = None  # requests a replica; None: what costs least and keeps the level
    start_s: float | None = None  # None: by what was measured
    patience_s: float = 60.0


@dataclass(frozen=True)
class SplitWish:
    num_prompts: int | None = None  # replicas for prompts; None: what keeps the level for most
    link_bytes_s: float | None = None  # of a GPU; None: by the cluster


@dataclass(frozen=True)
class FleetVariant:
    """A fleet beside the plain one, under the workload's own load."""

    kind: str  # "all replicas", "autoscaled", "disaggregated"
    words: str
    report: RunReport
    gpu_hours: float  # paid for

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "words": self.words, "gpu_hours": self.gpu_hours,
                **asdict(self.report)}  # fmt: skip


def plain(
    option: ServingOption, workload: Workload, slo: ServiceLevel, policy: Policy
) -> FleetVariant:
    """What the others are compared with."""
    fleet = Fleet(option.setups, policy=policy)
    report = fleet.run(workload).report(slo)
    words = f"{len(option.setups)} replicas, always on"
    return FleetVariant("all replicas", words, report, _hours(option, fleet.replica_seconds))


def autoscaled(
    option: ServingOption,
    workload: Workload,
    slo: ServiceLevel,
    policy: Policy,
    wish: AutoscaleWish,
) -> FleetVariant:
    most = len(option.setups)
    if not 1 <= wish.least <= most:
        raise UsageError(
            f"--autoscale {wish.least}: there are GPUs for {most} replicas of {option.words}; give "
            f"1 to {most}"
        )
    start_s = max(map(usual_start_s, option.setups)) if wish.start_s is None else wish.start_s
    variants = []
    for target in TARGETS if wish.target is None else (wish.target,):
        scaling = Scaling(most, target, start_s, wish.least, wish.patience_s)
        fleet = Fleet(option.setups, policy=policy, scaling=scaling)
        report = fleet.run(workload).report(slo)
        words = (
            f"{wish.least} to {most} replicas, {target:g} requests each, a start {start_s:.1f} s"
        )
        hours = _hours(option, fleet.replica_seconds)
        variants.append(FleetVariant("autoscaled", words, report, hours))
    return min(variants, key=_cheapest)


def disaggregated(
    option: ServingOption,
    pools: Sequence[GpuPool],
    workload: Workload,
    slo: ServiceLevel,
    policy: Policy,
    wish: SplitWish,
) -> FleetVariant:
    """The first replicas run prompts: of several pools, those of the first."""
    count = len(option.setups)
    if count < 2 or (wish.num_prompts is not None and not 0 < wish.num_prompts < count):
        raise UsageError(
            f"prompts and decoding apart need a replica each, and {option.words} has {count}; "
            + (f"give --disaggregate 1 to {count - 1}" if count > 1 else "use more GPUs")
        )
    link = link_between(pools) if wish.link_bytes_s is None else KvLink(wish.link_bytes_s)
    splits = _splits(count) if wish.num_prompts is None else [wish.num_prompts]
    variants = []
    for split in splits:
        fleet = SplitFleet(option.setups[:split], option.setups[split:], link, policy=policy)
        report = fleet.run(workload).report(slo)
        words = (
            f"{split} replicas for prompts, {count - split} for decoding, "
            f"{link.bytes_s / 1e9:.0f} GB/s a GPU between them, "
            f"{1e3 * fleet.mean_wait_s:.2f} ms waited for it"
        )
        variants.append(
            FleetVariant("disaggregated", words, report, _hours(option, count * report.duration_s))
        )
    return min(variants, key=lambda each: (-(each.report.goodput or 0.0), each.report.e2e.mean))


def _splits(count: int) -> list[int]:
    """All of them, or evenly spread ones."""
    every = range(1, count)
    step = max(1, -(-len(every) // MOST_SPLITS))
    return list(every[::step])


def _hours(option: ServingOption, replica_seconds: float) -> float:
    """Replicas that differ count as their mean."""
    mean_gpus = option.num_gpus / len(option.setups)
    return replica_seconds * mean_gpus / SECONDS_OF_HOUR


def _cheapest(variant: FleetVariant) -> tuple[bool, float, float]:
    report = variant.report
    missed = not is_carried(report)
    return missed, -(report.goodput or 0.0) if missed else 0.0, variant.gpu_hours
