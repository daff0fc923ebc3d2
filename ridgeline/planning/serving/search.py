"""The search: every option is simulated on the workload's own traffic, the best ones under more and
less of it, until it is known how much each can take and what it gives each user then.

    result = search(config, cluster, workload, Recipe(), ServiceLevel(0.5, 0.04))
    result.best.option.words, result.best.load, result.frontier, result.rejections
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ridgeline.data.workload import Workload
from ridgeline.errors import OutOfMemoryError, UsageError
from ridgeline.models import ModelConfig
from ridgeline.planning.clusters.cluster import Cluster
from ridgeline.planning.serving.fleet import Fleet, Policy
from ridgeline.planning.serving.options import Rejection, ServingOption, Ways
from ridgeline.planning.serving.served import RunReport, ServiceLevel
from ridgeline.progress import Progress, WholeRun
from ridgeline.recipe import Recipe, dotted_values

GOOD = 0.9  # share of requests that keep the service level, where a load counts as carried
NUM_COMPARED = 400  # requests of the workload, that all options are compared on
NUM_FINALISTS = 3  # options that are tried with other limits, and then under all loads
MOST_REQUESTS = 1500  # of the workload, that a curve is drawn with
MOST_LOAD = 1024.0  # times the workload's rate
REFINEMENTS = 2  # of the load between the last one carried and the first that is not
CURVE = (0.25, 0.5, 0.75, 1.0, 1.25)  # of the most that is carried


@dataclass(frozen=True)
class LoadPoint:
    """What an option gives under one load."""

    option: ServingOption
    load: float  # times the workload's rate
    report: RunReport
    place: int = 0  # of the option among the leaders

    @property
    def tokens_per_gpu(self) -> float:
        """Output tokens/s."""
        return self.report.output_tokens_per_s / self.option.num_gpus

    @property
    def tokens_per_user(self) -> float:
        """Output tokens/s of one request, at the median."""
        return 1.0 / max(self.report.tpot.p50, 1e-9)

    @property
    def is_carried(self) -> bool:
        return is_carried(self.report)

    def to_json(self) -> dict[str, Any]:
        return {
            "option": self.option.words,
            "load": self.load,
            "tokens_per_s_per_gpu": self.tokens_per_gpu,
            "tokens_per_s_per_user": self.tokens_per_user,
            **self.report.to_json(),
        }


@dataclass(frozen=True)
class ServingAnswer:
    best: LoadPoint  # at the workload's own load
    most: LoadPoint  # the best option under the most load that it carries
    points: tuple[LoadPoint, ...]  # of all finalists under all loads that were tried
    frontier: tuple[LoadPoint, ...]  # of those, what no other beats in both rates
    rejections: tuple[Rejection, ...]
    num_options: int

    @property
    def misses(self) -> bool:
        """Whether even the best keeps the service level for too few."""
        return not self.best.is_carried


def search(
    config: ModelConfig,
    cluster: Cluster,
    workload: Workload,
    base: Recipe,
    slo: ServiceLevel,
    policy: Policy = "prefix",
    progress: Progress | None = None,
) -> ServingAnswer:
    """OutOfMemoryError where the model fits nowhere; UsageError where no request alone is quick
    enough, with how close it comes.
    """
    ways = Ways(config, cluster, workload, base, slo)
    tried = _Tried(workload.first(min(len(workload.requests), NUM_COMPARED)), slo, policy)
    tell = progress or WholeRun()
    edits = list(ways.edits())
    for number, edit in enumerate(edits):
        tell("options", number, len(edits))
        tried.add(ways.option(edit))
    if not tried.capacities:
        raise _nothing(ways.rejections, cluster, slo)
    edits = [{**leader.edit, **limits} for leader in tried.leaders() for limits in ways.limits()]
    for number, edit in enumerate(edits):
        tell("limits", number, len(edits))
        tried.add(ways.option(edit))
    leaders = tried.leaders()
    quickest = min(tried.capacities, key=lambda each: ways.token_s(each.option))
    if quickest not in leaders:  # the frontier's other end
        leaders.append(quickest)
    whole = workload.first(min(len(workload.requests), MOST_REQUESTS))
    points = [
        point
        for place, leader in enumerate(leaders)
        for point in _curve(leader, place, whole, slo, policy)
    ]
    best = max((point for point in points if point.load == 1.0), key=_rank)
    carried = [point for point in points if point.option is best.option and point.is_carried]
    most = max(carried, key=lambda point: point.load, default=best)
    lost = [_less(each, leaders[0]) for each in tried.capacities if each not in leaders]
    return ServingAnswer(
        best,
        most,
        tuple(points),
        tuple(frontier(points)),
        (*ways.rejections, *lost),
        len(tried.capacities),
    )


def frontier(points: Sequence[LoadPoint]) -> list[LoadPoint]:
    """Those that no other beats in tokens/s a GPU and in tokens/s a user, by the former; each load
    is carried.
    """
    kept: list[LoadPoint] = []
    carried = [point for point in points if point.is_carried]
    for point in sorted(carried, key=lambda p: (-p.tokens_per_gpu, -p.tokens_per_user)):
        if not kept or point.tokens_per_user > kept[-1].tokens_per_user:
            kept.append(point)
    return kept


class _Capacity(NamedTuple):
    """How much of the compared traffic an option carries."""

    option: ServingOption
    load: float  # times the workload's rate; 0: it does not carry what an earlier option did
    report: RunReport  # at that load, or at the one it does not carry

    @property
    def edit(self) -> dict[str, Any]:
        recipe = self.option.recipe
        names = ("scheme", "kv.dtype", "parallel.tensor")
        return {name: dotted_values(recipe)[name] for name in names}

    @property
    def rank(self) -> tuple[float, float, float]:
        """The load carried; if not even the workload's, how many keep the service level; and then
        how soon requests are through.
        """
        good = 1.0 if self.load else self.report.goodput or 0.0
        return self.load, good, -self.report.e2e.mean


class _Tried:
    """Options, each under the most of the compared traffic that it carries."""

    def __init__(self, sample: Workload, slo: ServiceLevel, policy: Policy) -> None:
        self._sample, self._slo, self._policy = sample, slo, policy
        self._words: set[str] = set()
        self.capacities: list[_Capacity] = []

    def add(self, option: ServingOption | None) -> None:
        if option is None or option.words in self._words:
            return
        self._words.add(option.words)
        self.capacities.append(self._capacity(option))

    def leaders(self) -> list[_Capacity]:
        return sorted(self.capacities, key=lambda each: each.rank, reverse=True)[:NUM_FINALISTS]

    def _capacity(self, option: ServingOption) -> _Capacity:
        """First under the most load that any option before it carried: one that does not carry this
        is out, by one run. Then doubling while it is carried, and halving what lies between.
        Without a service level, or where all come at once, it is the throughput of all at once.
        """
        sample = self._sample
        if self._slo == ServiceLevel() or sample.duration_s == 0:
            report = _run(option, sample.at_once(), self._slo, self._policy)
            return _Capacity(option, round(report.output_tokens_per_s, 1), report)
        carried = max([1.0, *(each.load for each in self.capacities)])
        known = self._at(option, carried)
        if not is_carried(known):
            return _Capacity(option, 0.0, known)
        while carried < MOST_LOAD and is_carried(report := self._at(option, 2 * carried)):
            carried, known = 2 * carried, report
        low, high = carried, 2 * carried
        for _ in range(REFINEMENTS):
            middle = (low + high) / 2
            if is_carried(report := self._at(option, middle)):
                low, known = middle, report
            else:
                high = middle
        return _Capacity(option, low, known)

    def _at(self, option: ServingOption, load: float) -> RunReport:
        return _run(option, self._sample.sped_up(load), self._slo, self._policy)


def is_carried(report: RunReport) -> bool:
    return report.goodput is None or report.goodput >= GOOD


def _rank(point: LoadPoint) -> tuple[float, float, float]:
    """Whether requests keep the service level; then the option's place among the leaders."""
    good = 1.0 if point.is_carried else point.report.goodput or 0.0
    return round(good, 3), -point.place, point.tokens_per_gpu


