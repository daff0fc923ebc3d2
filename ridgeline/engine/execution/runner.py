"""Runs steps on the device: a plan goes in, tokens come out one step later.

`launch` enqueues a whole step and returns without waiting: the plan's numbers in one copy
(sender.py), the forward pass (forward.py) and the sampling (step_sampler.py) as two graphs where
they were captured (graphs.py), and the copy of the tokens back to the host. `collect` waits for
them. The next step may be launched before: tokens that have not reached the host are taken from
where the last step left them on the device. On a CPU all of it happens at once, by the same code
without graphs.

    in_flight = runner.launch(plan, jobs, scheduler.known_tokens)
    output = runner.collect(in_flight)          # tokens, one for each sample of the plan
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.engine.attention.kv_cache import KVCache
from ridgeline.engine.execution.buffers import StepBuffers
from ridgeline.engine.execution.faults import (
    is_out_of_memory,
    raise_if_lost,
    reason_of,
    run_in_parts,
)
from ridgeline.engine.execution.forward import ForwardPass
from ridgeline.engine.execution.graphs import Graphs
from ridgeline.engine.execution.sender import StepSender
from ridgeline.engine.execution.step_pass import PassKind, PassResult, SamplingKind, StepPass
from ridgeline.engine.execution.step_sampler import StepSampler
from ridgeline.engine.execution.step_watch import StepWatch
from ridgeline.engine.loading.switches import switches
from ridgeline.engine.sampling import extras
from ridgeline.engine.sampling.drafter import Drafter, KnownTokens
from ridgeline.engine.sampling.extras import Extras, Jobs, Pending
from ridgeline.engine.scheduling.step_plan import StepPlan
from ridgeline.engine.steps.batch import StepInputs, StepShape, shape_of
from ridgeline.engine.steps.flat_plan import (
    flattened,
    of_fresh_prompts,
    of_own_sequences,
    without_drafts,
)
from ridgeline.engine.steps.notes import Note
from ridgeline.engine.steps.transfer import to_host
from ridgeline.formats.dtypes import parse_dtype
from ridgeline.models import Transformer
from ridgeline.recipe import Recipe

log = logging.getLogger(__name__)


@dataclass
class InFlight:
    """A step that was launched."""

    plan: StepPlan  # as it was run: without its drafts, if it failed with them
    # [2, R], one for each row of logits: tokens, and whether their logits held NaN; with drafts
    # [5, R], the verdicts on samples behind them. On the host, once `event` is.
    results: Tensor
    event: torch.cuda.Event | None
    pending: Pending
    failed: dict[Hashable, str]  # requests that could not be run, and why
    out_of_memory: bool  # whether it had to be run in parts


class Verdicts(NamedTuple):
    """On drafts, for each sample: see drafter.py."""

    counts: list[int]
    first_right: list[int]
    matches: list[int]


@dataclass(frozen=True)
class StepOutput:
    tokens: list[int]  # one for each row of logits: with drafts several for a sample
    is_nan: list[bool]
    extras: Extras = field(default_factory=Extras)
    verdicts: Verdicts | None = None  # where there are drafts and somebody wants them


class Runner:
    """`recipe` has nothing left to "auto"."""

    graphs_type = Graphs

    def __init__(
        self, model: Transformer, recipe: Recipe, num_pages: int, graph_bytes: int = 0
    ) -> None:
        config, limits = model.config, recipe.limits.filled()
        self.device = model.embed.weight.device
        self.max_context, self.max_batch = limits.max_context, limits.max_batch
        kv_dtype = parse_dtype(recipe.kv.dtype)
        self.kv = KVCache(config, kv_dtype, num_pages, recipe.kv.page_size, self.device)
        self.buffers = StepBuffers.for_recipe(recipe, self.device)
        self.sampler = StepSampler(self.buffers, config.vocab_size, recipe.deterministic)
        self.sender = StepSender(self.buffers, self.sampler.seats, recipe.kv.page_size)
        self.passes = ForwardPass(model, recipe, self.kv, self.buffers)
        self.switches = switches(recipe)
        self.watch: StepWatch | None = None  # told of each step, where somebody measures
        self.graphs: Graphs | None = None
        if recipe.graphs and self.device.type == "cuda":
            self.graphs = self.graphs_type(
                self, limits.max_graph_batch, limits.max_context, graph_bytes
            )

    @property
    def model(self) -> Transformer:
        """As it is run: see forward.py."""
        return self.passes.model

    @property
    def max_rows(self) -> int:
        return self.buffers.max_rows

    @property
    def drafter(self) -> Drafter | None:
        return self.sampler.drafter

    @drafter.setter
    def drafter(self, drafter: Drafter | None) -> None:
        self.sampler.drafter = drafter

    @property
    def notes(self) -> list[Note] | None:
        """Ops of steps without a graph in their order, where somebody traces."""
        return self.sampler.notes

    @notes.setter
    def notes(self, notes: list[Note] | None) -> None:
        self.sampler.notes = notes

    @property
    def judges(self) -> bool:
        return self.sampler.judges

    @property
    def moves(self) -> bool:
        """Whether a step may go on behind drafts that have not come back: where drafts are judged
        on the device, and are decode rows.
        """
        return self.judges and not self.passes.sequences.whole_rows

    # --- a step -------------------------------------------------------------------------------

    @torch.inference_mode()
    def launch(self, plan: StepPlan, jobs: Jobs, known_tokens: KnownTokens) -> InFlight:
        """Enqueue a step. A request that cannot be run is named in `failed`; the others run."""
        self.kv.copy_pages(plan.copies)
        if self.drafter is not None:
            self.drafter.follow(plan)
        failed = self._seat(plan, jobs, known_tokens)
        with self.switches():
            plan, result, out_of_memory = self._run_whole(plan, jobs, failed, known_tokens)
        self.end_step(plan, result.kept)
        # All of them go to the host: a part would be packed first.
        results = to_host(self.buffers.results)[:, : len(plan.logit_tokens)]
        event = None
        if self.device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
        self.sender.next_step()
        if self.watch is not None:
            self.watch.end(plan)
        return InFlight(plan, results, event, result.pending, failed, out_of_memory)

    def run(self, plan: StepPlan, jobs: Jobs) -> None:
        """Enqueue a plain step whose tokens nobody waits for; the next one may take them."""
        with self.switches():
            result = self._run(StepPass(plan, jobs, range(len(plan.sample_keys)), plan))
        self.sampler.end_step(plan, result.kept)
        self.sender.next_step()

    def collect(self, in_flight: InFlight, judged: bool = True) -> StepOutput:
        """Wait for a step's tokens; and, where there are drafts, the verdicts unless nobody wants
        them: without `judged` there are none.
        """
        if in_flight.event is not None:
            try:
                in_flight.event.synchronize()
            except RuntimeError as error:  # of a kernel: most are only heard of here
                raise_if_lost(error)
                raise
        results = in_flight.results if judged else in_flight.results[:2]
        tokens, is_nan, *rows = results.tolist()
        extra = Extras()
        for note in in_flight.pending:
            note(extra)
        num_samples = len(in_flight.plan.sample_keys)
        verdicts = Verdicts(*(row[:num_samples] for row in rows)) if rows else None
        return StepOutput(tokens, [bool(flag) for flag in is_nan], extra, verdicts)

    def _run_whole(
        self, plan: StepPlan, jobs: Jobs, failed: dict[Hashable, str], known_tokens: KnownTokens
    ) -> tuple[StepPlan, PassResult, bool]:
        """Run a step; what of it was run, what came of it, and whether memory was short. One that
        fails is run again without its drafts, which nobody asked for, before a request is failed.
        """
        step: StepPlan | None = plan
        short = False
        if plan.num_draft_rows:
            assert self.drafter is not None, "drafts are planned where somebody drafts"
            try:
                self.drafter.draft(plan, known_tokens)
                if not failed:
                    flat = self.flat(plan)
                    samples = range(len(flat.sample_keys))
                    return plan, self._run(StepPass(flat, jobs, samples, plan)), False
            except Exception as error:
                raise_if_lost(error)
                log.warning("step %d is run without drafts: %s", plan.step_id, reason_of(error))
                short = is_out_of_memory(error)
            plan, step = without_drafts(plan), None
        pending: Pending = []
        kept = False

        def run(part: StepPlan, samples: Sequence[int]) -> None:
            nonlocal kept
            result = self._run(StepPass(part, jobs, samples, step if part is plan else None))
            pending.extend(result.pending)
            kept = result.kept

        short = run_in_parts(plan, run, failed) or short
        return plan, PassResult(pending, kept), short

    def flat(self, plan: StepPlan) -> StepPlan:
        """A CPU attends to a row with drafts at once, a GPU to each token as a decode row."""
        one_token_rows = not self.passes.sequences.whole_rows
        return flattened(plan, self.buffers.draft_slots, one_token_rows)

    def _seat(self, plan: StepPlan, jobs: Jobs, known_tokens: KnownTokens) -> dict[Hashable, str]:
        return self.sampler.seat(plan, jobs, known_tokens)

    def end_step(self, plan: StepPlan, kept: bool) -> None:
        """All of a step has run."""
        self.sampler.end_step(plan, kept)

    def close(self) -> None:
        """No step follows."""

    # --- a pass -------------------------------------------------------------------------------

    def _run(self, step: StepPass) -> PassResult:
        """One forward pass, and the tokens of its samples into their places in `results`."""
        plan = step.plan
        max_length = 1 + max(plan.first_positions[: plan.num_decode_rows], default=0)
        if plan.moved_tokens:
            max_length = min(max_length + self.buffers.draft_slots.per_seat, self.max_context)
        if self.graphs is not None:
            kind = self.graphs.kind_for(step, max_length)
            if kind is not None:
                return self._run_graphs(self.graphs, step, kind)
        return self._run_eagerly(step, max_length)

    def _run_graphs(self, graphs: Graphs, step: StepPass, kind: PassKind) -> PassResult:
        inputs = self.send(step, kind.shape)
        count = len(step.samples)
        sampling = SamplingKind(self.sampler.is_filtered(step.plan), self.keeps(step))
        logits_RV, tokens_R = graphs.replay(kind, inputs, sampling)
        return self.finish(step, logits_RV[:count], inputs, tokens_R[:count], sampling.keeps)

    def _run_eagerly(self, step: StepPass, max_length: int) -> PassResult:
        plan = step.plan
        inputs, hidden_TD = self.forward_eagerly(step, max_length)
        pending = extras.of_rows(plan, step.jobs, hidden_TD, self.model.logits)
        if not step.samples:
            return PassResult(pending)
        logits_RV = self.passes.logits(hidden_TD.index_select(0, inputs.logit_tokens))
        sampling = SamplingKind(self.sampler.is_filtered(plan), keeps=False)
        tokens_R = self.choose(logits_RV, inputs, sampling)
        return PassResult(pending + self.finish(step, logits_RV, inputs, tokens_R, False).pending)

    def forward_eagerly(self, step: StepPass, max_length: int) -> tuple[StepInputs, Tensor]:
        """A pass up to its hidden states, and its numbers."""
        plan, shape = step.plan, shape_of(step.plan)
        inputs = self.send(step, shape)
        kind = PassKind(shape, max_length, of_own_sequences(plan), of_fresh_prompts(plan))
        return inputs, self.forward(inputs, kind, self.notes)

    def send(self, step: StepPass, shape: StepShape) -> StepInputs:
        """A pass's numbers on the device, its rows where they belong."""
        judged = step.step if self.judges and self.sampler.is_whole(step) else None
        inputs = self.sender.send(step.plan, shape, judged)
        if self.watch is not None:
            self.watch.begin()
        if step.plan.moved_tokens:
            self.sender.move(inputs, shape)
        return inputs

    def forward(
        self, inputs: StepInputs, kind: PassKind, notes: list[Note] | None = None
    ) -> Tensor:
        """Hidden states of all tokens [T, D]."""
        return self.passes(inputs, kind, notes)

    def keeps(self, step: StepPass) -> bool:
        return self.sampler.keeps(step)

    def choose(
        self, logits_RV: Tensor, inputs: StepInputs, kind: SamplingKind, trial: bool = False
    ) -> Tensor:
        return self.sampler.choose(logits_RV, inputs, kind, trial)

    def keep(self, logits_RV: Tensor, inputs: StepInputs, tokens_R: Tensor) -> None:
        self.sampler.keep(logits_RV, inputs, tokens_R)

    def finish(
        self, step: StepPass, logits_RV: Tensor, inputs: StepInputs, tokens_R: Tensor, kept: bool
    ) -> PassResult:
        """What follows the plain choice. With `kept`, nothing: the choice's graph has left its
        tokens where they belong.
        """
        if kept:
            return PassResult([], kept)
        return self.sampler.finish(step, logits_RV, inputs, tokens_R)
