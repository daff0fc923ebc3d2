"""The search: every option is simulated on the workload's own traffic, the best ones under more and
less of it, until it is known how much each can take and what it gives each user then.

    result = search(config, cluster, workload, Recipe(), ServiceLevel(0.5, 0.04))
    result.best.option.words, result.best.load, result.frontier, result.rejections
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ridgeline.data.workload import Workload
from ridgeline.errors import OutOfMemoryError, UsageError
from ridgeline.models import ModelConfig
from ridgeline.planning.clusters.cluster import Cluster
from ridgeline.planning.serving.fleets.fleet import Fleet, Policy
from ridgeline.planning.serving.fleets.served import RunReport, ServiceLevel, is_carried
from ridgeline.planning.serving.options import Rejection, ServingOption, Ways
from ridgeline.progress import Progress, WholeRun
from ridgeline.recipe import Recipe, dotted_values

NUM_COMPARED = 400  # requests of the workload, that all options are compared on at its rate
LASTING = 0.25  # times as many of them as they come faster, or else they would all come at once
NUM_FINALISTS = 3  # options that are tried with other limits, and then under all loads
MOST_REQUESTS = 1500  # of the workload, that a curve is drawn with
MOST_LOAD = 1024.0  # times the workload's rate
REFINEMENTS = 1  # of the load between the last one carried and the first that is not
CURVE = (0.5, 0.75, 1.0, 1.15)  # of the most that is carried
APART = 1.03  # in tokens/s a user, that points of the frontier are told apart by
LITTLE = 0.01  # of goodput, gained by half the load: less load is no help then
KNEE = 3  # halvings of what lies between the most load carried and the least that is not


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
    tried = _Tried(workload, slo, policy)
    tell = progress or WholeRun()
    edits = list(ways.edits())
    for number, edit in enumerate(edits):
        tell("options", number, len(edits))
        tried.add(ways.option(edit))
    if not tried.capacities:
        more = _enough(cluster, lambda larger: Ways(config, larger, workload, base, slo).fits_any())
        raise _nothing(ways.rejections, cluster, slo, more)
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
    lost = [_less(each, leaders[0], slo) for each in tried.capacities if each not in leaders]
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
    is carried. Of several that are nearly the same, one.
    """
    kept: list[LoadPoint] = []
    carried = [point for point in points if point.is_carried]
    for point in sorted(carried, key=lambda p: (-p.tokens_per_gpu, -p.tokens_per_user)):
        if not kept or point.tokens_per_user > APART * kept[-1].tokens_per_user:
            kept.append(point)
    return kept


class _Capacity(NamedTuple):
    """How much of the compared traffic an option carries."""

    option: ServingOption
    load: float  # times the workload's rate; 0: it does not even carry that
    report: RunReport  # at that load, or at the one it does not carry
    missed: RunReport | None = None  # at the load of an earlier option, where it is too much
    missed_load: float = 0.0

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

    def __init__(self, workload: Workload, slo: ServiceLevel, policy: Policy) -> None:
        self._workload, self._slo, self._policy = workload, slo, policy
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
        """First under the most load that any option before it carried: of one that does not carry
        this only half, a quarter and so on is tried. Otherwise doubling while it is carried, and
        halving what lies between. Without a service level, or where all come at once, it is the
        throughput of all at once.
        """
        sample = self._sample(1.0)
        if self._slo == ServiceLevel() or sample.duration_s == 0:
            report = _run(option, sample.at_once(), self._slo, self._policy)
            return _Capacity(option, round(report.output_tokens_per_s, 1), report)
        carried = max([1.0, *(each.load for each in self.capacities)])
        known = self._at(option, carried)
        if not is_carried(known):
            return self._less(option, carried, known)
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

    def _less(self, option: ServingOption, load: float, missed: RunReport) -> _Capacity:
        tried = load
        while tried > 1.0:
            tried = max(1.0, tried / 2)
            if is_carried(report := self._at(option, tried)):
                return _Capacity(option, tried, report, missed, load)
        return _Capacity(option, 0.0, missed, missed, load)

    def _at(self, option: ServingOption, load: float) -> RunReport:
        return _run(option, self._sample(load).sped_up(load), self._slo, self._policy)

    def _sample(self, load: float) -> Workload:
        wanted = int(NUM_COMPARED * max(1.0, LASTING * load))
        return self._workload.first(min(len(self._workload.requests), wanted, MOST_REQUESTS))


