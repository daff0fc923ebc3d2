"""The answer to `ridgeline plan --for serve`: what was result as one JSON-ready document, and files
that `ridgeline serve --recipe` takes.

    document = answer("llama-3.1-70b", cluster, workload, slo, result)
    write_plans(Path("."), document)           # plan-1.json, plan-2.json, …
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ridgeline.data.workload import Workload
from ridgeline.formats.files import atomic_write
from ridgeline.planning.clusters.cluster import Cluster
from ridgeline.planning.serving.fleets.served import ServiceLevel
from ridgeline.planning.serving.options import ServingOption
from ridgeline.planning.serving.page import write_serving_page
from ridgeline.planning.serving.search import LoadPoint, ServingAnswer
from ridgeline.planning.serving.tunings import Sureness, sureness
from ridgeline.recipe import VERSION as RECIPE_VERSION

PLAN_VERSION = 1
MOST_PLANS = 3
SECONDS_OF_HOUR, MILLION = 3600.0, 1e6


def answer(
    model: str, cluster: Cluster, workload: Workload, slo: ServiceLevel, result: ServingAnswer
) -> dict[str, Any]:
    best = result.best
    sure = _sureness(best.option, cluster)
    return {
        "plan": PLAN_VERSION,
        "for": "serve",
        "model": model,
        "gpus": cluster.name,
        "cluster": cluster.words(),
        "workload": _workload(workload),
        "service_level": asdict(slo),
        "met": not result.misses,
        "closest": _how_close(result, slo) if result.misses else None,
        "best": _point(best, cluster),
        "most": _point(result.most, cluster),
        "sure": asdict(sure),
        "frontier": [_point(point, cluster) for point in result.frontier],
        "curves": [_point(point, cluster) for point in result.points],
        "why_not": [rejection.to_json() for rejection in result.rejections],
        "num_options": result.num_options,
        "plans": _plans(model, result),
    }


def write_plans(folder: Path, document: Mapping[str, Any]) -> list[Path]:
    """One file a plan, the best first."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number, plan in enumerate(document["plans"], 1):
        path = folder / f"plan-{number}.json"
        with atomic_write(path) as file:
            json.dump(plan, file, indent=2)
            file.write("\n")
        paths.append(path)
    return paths


def write_whole(folder: Path, document: Mapping[str, Any]) -> list[str]:
    """All of the answer, for programs and as a page."""
    path, page = folder / "plan.json", folder / "plan.html"
    with atomic_write(path) as file:
        json.dump(document, file, indent=1)
    write_serving_page(document, page)
    return [str(path), str(page)]


def _plans(model: str, result: ServingAnswer) -> list[dict[str, Any]]:
    """The best, then other options of the frontier."""
    options = [result.best.option]
    for point in result.frontier:
        if point.option not in options:
            options.append(point.option)
    return [_plan(model, option) for option in options[:MOST_PLANS]]


def _plan(model: str, option: ServingOption) -> dict[str, Any]:
    recipe = asdict(option.recipe)
    return {
        "plan": PLAN_VERSION,
        "for": "serve",
        "model": model,
        "option": option.words,
        "replicas": len(option.setups),
        "replicas_by_ranks": Counter(str(each.recipe.parallel.tensor) for each in option.setups),
        "recipe": {"version": RECIPE_VERSION, **recipe},
    }


def command(model: str, plan: Mapping[str, Any], path: Path) -> str:
    """One, or where pools have replicas of different ranks one for each kind."""
    degrees, own = plan["replicas_by_ranks"], plan["recipe"]["parallel"]["tensor"]
    commands = []
    for degree, count in degrees.items():
        ranks = "" if int(degree) == own else f" --tensor-parallel {degree}"
        replicas = f" --replicas {count}" if count > 1 else ""
        commands.append(f"ridgeline serve {model} --recipe {path}{ranks}{replicas}")
    return "; ".join(commands)


def _point(point: LoadPoint, cluster: Cluster) -> dict[str, Any]:
    setup = point.option.setups[0]
    memory = setup.memory
    shown = {
        **point.to_json(),
        "num_gpus": point.option.num_gpus,
        "replicas": len(point.option.setups),
        "kv_pages": memory.num_pages,
        "kv_tokens": memory.num_pages * setup.recipe.kv.page_size,
        "memory": {item.name: item.num_bytes for item in memory.items},
        "free_bytes": memory.free_bytes,
    }
    if cluster.price_per_hour is not None:
        tokens = point.report.output_tokens_per_s * SECONDS_OF_HOUR
        shown["price_per_million_tokens"] = cluster.price_per_hour / tokens * MILLION
    return shown


def _workload(workload: Workload) -> dict[str, Any]:
    count = len(workload.requests)
    return {
        "name": workload.name,
        "requests": count,
        "duration_s": workload.duration_s,
        "mean_prompt_tokens": workload.num_prompt_tokens / count,
        "mean_output_tokens": workload.num_output_tokens / count,
    }


def _sureness(option: ServingOption, cluster: Cluster) -> Sureness:
    """The least sure of the pools'."""
    kinds = [
        sureness(pool.gpu.name, option.setups[0].recipe.parallel.tensor) for pool in cluster.pools
    ]
    return max(kinds, key=lambda each: each.tpot)


def _how_close(result: ServingAnswer, slo: ServiceLevel) -> str:
    """What the best option reaches of a service level that it does not keep, and with how much less
    load it would.
    """
    point, report, parts = result.best, result.best.report, []
    bounds = (("TTFT", slo.ttft_s, report.ttft.p90), ("TPOT", slo.tpot_s, report.tpot.p90))
    for name, bound, reached in bounds:
        if bound is not None and reached > bound:
            parts.append(f"{name} p90 is {1e3 * reached:.4g} ms, {reached / bound:.2g} times it")
    missed = ", ".join(parts) or "nine of ten keep each bound, fewer both"
    words = f"{report.goodput or 0.0:.0%} of requests keep it; {missed}"
    own = [each for each in result.points if each.option is point.option]
    if result.most.is_carried:
        return f"{words}; {result.most.load:.3g} times the load is carried"
    least = min(own, key=lambda each: each.load)
    if least.load == point.load:
        return words
    share = least.report.goodput or 0.0
    return f"{words}; at {least.load:.3g} times the load {share:.0%} do"
