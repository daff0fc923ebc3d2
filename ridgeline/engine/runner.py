"""Runs steps on the device: a plan goes in, tokens come out one step later.

`launch` enqueues a whole step and returns without waiting: the plan's numbers in one copy, the
forward pass and the sampling as two graphs where they were captured, and the way back of the
tokens. `collect` waits for them. The next step may be launched before: tokens that have not reached
the host are taken from where the last step left them on the device. On a CPU all of it happens at
once, by the same code without graphs.

    in_flight = runner.launch(plan, jobs, scheduler.known_tokens)
    output = runner.collect(in_flight)          # tokens, one for each sample of the plan
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ridgeline.engine import extras
from ridgeline.engine.batch import (
    SeatTable,
    StepInputs,
    StepShape,
    num_words,
    shape_of,
    table_changes,
    views,
    write,
)
from ridgeline.engine.deterministic import deterministic
from ridgeline.engine.extras import Extras, Jobs, Pending
from ridgeline.engine.faults import reason_of, run_in_parts
from ridgeline.engine.fixed_attention import FixedCpuSequences, FixedSequences
from ridgeline.engine.graphs import Graphs
from ridgeline.engine.kv_cache import KVCache
from ridgeline.engine.notes import Note
from ridgeline.engine.paged import CpuSequences, PagedSequences
from ridgeline.engine.rope_tables import RopeTables
from ridgeline.engine.sampling import Special, plain
from ridgeline.engine.scheduler import MAX_STEPS_OUT
from ridgeline.engine.state import Key
from ridgeline.engine.step_plan import StepPlan
from ridgeline.engine.transfer import to_device, to_host
from ridgeline.formats.dtypes import parse_dtype
from ridgeline.models import Transformer
from ridgeline.recipe import Recipe

KnownTokens = Callable[[Key], Sequence[int]]


@dataclass
class InFlight:
    """A step that was launched."""

    plan: StepPlan
    results: (
        Tensor  # [2, R]: tokens, and whether their logits held NaN: on the host, once `event` is
    )
    event: torch.cuda.Event | None
    pending: Pending
    failed: dict[Hashable, str]  # requests that could not be run, and why
    out_of_memory: bool  # whether it had to be run in parts


@dataclass(frozen=True)
class StepOutput:
    tokens: list[int]  # one for each sample
    is_nan: list[bool]
    extras: Extras = field(default_factory=Extras)


class Runner:
    """`recipe` has nothing left to "auto"."""

    def __init__(
        self, model: Transformer, recipe: Recipe, num_pages: int, graph_bytes: int = 0
    ) -> None:
        config, limits = model.config, recipe.limits.filled()
        self.model, self.device = model, model.embed.weight.device
        self.max_context, self.max_batch = limits.max_context, limits.max_batch
        kv_dtype = parse_dtype(recipe.kv.dtype)
        self.kv = KVCache(config, kv_dtype, num_pages, recipe.kv.page_size, self.device)
        self.ropes = RopeTables(config, limits.max_context, self.device)
        self.seats = SeatTable(limits.max_batch)
        self.special = Special(limits.max_batch, config.vocab_size, self.device)
        # Whatever a graph reads or writes is made here, once, and never moves.
        pages = -(-limits.max_context // recipe.kv.page_size)
        self.page_table = torch.zeros(
            limits.max_batch + 1, pages, dtype=torch.int32, device=self.device
        )
        self.last_tokens = torch.zeros(limits.max_batch, dtype=torch.int32, device=self.device)
        self.results = torch.zeros(2, limits.max_batch, dtype=torch.int32, device=self.device)
        largest = StepShape(
            max(limits.token_budget, limits.max_graph_batch),
            limits.max_batch,
            limits.max_batch,
            limits.max_batch,
        )
        size = num_words(largest) + 2 * limits.token_budget
        self.words = torch.zeros(size, dtype=torch.int32, device=self.device)
        self._hosts = _host_buffers(len(self.words), self.device)
        self._num_launched = 0
        wants_graphs = bool(recipe.graphs) and self.device.type == "cuda"
        self.graphs = Graphs(self, limits.max_graph_batch, graph_bytes) if wants_graphs else None
        self.sequences = CpuSequences if self.device.type == "cpu" else PagedSequences
        self.deterministic = recipe.deterministic
        if recipe.deterministic:
            self.model = deterministic(model)
            self.sequences = FixedCpuSequences if self.device.type == "cpu" else FixedSequences

    @torch.inference_mode()
    def launch(self, plan: StepPlan, jobs: Jobs, known_tokens: KnownTokens) -> InFlight:
        """Enqueue a step. A request that cannot be run is named in `failed`; the others run."""
        self.kv.copy_pages(plan.copies)
        failed = self._seat(plan, jobs, known_tokens)
        pending: Pending = []

        def run(part: StepPlan, samples: list[int]) -> None:
            pending.extend(self._run(part, jobs, samples))

        out_of_memory = run_in_parts(plan, run, failed)
        num_samples = len(plan.sample_keys)
        self.last_tokens[:num_samples] = self.results[0, :num_samples]
        results = to_host(self.results[:, :num_samples])
        event = None
        if self.device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
        self._num_launched += 1
        return InFlight(plan, results, event, pending, failed, out_of_memory)

    def collect(self, in_flight: InFlight) -> StepOutput:
        """Wait for a step's tokens."""
        if in_flight.event is not None:
            in_flight.event.synchronize()
        tokens, is_nan = in_flight.results.tolist()
        found = Extras()
        for note in in_flight.pending:
            note(found)
        return StepOutput(tokens, [bool(flag) for flag in is_nan], found)

    def _seat(self, plan: StepPlan, jobs: Jobs, known_tokens: KnownTokens) -> dict[Hashable, str]:
        """Who has joined takes a seat; who could not, and why."""
        failed: dict[Hashable, str] = {}
        for seat, key in plan.joined:
            job, tokens = jobs[key[0]], known_tokens(key)
            sampling, length = job.sampling, len(job.prompt)
            try:
                self.seats.sit(seat, length, sampling, sampling.sample_seed(key[1]))
                self.special.sit(seat, sampling, job.prompt, tokens[length:], job.stop_ids)
            except Exception as error:
                failed[key[0]] = reason_of(error)
        return failed

    def _run(self, plan: StepPlan, jobs: Jobs, samples: list[int]) -> Pending:
        """One forward pass, and the tokens of its samples into their places in `results`; `samples`
        are their numbers in the whole step.
        """
        max_length = 1 + max(plan.first_positions[: plan.num_decode_rows], default=0)
        if self.graphs is not None and self.graphs.serves(plan, jobs, samples):
            pending = self.graphs.run(plan, jobs, max_length)
            if pending is not None:
                return pending
        shape = shape_of(plan)
        inputs = self.send(plan, shape)
        hidden_TD = self.forward(inputs, shape, max_length)
        pending = extras.of_rows(plan, jobs, hidden_TD, self.model.logits)
        if samples:
            logits_RV = self.model.logits(hidden_TD.index_select(0, inputs.logit_tokens))
            tokens_R = plain(logits_RV, inputs, self.is_filtered(plan))
            pending += self.finish(plan, jobs, logits_RV, inputs, tokens_R, samples)
        return pending

    def finish(
        self,
        plan: StepPlan,
        jobs: Jobs,
        logits_RV: Tensor,
        inputs: StepInputs,
        tokens_R: Tensor,
        samples: list[int],
    ) -> Pending:
        """What follows the plain choice: samples with tables, NaN, log-probabilities, results."""
        self.special.choose(logits_RV, inputs, plan, tokens_R)
        is_nan_R = logits_RV.gather(1, tokens_R.unsqueeze(1)).squeeze(1).isnan()
        found_2R = torch.stack((tokens_R.int(), is_nan_R.int()))
        if samples == list(range(len(samples))):
            self.results[:, : len(samples)] = found_2R
        else:
            self.results[:, to_device(samples, self.device)] = found_2R
        return extras.output_logprobs(plan, jobs, logits_RV, tokens_R, samples)

    def send(self, plan: StepPlan, shape: StepShape) -> StepInputs:
        """A step's numbers on the device and its changes of the page table made, in one copy."""
        host, event = self._hosts[self._num_launched % len(self._hosts)]
        if event is not None:
            event.synchronize()  # of the copy that read this buffer some steps ago
        count, changes = num_words(shape), table_changes(plan, self.page_table.shape[1])
        end = count + changes.size
        write(host[:count].numpy(), plan, shape, self.seats)
        if end <= len(host):
            host[count:end].numpy()[:] = changes.ravel()
        self.words[: min(end, len(host))].copy_(host[: min(end, len(host))], non_blocking=True)
        if event is not None:
            event.record()
        if changes.size:
            sent = self.words[count:end] if end <= len(host) else to_device(changes, self.device)
            where, pages = sent.view(2, -1)
            self.page_table.view(-1).index_copy_(0, where.long(), pages)
        return views(self.words[:count], shape)

    def forward(
        self,
        inputs: StepInputs,
        shape: StepShape,
        max_length: int,
        notes: list[Note] | None = None,
    ) -> Tensor:
        """Hidden states of all tokens [T, D]."""
        sampled_T = self.last_tokens.index_select(0, inputs.sources.clamp(min=0))
        ids_T = torch.where(inputs.sources >= 0, sampled_T, inputs.ids)
        about = (self.kv, self.ropes, inputs, shape, self.page_table, max_length, notes)
        hidden_TD = self.model(ids_T, self.sequences(*about))
        if self.device.type == "cpu" and not hidden_TD.isfinite().all():
            self.kv.holds_nan = True
        return hidden_TD

    def is_filtered(self, plan: StepPlan) -> bool:
        """Whether a sample asks for top-k, top-p or min-p. Deterministic: whether one is drawn at
        all, so that a draw goes the same way whether or not others in its batch ask.
        """
        seats, table = plan.sample_seats, self.seats
        if self.deterministic:
            return bool(table.temperature[seats].any())
        return bool(
            table.top_k[seats].any() or table.min_p[seats].any() or (table.top_p[seats] < 1).any()
        )


def _host_buffers(count: int, device: torch.device) -> list[tuple[Tensor, torch.cuda.Event | None]]:
    """One for each step that may be out and one to write: pinned where there is a device."""
    on_gpu = device.type == "cuda"
    return [
        (
            torch.zeros(count, dtype=torch.int32, pin_memory=on_gpu),
            torch.cuda.Event() if on_gpu else None,
        )
        for _ in range(MAX_STEPS_OUT + 1)
    ]
