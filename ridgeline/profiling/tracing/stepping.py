"""Steps of one kind, again and again, through the engine itself: decode steps at a batch and a
context, and prefills of some prompts.

Of decode steps the prompts are not computed: the scheduler is taken through them alone, and pages
hold random numbers. Only where several ranks share the model, who must all have them, are they
computed. What follows is the engine's own loop, planning and bookkeeping included.

    steps = EngineSteps(engine)
    with steps.decoding(batch=8, context=2048, num_steps=60) as step:
        timing = time_loop(step, 30)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from itertools import count, islice
from typing import Any, Protocol

import torch
from torch import Tensor

from ridgeline.engine import Engine, Sampling
from ridgeline.engine.execution.graph_kinds import length_bound
from ridgeline.engine.execution.step_watch import StepWatch
from ridgeline.engine.execution.tensor_runner import TensorRunner
from ridgeline.engine.sampling.outputs import Output
from ridgeline.engine.steps.notes import Note
from ridgeline.errors import (
    ContextLengthError,
    OutOfMemoryError,
    RequestError,
    UnsupportedError,
    UsageError,
)
from ridgeline.kernels.pages import Pages, holds_codes
from ridgeline.models import Transformer
from ridgeline.models.cost import Chunk
from ridgeline.parallel.inference.group import Group
from ridgeline.profiling.tracing.communication import NotedLink
from ridgeline.recipe import Recipe, flag

SPARE = 4  # tokens a request could still make behind the last step
StepFunction = Callable[[], object]


class ProfiledSteps(Protocol):
    """What a profile asks of whoever runs a model's steps."""

    model: Transformer  # as it is run
    recipe: Recipe  # with nothing left open
    loop: Any  # "engine" or "naive"
    device: torch.device
    pages: Pages | None  # of the first layer
    num_ranks: int  # that run the steps together; the model is the first one's part
    ranks_a_device: int  # that share the device's ceilings

    def decoding(self, batch: int, context: int, num_steps: int) -> Any: ...

    def prefilling(self, batch: int, length: int) -> Any: ...

    def pieces(self, batch: int, length: int) -> list[list[Chunk]]: ...

    def noting(self, notes: list[Note] | None) -> None: ...

    def by_hand(self, yes: bool) -> bool: ...

    def watched_by(self, watch: StepWatch | None) -> bool: ...


