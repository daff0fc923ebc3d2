"""The ways to serve a model on a cluster: how many ranks a replica has, the scheme of weights, the
dtype of pages, how many requests and tokens a step takes. Each is either an `Option`, replicas with
what they are, or a `Rejection` with what it lacks and what would do.

    options, rejections = options_of(config, cluster, workload, Recipe(), slo)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import Any

from ridgeline.data.workload import Workload
from ridgeline.engine.loading.supported import check_supported
from ridgeline.errors import OutOfMemoryError, UnsupportedError, UsageError
from ridgeline.models import ModelConfig
from ridgeline.planning.clusters.cluster import Cluster, GpuPool
from ridgeline.planning.serving.served import ServiceLevel
from ridgeline.planning.serving.setup import EngineSetup, engine_setup, for_workload
from ridgeline.planning.serving.sustained import sustained
from ridgeline.planning.serving.tunings import tuning_for
from ridgeline.recipe import Recipe, edited_at_once

BATCHES = (512, 128, 32)
BUDGETS = (8192, 2048)


@dataclass(frozen=True)
class Option:
    """A fleet: for each pool of the cluster, how many replicas of which kind."""

    recipe: Recipe  # as a user would write it: what "auto" says is left to the engine
    setups: tuple[EngineSetup, ...]  # one a replica

    @property
    def num_gpus(self) -> int:
        return sum(setup.num_gpus for setup in self.setups)

    @property
    def words(self) -> str:
        setup, recipe = self.setups[0], self.setups[0].recipe
        scheme = recipe.scheme or recipe.dtype
        tensor = sorted({each.recipe.parallel.tensor for each in self.setups})
        return (
            f"{scheme}, KV {recipe.kv.dtype}, TP {'+'.join(map(str, tensor))} x "
            f"{len(self.setups)}, batch {setup.scheduler.max_batch}, "
            f"{setup.scheduler.token_budget} a step"
        )


@dataclass(frozen=True)
class Rejection:
    words: str  # the option
    constraint: str  # that it does not meet
    remedy: str  # the smallest change that was planned and fits, or what was found

    def to_json(self) -> dict[str, str]:
        return {"option": self.words, "constraint": self.constraint, "remedy": self.remedy}


def options_of(
    config: ModelConfig,
    cluster: Cluster,
    workload: Workload,
    base: Recipe,
    slo: ServiceLevel,
) -> tuple[list[Option], list[Rejection]]:
    """What `base` says itself is kept; what it leaves open is tried."""
    options, rejections = [], []
    recipe = for_workload(base, config, workload)
    for edit in _edits(recipe, cluster):
        for made in _on_cluster(config, cluster, edited_at_once(recipe, edit), edit):
            reason = made if isinstance(made, Rejection) else _too_slow(made, workload, slo)
            if reason is not None:
                rejections.append(reason)
            elif isinstance(made, Option):
                options.append(made)
    return options, rejections


def _edits(recipe: Recipe, cluster: Cluster) -> Iterator[dict[str, Any]]:
    """Of a recipe's fields that were left open."""
    has_fp8 = all(pool.rate("fp8") is not None for pool in cluster.pools)
    schemes = [recipe.scheme] if recipe.scheme else [None, "fp8" if has_fp8 else "int8", "int4-g128"]
    pages = [recipe.kv.dtype] if recipe.kv.dtype != "auto" else ["auto", "fp8" if has_fp8 else "int8"]
    batches = [recipe.limits.max_batch] if recipe.limits.max_batch else list(BATCHES)
    budgets = [recipe.limits.token_budget] if recipe.limits.token_budget else list(BUDGETS)
    for scheme, kv, batch, budget in product(schemes, pages, batches, budgets):
        yield {
            "scheme": scheme,
            "kv.dtype": kv,
            "limits.max_batch": batch,
            "limits.token_budget": max(batch, budget),
        }