def _rank(point: LoadPoint) -> tuple[float, float, float]:
    """Whether requests keep the service level; then the option's place among the leaders."""
    good = 1.0 if point.is_carried else point.report.goodput or 0.0
    return round(good, 3), -point.place, point.tokens_per_gpu


def _run(option: ServingOption, workload: Workload, slo: ServiceLevel, policy: Policy) -> RunReport:
    return Fleet(option.setups, policy=policy).run(workload).report(slo)


def _curve(
    leader: _Capacity, place: int, workload: Workload, slo: ServiceLevel, policy: Policy
) -> list[LoadPoint]:
    """Under the workload's own load, and parts of the most that is carried."""
    option, reports = leader.option, dict[float, RunReport]()

    def at(load: float) -> RunReport:
        if load not in reports:
            reports[load] = _run(option, workload.sped_up(load), slo, policy)
        return reports[load]

    at(1.0)
    if workload.duration_s > 0 and slo != ServiceLevel():
        most = _knee(leader.load, at)
        for share in CURVE:
            at(round(most * share, 4))
    return [LoadPoint(option, load, reports[load], place) for load in sorted(reports)]


def _knee(guess: float, at: Callable[[float], RunReport]) -> float:
    """The most load that the whole workload is carried with, from what a part of it was."""
    low, high = 0.0, max(guess, 1.0)
    while high < MOST_LOAD and is_carried(at(high)):
        low, high = high, 1.25 * high
    if not low:
        low = high
        while not is_carried(at(low)):
            less = at(low / 2)
            if (less.goodput or 0.0) < (at(low).goodput or 0.0) + LITTLE:
                return low / 2  # the others miss a bound even alone
            low, high = low / 2, low
    for _ in range(KNEE):
        middle = round((low + high) / 2, 4)
        low, high = (middle, high) if is_carried(at(middle)) else (low, middle)
    return low


def _less(each: _Capacity, best: _Capacity, slo: ServiceLevel) -> Rejection:
    """What it gives where the first gives more, and what it could be used for."""
    missed = each.missed
    if missed is not None:
        bound = max(_excesses(missed, slo), key=lambda one: one[1], default=("", 0.0))[0]
        why = (
            f"{bound or 'the service level'} at {each.missed_load:g} times the traffic: "
            f"{missed.goodput:.0%} keep it"
        )
        rate = f"{each.report.requests_per_s:.1f} requests/s"
        fits = f"carries {each.load:g} times it, {rate}" if each.load else "less traffic"
        return Rejection(each.option.words, why, fits)
    if each.report.goodput is None:
        least = best.report.output_tokens_per_s
        why = f"{each.report.output_tokens_per_s:,.0f} tokens/s; the first gives {least:,.0f}"
        return Rejection(each.option.words, why, "")
    why = f"carries {each.load:g} times the traffic, and the first {best.load:g}"
    return Rejection(each.option.words, why, "")


def _excesses(report: RunReport, slo: ServiceLevel) -> list[tuple[str, float]]:
    """By how much each bound is missed at the 90th percentile."""
    bounds = (("TTFT", slo.ttft_s, report.ttft.p90), ("TPOT", slo.tpot_s, report.tpot.p90))
    return [
        (f"{name} p90 {1e3 * reached:.4g} ms of {1e3 * bound:g}", reached / bound)
        for name, bound, reached in bounds
        if bound is not None and reached > bound
    ]


def _enough(cluster: Cluster, does: Callable[[Cluster], bool]) -> str:
    """What can be done: as many GPUs as are enough, planned again."""
    for times in (2, 4, 8, 16):
        pools = tuple(replace(pool, num_gpus=times * pool.num_gpus) for pool in cluster.pools)
        if does(replace(cluster, pools=pools)):
            counts = " + ".join(f"{pool.num_gpus}x{pool.gpu.name}" for pool in pools)
            return f"{counts} would do"
    return f"{times} times as many GPUs do not do either"


def _nothing(
    rejections: Sequence[Rejection], cluster: Cluster, slo: ServiceLevel, more: str
) -> Exception:
    """No option: the one that came closest, and what it lacks."""
    slow = [one for one in rejections if one.excess]
    if slow:
        nearest = min(slow, key=lambda one: one.excess)
        return UsageError(
            f"nothing on {cluster.name} meets this; the closest is {nearest.words}. "
            f"{nearest.constraint}; allow more ({more})"
        )
    nearest = rejections[-1]
    return OutOfMemoryError(
        f"the model fits no way on {cluster.name}; the smallest that was tried, {nearest.words}, "
        f"{nearest.constraint}; {more}"
    )
