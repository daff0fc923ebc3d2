"""The ways to serve a model on a cluster: how many ranks a replica has, the scheme of weights, the
dtype of pages, how many requests and tokens a step takes. Each is a `ServingOption`, replicas with
what they are, or a `Rejection` with what it lacks and what would do.

    ways = Ways(config, cluster, workload, Recipe(), slo)
    for edit in ways.edits(): option = ways.option(edit)
    ways.rejections
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from statistics import median
from typing import Any

from ridgeline.data.workload import Workload
from ridgeline.engine.loading.supported import check_supported
from ridgeline.errors import OutOfMemoryError, UnsupportedError, UsageError
from ridgeline.models import ModelConfig
from ridgeline.planning.clusters.cluster import Cluster, GpuPool
from ridgeline.planning.serving.fleets.served import ServiceLevel
from ridgeline.planning.serving.setup import EngineSetup, engine_setup, for_workload
from ridgeline.planning.serving.step_times import PredictedTimes
from ridgeline.planning.serving.sustained import sustained
from ridgeline.planning.serving.tunings import tuning_for
from ridgeline.recipe import Recipe, edited_at_once

BATCHES, BUDGETS = (128, 32), (2048, 512)  # beside what the engine takes by itself
DEGREES = (1, 2, 4, 8, 16, 32, 64)
Edit = Mapping[str, Any]  # of a recipe


@dataclass(frozen=True)
class ServingOption:
    """A fleet."""

    recipe: Recipe  # as a user would write it: what "auto" says is left to the engine
    setups: tuple[EngineSetup, ...]  # one a replica

    @property
    def num_gpus(self) -> int:
        return sum(setup.num_gpus for setup in self.setups)

    @property
    def words(self) -> str:
        setup, recipe = self.setups[0], self.setups[0].recipe
        tensor = sorted({each.recipe.parallel.tensor for each in self.setups})
        return (
            f"{recipe.scheme or recipe.dtype}, KV {recipe.kv.dtype}, "
            f"TP {'+'.join(map(str, tensor))} x {len(self.setups)}, "
            f"batch {setup.scheduler.max_batch}, {setup.scheduler.token_budget} a step"
        )


@dataclass(frozen=True)
class Rejection:
    words: str  # the option
    constraint: str  # that it does not meet
    remedy: str  # the smallest change that was planned again and does
    excess: float = 0.0  # times what is allowed, where that is a time

    def to_json(self) -> dict[str, str]:
        return {"option": self.words, "constraint": self.constraint, "remedy": self.remedy}


class Ways:
    """What `base` says itself is kept; what it leaves open is tried."""

    def __init__(
        self,
        config: ModelConfig,
        cluster: Cluster,
        workload: Workload,
        base: Recipe,
        slo: ServiceLevel,
    ) -> None:
        self._config, self._pools, self._slo = config, cluster.pools, slo
        self._recipe = for_workload(base, config, workload)
        self._prompt = int(median(one.num_prompt_tokens for one in workload.requests))
        self._hardware = [sustained(pool) for pool in cluster.pools]
        self._times: dict[tuple[Any, ...], PredictedTimes] = {}
        self.rejections: list[Rejection] = []

    def edits(self) -> Iterator[dict[str, Any]]:
        """Scheme, pages and ranks."""
        recipe = self._recipe
        eight_bit = self._eight_bit()
        schemes = [recipe.scheme] if recipe.scheme else [eight_bit, None, "int4-g128"]
        dtypes = [recipe.kv.dtype] if recipe.kv.dtype != "auto" else [eight_bit, "auto"]
        for scheme, kv, tensor in product(schemes, dtypes, self._degrees(self._pools[0])):
            yield {"scheme": scheme, "kv.dtype": kv, "parallel.tensor": tensor}

    def limits(self) -> Iterator[dict[str, Any]]:
        """Lower ones than the engine takes by itself, where none are given."""
        given = self._recipe.limits
        batches = (None,) if given.max_batch else (None, *BATCHES)
        budgets = (None,) if given.token_budget else (None, *BUDGETS)
        for batch, budget in product(batches, budgets):
            edit = {}
            if batch is not None:
                edit["limits.max_batch"] = batch
            if budget is not None:
                edit["limits.token_budget"] = max(budget, batch or given.max_batch or 512)
            if edit:
                yield edit

    def option(self, edit: Edit) -> ServingOption | None:
        """None for what is among the rejections from now on, each with the smallest change that
        was planned again and does.
        """
        made = self._made(edit)
        if isinstance(made, ServingOption):
            return made
        self.rejections.append(replace(made, remedy=self._remedy(edit, made)))
        return None

    def fits_any(self) -> bool:
        return any(isinstance(self._made(edit), ServingOption) for edit in self.edits())

    def _made(self, edit: Edit) -> ServingOption | Rejection:
        recipe = edited_at_once(self._recipe, edit)
        setups: list[EngineSetup] = []
        for index in range(len(self._pools)):
            try:
                setups += self._on_pool(index, recipe)
            except (OutOfMemoryError, UnsupportedError, UsageError) as error:
                constraint, _, remedy = str(error).partition("; ")
                return Rejection(_in_words(recipe), constraint, remedy)
        option = ServingOption(recipe, tuple(setups))
        return self._too_slow(option) or option

    def _remedy(self, edit: Edit, known: Rejection) -> str:
        for change in self._changes(edit):
            made = self._made({**edit, **change})
            if isinstance(made, ServingOption):
                return f"{_in_words(made.recipe)} does"
        return known.remedy

    def _changes(self, edit: Edit) -> Iterator[dict[str, Any]]:
        """Other pages, another scheme, more ranks or fewer, and then two of these."""
        eight_bit = self._eight_bit()
        pages: list[dict[str, Any]] = []
        if edit["kv.dtype"] == "auto":
            pages.append({"kv.dtype": eight_bit})
        schemes: list[dict[str, Any]] = [
            {"scheme": name} for name in (eight_bit, "int4-g128") if name != edit["scheme"]
        ]
        every, own = self._degrees(self._pools[0]), edit["parallel.tensor"]
        ordered = sorted((each for each in every if each != own), key=lambda n: (n < own, n))
        ranks: list[dict[str, Any]] = [{"parallel.tensor": degree} for degree in ordered]
        yield from (*pages, *schemes, *ranks)
        yield from ({**one, **other} for one in schemes for other in (*pages, *ranks))

    def _eight_bit(self) -> str:
        return "fp8" if all(pool.rate("fp8") is not None for pool in self._pools) else "int8"

    def token_s(self, option: ServingOption) -> float:
        """Of a token where one request is alone."""
        return min(_token_s(setup, self._prompt) for setup in option.setups)

    def _degrees(self, pool: GpuPool) -> list[int]:
        given = self._recipe.parallel.tensor
        return [given] if given > 1 else [degree for degree in DEGREES if degree <= pool.domain]

    def _on_pool(self, index: int, recipe: Recipe) -> list[EngineSetup]:
        """As many replicas as there are GPUs for. On other pools than the first with as many ranks
        as there, or the fewest more that fit.
        """
        pool, wanted = self._pools[index], recipe.parallel.tensor
        degrees = [wanted]
        if index:
            degrees += [degree for degree in self._degrees(pool) if degree > wanted]
        for degree in degrees:
            try:
                setup = self._setup(index, edited_at_once(recipe, {"parallel.tensor": degree}))
            except OutOfMemoryError:
                if degree == degrees[-1]:
                    raise
                continue
            break
        count = pool.num_gpus // setup.num_gpus
        if not count:
            raise UsageError(
                f"a replica takes {setup.num_gpus} GPUs, and there are {pool.num_gpus}; "
                f"give {setup.num_gpus}"
            )
        return [setup] * count

    def _setup(self, index: int, recipe: Recipe) -> EngineSetup:
        """Setups that differ in their limits alone share what steps take."""
        hardware, gpu = self._hardware[index], self._pools[index].gpu.name
        key = (index, recipe.scheme, recipe.kv.dtype, recipe.parallel.tensor)
        setup = engine_setup(
            self._config, recipe, hardware, tuning_for(gpu), times=self._times.get(key)
        )
        check_supported(replace(setup.recipe, scheme=None, head="plain"), hardware.device)
        self._times[key] = setup.times
        return setup

    def _too_slow(self, option: ServingOption) -> Rejection | None:
        """Where the shortest of times is too long already: one request alone."""
        slo, remedy = self._slo, "no option here does"
        if slo.ttft_s is not None:
            ttft_s = min(alone_s(setup, self._prompt) for setup in option.setups)
            if ttft_s > slo.ttft_s:
                why = (
                    f"TTFT: a prompt of {self._prompt} tokens alone takes {1e3 * ttft_s:.0f} ms, "
                    f"and {1e3 * slo.ttft_s:.0f} are allowed"
                )
                return Rejection(option.words, why, remedy, ttft_s / slo.ttft_s)
        if slo.tpot_s is not None:
            tpot_s = self.token_s(option)
            if tpot_s > slo.tpot_s:
                why = (
                    f"TPOT: a request alone takes {1e3 * tpot_s:.2g} ms a token, and "
                    f"{1e3 * slo.tpot_s:g} are allowed"
                )
                return Rejection(option.words, why, remedy, tpot_s / slo.tpot_s)
        return None


def alone_s(setup: EngineSetup, prompt: int) -> float:
    """Until the first token of a prompt, in as many steps as its tokens take."""
    seconds, past = setup.times.tuning.request_s, 0
    zero = [0] * len(setup.times.windows)
    while past < prompt:
        new = min(prompt - past, setup.scheduler.token_budget)
        seconds += setup.times.seconds(new, 1, zero, new * past + new * (new + 1) // 2)
        past += new
    return seconds


def _token_s(setup: EngineSetup, context: int) -> float:
    return setup.times.seconds(1, 1, [context] * len(setup.times.windows), 0, context)


def _in_words(recipe: Recipe) -> str:
    pages = "bf16" if recipe.kv.dtype == "auto" else recipe.kv.dtype
    return f"{recipe.scheme or 'bf16'}, KV {pages}, TP {recipe.parallel.tensor}"