def _degrees(recipe: Recipe, pool: GpuPool) -> list[int]:
    if recipe.parallel.tensor > 1:
        return [recipe.parallel.tensor]
    most = pool.domain
    return [degree for degree in (1, 2, 4, 8, 16, 32, 64) if degree <= most]


def _on_cluster(
    config: ModelConfig, cluster: Cluster, recipe: Recipe, edit: Mapping[str, Any]
) -> Iterator[Option | Rejection]:
    """With each number of ranks; of several pools, all with the same, or the least that fits."""
    pools = cluster.pools
    for degree in _degrees(recipe, pools[0]):
        setups: list[EngineSetup] = []
        given = edited_at_once(recipe, {"parallel.tensor": degree})
        for pool in pools:
            made = _on_pool(config, pool, recipe, degree if pool is pools[0] else None)
            if isinstance(made, str):
                yield Rejection(f"{_in_words(edit)}, TP {degree}", *_split(made))
                break
            setups += made
        else:
            yield Option(given, tuple(setups))


def _on_pool(
    config: ModelConfig, pool: GpuPool, recipe: Recipe, degree: int | None
) -> list[EngineSetup] | str:
    """A replica for as many GPUs as there are; or why there can be none."""
    hardware = sustained(pool)
    why = ""
    for tensor in [degree] if degree is not None else _degrees(recipe, pool):
        tried = edited_at_once(recipe, {"parallel.tensor": tensor})
        try:
            setup = engine_setup(config, tried, hardware, tuning_for(pool.gpu.name))
            check_supported(setup.recipe, "cuda:0")
        except (OutOfMemoryError, UnsupportedError, UsageError) as error:
            why = str(error)
            continue
        count = pool.num_gpus // tensor
        if count:
            return [setup] * count
        why = f"a replica takes {tensor} GPUs, and there are {pool.num_gpus}; give {tensor}"
    return why


def _too_slow(option: Option, workload: Workload, slo: ServiceLevel) -> Rejection | None:
    """Where the shortest of times is too long already: one request alone."""
    prompt = int(median(request.num_prompt_tokens for request in workload.requests))
    best_ttft = min(_alone_s(setup, prompt) for setup in option.setups)
    if slo.ttft_s is not None and best_ttft > slo.ttft_s:
        return Rejection(
            option.words,
            f"TTFT: a prompt of {prompt} tokens alone takes {1e3 * best_ttft:.0f} ms, and "
            f"{1e3 * slo.ttft_s:.0f} are allowed",
            "more ranks a replica, or a smaller scheme",
        )
    keys = [prompt] * len(option.setups[0].times.windows)
    best_tpot = min(setup.times.seconds(1, 1, keys, 0) for setup in option.setups)
    if slo.tpot_s is not None and best_tpot > slo.tpot_s:
        return Rejection(
            option.words,
            f"TPOT: a request alone takes {1e3 * best_tpot:.1f} ms a token, and "
            f"{1e3 * slo.tpot_s:.1f} are allowed",
            "more ranks a replica, or a smaller scheme",
        )
    return None


def _alone_s(setup: EngineSetup, prompt: int) -> float:
    """Of a prompt in as many steps as its tokens take."""
    seconds, past = setup.times.tuning.request_s, 0
    zero = [0] * len(setup.times.windows)
    while past < prompt:
        new = min(prompt - past, setup.scheduler.token_budget)
        seconds += setup.times.seconds(new, 1, zero, new * past + new * (new + 1) // 2)
        past += new
    return seconds


def _in_words(edit: Mapping[str, Any]) -> str:
    return (
        f"{edit['scheme'] or 'bf16'}, KV {edit['kv.dtype']}, batch {edit['limits.max_batch']}, "
        f"{edit['limits.token_budget']} a step"
    )


def _split(message: str) -> tuple[str, str]:
    """What is wrong, and what to do about it."""
    constraint, _, remedy = message.partition("; ")
    return constraint, remedy
