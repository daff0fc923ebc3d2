"""Searches for a whole cluster and for parts of it: fewer GPUs cost more days and often less money,
and of several pools one alone may be the better choice.

    searches = search_sizes(model, cluster, wanted, fitted, keep=5)
    searches[0].num_gpus, searches[0].result.plans
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ridgeline.models import ModelConfig
from ridgeline.planning.clusters.cluster import Cluster, GpuPool
from ridgeline.planning.search.best import SearchResult, find_best
from ridgeline.planning.search.space import WantedRun
from ridgeline.planning.search.why_not import WhyNot, why_nots
from ridgeline.planning.training.constants import Fitted
from ridgeline.progress import Progress

PARTS = (2, 4)  # of a pool, that are searched too
KEPT_OF_PARTS = 1


@dataclass(frozen=True)
class SizedSearch:
    """What was best on so many GPUs of a pool."""

    pool: GpuPool
    num_gpus: int
    result: SearchResult
    why_nots: tuple[WhyNot, ...] = ()  # of the whole


def search_sizes(
    model: ModelConfig, cluster: Cluster, wanted: WantedRun, fitted: Fitted, keep: int,
    progress: Progress | None = None,
) -> tuple[SizedSearch, ...]:  # fmt: skip
    """The whole first."""
    sizes = list(_sizes(cluster))
    searches = []
    for number, pool in enumerate(sizes):
        if progress is not None:
            progress("searching layouts", number, len(sizes))
        kept = KEPT_OF_PARTS if number else keep
        result = find_best(model, pool, pool.num_gpus, wanted, fitted, kept)
        answers = () if number else why_nots(result, pool, fitted)
        kept_cores = () if result.plans else result.cores  # which say what comes nearest
        result = replace(result, cores=kept_cores, fitting=())
        searches.append(SizedSearch(pool, pool.num_gpus, result, answers))
    return tuple(searches)


def joined_pool(cluster: Cluster) -> GpuPool:
    """All GPUs, each as fast as the slowest and with the memory of the smallest: in one training
    run they wait for each other.
    """
    slowest = min(cluster.pools, key=lambda pool: pool.gpu.bf16 or 0.0)
    network = min(pool.network_bytes_s for pool in cluster.pools)
    if len(cluster.pools) == 1:
        return slowest
    memory = min(pool.gpu.memory_gb for pool in cluster.pools)
    node = replace(slowest.node, nic_gbit=slowest.node.nic_gbit * network
                   / max(slowest.network_bytes_s, 1.0))  # fmt: skip
    total = cluster.price_per_hour
    price = None if total is None else total / cluster.num_gpus
    gpu = replace(slowest.gpu, memory_gb=memory)
    return GpuPool(gpu, cluster.num_gpus, node, price)


def _sizes(cluster: Cluster) -> Iterator[GpuPool]:
    whole = joined_pool(cluster)
    yield whole
    if len(cluster.pools) > 1:
        yield from cluster.pools
        return
    for part in PARTS:
        if whole.num_gpus % part == 0 and whole.num_nodes % part == 0 and whole.num_nodes >= part:
            yield replace(whole, num_gpus=whole.num_gpus // part)
