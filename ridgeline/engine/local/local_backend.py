"""The backend in this process: a loaded model, its runner, its scheduler and the main loop over
them.

    local = LocalBackend("demo", recipe, device="cpu")
    local.submit(ask, live)
    while local.has_work:
        local.advance()
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import cached_property
from multiprocessing.connection import wait

from ridgeline.data import Tokenizer
from ridgeline.engine.backend import Backend, EngineFacts, EngineProgress
from ridgeline.engine.execution.runner import Runner
from ridgeline.engine.execution.tensor_runner import TensorRunner
from ridgeline.engine.execution.work import CostBase, cost_base
from ridgeline.engine.loading.loading import GivenModel
from ridgeline.engine.local.loop import Loop
from ridgeline.engine.local.ranks import Members, load_on_ranks
from ridgeline.engine.sampling.live import LiveRequest
from ridgeline.engine.sampling.matching import Grammars
from ridgeline.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from ridgeline.engine.scheduling.state import Ask, Stats
from ridgeline.engine.speculation.speculation import prepare
from ridgeline.errors import RidgelineError, UnsupportedError
from ridgeline.hardware import Hardware, detect, load_cached
from ridgeline.models import ModelConfig
from ridgeline.progress import Progress
from ridgeline.recipe import Recipe


class LocalBackend:
    """Steps run when `advance` is called, and nothing runs between the calls."""

    num_replicas = 1
    num_restarts = 0
    is_up = True
    broken: RidgelineError | None = None

    def __init__(
        self,
        model: GivenModel,
        recipe: Recipe | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        device: str = "auto",
        num_pages: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        loaded, members = load_on_ranks(model, recipe, tokenizer, device, progress)
        self.model, self.tokenizer, self.recipe, self.memory_plan = loaded[:4]
        self.choices = loaded.choices
        # Every stage's layers share pages and their windows, not only those that are here.
        self.config = replace(self.model.config, layers=loaded.layers or self.model.config.layers)
        self.patience_s = 0.0
        pages = min(num_pages or self.memory_plan.num_pages, self.memory_plan.num_pages)
        draft = loaded.draft
        configs = [self.config] if draft is None else [self.config, draft.config]
        self.runner = self._runner(pages, members)
        draft_bytes = self.memory_plan.bytes_of("draft graphs")
        policy = prepare(self.runner, self.recipe, draft, widest_window(configs), draft_bytes)
        ahead = policy is not None and policy.ahead
        self.scheduler = Scheduler(scheduler_config(configs, self.recipe, pages, ahead))
        self.grammars: Grammars | None = None
        if self.tokenizer is not None:
            self.grammars = Grammars(self.tokenizer, self.config.vocab_size)
        overlap = bool(self.recipe.overlap)
        self.loop = Loop(self.scheduler, self.runner, overlap, self.grammars, policy)

    def _runner(self, num_pages: int, members: Members | None) -> Runner:
        graph_bytes = self.memory_plan.bytes_of("graphs")
        if members is None:
            return Runner(self.model, self.recipe, num_pages, graph_bytes)
        return TensorRunner(
            self.model, self.recipe, num_pages, graph_bytes, members.group, members.end
        )

    # What every backend offers.

    @property
    def has_work(self) -> bool:
        return self.loop.has_work

    @property
    def progress(self) -> EngineProgress:
        return self.loop.progress

    @property
    def stats(self) -> Stats:
        return self.scheduler.stats()

    @cached_property
    def costs(self) -> CostBase:
        base = cost_base(self.model, self.recipe, self.hardware, self.ranks_a_device)
        return replace(base, config=replace(base.config, layers=self.config.layers))

    def wait_until_ready(self) -> EngineFacts:
        return EngineFacts(self.config, self.recipe, self.memory_plan)

    def submit(self, ask: Ask, live: LiveRequest) -> None:
        self.loop.submit(ask, live)

    def cancel(self, request_id: Hashable) -> bool:
        return self.loop.cancel(request_id)

    def advance(self) -> None:
        self.loop.advance()

    def wait(self, others: Sequence[int], seconds: float) -> None:
        if not self.loop.has_work:
            wait(others, seconds)

    def restart(self) -> None:
        raise UnsupportedError(
            "this engine runs in the calling process and cannot be restarted; "
            "use Engine.supervised(...)"
        )

    revive = restart

    def close(self) -> None:
        """End the ranks of tensor parallel that were started for it."""
        self.runner.close()

    # What only a model in this process can offer.

    @property
    def ranks_a_device(self) -> int:
        """How many ranks share a device's bandwidth and matrix units: on a CPU all of them do. What
        `model` costs is one rank's part.
        """
        return self.recipe.parallel.tensor if self.model.embed.weight.device.type == "cpu" else 1

    @property
    def hardware(self) -> Hardware:
        """The device with the ceilings that were measured before; nothing is measured here."""
        device = self.runner.device
        return load_cached(detect("cpu" if device.type == "cpu" else f"cuda:{device.index or 0}"))

    def forget_prefixes(self) -> None:
        self.scheduler.cache.clear()


def as_local(backend: Backend) -> LocalBackend:
    """The backend, if it is in this process."""
    if not isinstance(backend, LocalBackend):
        raise UnsupportedError(
            "the model of this engine is in another process; make it with Engine(...) to reach "
            "the model, to score or to measure"
        )
    return backend


def scheduler_config(
    configs: Sequence[ModelConfig], recipe: Recipe, num_pages: int, ahead_of_drafts: bool = False
) -> SchedulerConfig:
    """For the models that share the pages."""
    limits = recipe.limits.filled()
    return SchedulerConfig(
        num_pages=num_pages,
        page_size=recipe.kv.page_size,
        token_budget=limits.token_budget,
        max_batch=limits.max_batch,
        window=widest_window(configs),
        prefix_cache=recipe.kv.prefix_cache,
        ahead_of_drafts=ahead_of_drafts,
    )


def widest_window(configs: Sequence[ModelConfig]) -> int | None:
    """How many tokens the layer that sees furthest sees; None when one sees all."""
    windows = [layer.window for config in configs for layer in config.layers]
    return None if None in windows else max(window for window in windows if window is not None)