class EngineSteps:
    loop = "engine"

    def __init__(self, engine: Engine) -> None:
        if engine.recipe.parallel.pipeline > 1:
            raise UnsupportedError(
                "a profile follows one rank through all layers, and a pipeline's stages have some "
                "each; leave --pipeline-parallel out"
            )
        self.engine, self.recipe, self.runner = engine, engine.recipe, engine.runner
        self.group: Group | None = None
        if isinstance(engine.runner, TensorRunner):
            self.group = engine.runner.group
            self._link = self.group.data
        self.num_ranks = 1 if self.group is None else self.group.size
        self.ranks_a_device = engine.ranks_a_device
        assert engine.recipe.speculation.method == "none", "plain steps are profiled"
        self.model, self.device = engine.runner.model, engine.runner.device
        self.pages: Pages | None = engine.runner.kv.layers[0]

    @contextmanager
    def decoding(self, batch: int, context: int, num_steps: int) -> Iterator[StepFunction]:
        """`num_steps` calls of what is given, with sequences that have about `context` tokens: in
        the middle of them, where one graph serves all of these lengths.
        """
        first = self._first_length(batch, context, num_steps)
        lead = self._prompt_steps(batch, first)
        first = max(1, first - lead)
        self.engine.forget_prefixes()
        sampling = Sampling(max_tokens=lead + num_steps + SPARE, ignore_eos=True, seed=0)
        ids = [("profile", row) for row in range(batch)]
        try:
            for row, request_id in enumerate(ids):
                self.engine.add(self._prompt(row, first), sampling, request_id=request_id)
            if self.group is None:
                self._skip_prompts(batch, sampling)
            else:
                self._compute_prompts(batch)
            yield self.engine.step
        finally:
            self._end(ids)

    @contextmanager
    def mixing(
        self, batch: int, context: int, num_prompts: int, length: int, num_steps: int
    ) -> Iterator[StepFunction]:
        """As `decoding`; beside those sequences each call takes `num_prompts` prompts of `length`
        tokens to their first token, in the same step.
        """
        budget = self.engine.scheduler.token_budget
        if batch + num_prompts * length > budget:
            raise UsageError(
                f"{batch} rows and {num_prompts} x {length} tokens are more than a step has "
                f"({budget}); give a larger {flag('limits.token_budget')}"
            )
        sampling = Sampling(max_tokens=1, ignore_eos=True, seed=0)
        numbers = count(batch)
        with self.decoding(batch, context, num_steps) as step:

            def mixed() -> object:
                for number in islice(numbers, num_prompts):
                    prompt = self._prompt(number, length)
                    self.engine.add(prompt, sampling, request_id=("profile", number))
                return step()

            yield mixed

    @contextmanager
    def prefilling(self, batch: int, length: int) -> Iterator[StepFunction]:
        """Each call takes `batch` prompts of this length to their first token."""
        limits = self.recipe.limits.filled()
        self._check_room(batch, length + 1, limits.max_context)
        prompts = [self._prompt(row, length) for row in range(batch)]
        sampling = Sampling(max_tokens=1, ignore_eos=True, seed=0)
        ids = [("profile", row) for row in range(batch)]

        def run() -> None:
            self.engine.forget_prefixes()
            for request_id, prompt in zip(ids, prompts, strict=True):
                self.engine.add(prompt, sampling, request_id=request_id)
            while self.engine.has_work:
                self.engine.step()

        try:
            yield run
        finally:
            self._end(ids)

    def pieces(self, batch: int, length: int) -> list[list[Chunk]]:
        """The steps that a prefill is made of: prompts in order, cut where the budget ends."""
        steps: list[list[Chunk]] = [[]]
        budget = room = self.engine.scheduler.token_budget
        for _ in range(batch):
            past = 0
            while past < length:
                if not room:
                    steps.append([])
                    room = budget
                new = min(room, length - past)
                steps[-1].append(Chunk(new, past))
                past, room = past + new, room - new
        return steps

    def noting(self, notes: list[Note] | None) -> None:
        self.runner.notes = notes
        if self.group is not None:
            self.group.data = self._link if notes is None else NotedLink(self._link, notes)

    def by_hand(self, yes: bool) -> bool:
        """Whether steps are replayed as graphs otherwise."""
        if self.runner.graphs is None or not self.runner.graphs.captured:
            return False
        self.runner.graphs.by_hand = yes
        return True

    def watched_by(self, watch: StepWatch | None) -> bool:
        """Whether it is told of each step."""
        self.runner.watch = watch
        return True

    def _first_length(self, batch: int, context: int, num_steps: int) -> int:
        longest = self.recipe.limits.filled().max_context
        if context > longest:
            raise ContextLengthError(
                f"--context is {context}; max_context is {longest}; give at most {longest}"
            )
        last = min(longest, context + num_steps // 2 + 1)
        first = _of_one_graph(max(1, last - num_steps - 1), context, num_steps)
        if first + num_steps >= longest:
            raise ContextLengthError(
                f"{num_steps} steps do not fit into a context of {longest}; give fewer --steps"
            )
        self._check_room(batch, first + num_steps + SPARE, longest)
        return first

    def _check_room(self, batch: int, length: int, longest: int) -> None:
        config = self.engine.scheduler.config
        if length > longest:
            raise ContextLengthError(
                f"sequences would have {length} tokens; max_context is {longest}; give a smaller "
                "--context or --prefill"
            )
        if batch > config.max_batch:
            raise UsageError(
                f"--batch is {batch}; max_batch is {config.max_batch}; give at most that, or raise "
                f"{flag('limits.max_batch')}"
            )
        pages = -(-length // config.page_size)
        if batch * pages > config.num_pages:
            raise OutOfMemoryError(
                f"{batch} sequences of {length} tokens need {batch * pages} pages of the KV cache; "
                f"memory has {config.num_pages}; give a --batch of at most "
                f"{config.num_pages // pages}, a shorter context, or {flag('kv.dtype')} fp8"
            )

    def _prompt(self, row: int, length: int) -> list[int]:
        """Random ids, of which no two prompts begin alike."""
        vocab = self.model.config.vocab_size
        generator = torch.Generator().manual_seed(row)
        ids: list[int] = torch.randint(0, vocab, (length,), generator=generator).tolist()
        return [row % vocab, *ids[1:]]

    def _prompt_steps(self, batch: int, length: int) -> int:
        """Steps until all prompts are computed. The first ones have as many tokens more by then."""
        budget, left, count = self.engine.scheduler.token_budget, batch * length, 0
        while left > 0:
            decoding = batch - -(-left // length)
            left, count = left - max(1, budget - decoding), count + 1
        return count

    def _compute_prompts(self, batch: int) -> None:
        while self.engine.scheduler.num_decoding < batch:
            ended = [event for event in self.engine.step() if isinstance(event, Output)]
            if ended:
                raise RequestError(f"a prompt was not computed: {ended[0].reason}")

    def _skip_prompts(self, batch: int, sampling: Sampling) -> None:
        """The scheduler hears that the prompts were computed; the device has their pages."""
        scheduler = self.engine.scheduler
        entries: list[tuple[int, int, int]] = []  # seat, index, page
        while scheduler.num_decoding < batch:
            plan = scheduler.plan(time.monotonic())
            assert plan is not None, "prompts that fit are planned"
            for seat, key in plan.joined:
                length = len(scheduler.known_tokens(key))
                self.runner.sampler.seats.sit(seat, length, sampling, sampling.sample_seed(key[1]))
            entries += zip(plan.table_seats, plan.table_indexes, plan.table_pages, strict=True)
            scheduler.receive(plan.step_id, [0] * len(plan.sample_keys))
        seats, indexes, pages = torch.tensor(entries, device=self.device).unbind(1)
        self.runner.buffers.page_table[seats, indexes] = pages.int()
        for layer in self.runner.kv.layers:
            for tensor in (each for each in layer if each is not None):
                _fill(tensor, pages)

    def _end(self, ids: list[tuple[str, int]]) -> None:
        for request_id in ids:
            wanted: Hashable = request_id
            self.engine.cancel(wanted)
        while self.engine.has_work:
            self.engine.step()
        self.engine.forget_prefixes()


def _of_one_graph(first: int, context: int, num_steps: int) -> int:
    """Where sequences begin, so that all steps are within one bound of decode graphs' lengths: a
    graph that is captured halfway would be timed and traced.
    """
    bound = length_bound(first)
    if first + num_steps <= bound:
        return first
    return max(1, bound - num_steps) if context <= bound else bound


def _fill(tensor: Tensor, pages: Tensor) -> None:
    """Random numbers of usual size into these pages; the same in each."""
    one = torch.empty(tensor.shape[1:], dtype=torch.float32, device=tensor.device).normal_()
    if tensor.dim() == 3:  # scales
        tensor[pages] = (0.01 + 0.001 * one.abs()).to(tensor.dtype)
    elif holds_codes(tensor.dtype):
        codes = (40.0 * one).clamp(-100, 100).to(tensor.dtype)
        tensor.view(torch.uint8)[pages] = codes.view(torch.uint8)
    else:
        tensor[pages] = one.to(tensor.dtype)