def _run(option: ServingOption, workload: Workload, slo: ServiceLevel, policy: Policy) -> RunReport:
    return Fleet(option.setups, policy=policy).run(workload).report(slo)


def _curve(
    leader: _Capacity, place: int, workload: Workload, slo: ServiceLevel, policy: Policy
) -> list[LoadPoint]:
    """Under the workload's own load, and parts of the most that it is thought to carry."""
    loads = {1.0}
    if workload.duration_s > 0 and slo != ServiceLevel():
        loads |= {round(max(leader.load, 1.0) * share, 4) for share in CURVE}
    option, points = leader.option, []
    for load in sorted(loads):
        report = _run(option, workload.sped_up(load), slo, policy)
        points.append(LoadPoint(option, load, report, place))
    return points


def _less(each: _Capacity, best: _Capacity) -> Rejection:
    """What it gives where the first gives more."""
    report = each.report
    if not is_carried(report):
        why = (
            f"{report.goodput:.0%} keep the service level at {report.requests_per_s:.1f} requests/s"
            f" (TTFT p90 {1e3 * report.ttft.p90:.0f} ms, TPOT p90 {1e3 * report.tpot.p90:.1f} ms)"
        )
    elif report.goodput is None:
        least = best.report.output_tokens_per_s
        why = f"{report.output_tokens_per_s:,.0f} tokens/s; the first gives {least:,.0f}"
    else:
        why = f"carries {each.load:g} times the traffic; the first {best.load:g}"
    return Rejection(each.option.words, why, "")


def _nothing(rejections: Sequence[Rejection], cluster: Cluster, slo: ServiceLevel) -> Exception:
    """No option: the one that came closest, and what it lacks."""
    slow = [one for one in rejections if one.excess]
    if slow:
        nearest = min(slow, key=lambda one: one.excess)
        return UsageError(
            f"nothing on {cluster.name} meets this; the closest is {nearest.words}. "
            f"{nearest.constraint}: allow more, or take faster or more GPUs"
        )
    nearest = rejections[-1]
    return OutOfMemoryError(
        f"the model fits no way on {cluster.name}; the smallest that was tried, {nearest.words}, "
        f"{nearest.constraint}; {nearest.remedy or 'take more GPUs'}"
    )
