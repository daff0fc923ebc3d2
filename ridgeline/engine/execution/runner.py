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

import logging
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ridgeline.engine.attention.decode_rows import DecodeRows
from ridgeline.engine.attention.fixed_attention import FixedCpuSequences, FixedSequences
from ridgeline.engine.attention.fresh_prompts import FreshPrompts
from ridgeline.engine.attention.host_sequences import HostSequences
from ridgeline.engine.attention.kv_cache import KVCache
from ridgeline.engine.attention.paged import CpuSequences, PagedSequences, num_table_pages
from ridgeline.engine.execution.faults import (
    Run,
    is_out_of_memory,
    raise_if_lost,
    reason_of,
    run_in_parts,
)
from ridgeline.engine.execution.graphs import Graphs
from ridgeline.engine.execution.step_watch import StepWatch
from ridgeline.engine.loading.deterministic import deterministic
from ridgeline.engine.loading.footprint import FEWEST_DRAFTED
from ridgeline.engine.loading.host_model import on_host
from ridgeline.engine.loading.switches import switches
from ridgeline.engine.sampling import extras
from ridgeline.engine.sampling.extras import Extras, Jobs, Pending
from ridgeline.engine.sampling.guessing import Guesser, KnownTokens, PromptLookup
from ridgeline.engine.sampling.sampling import Special, plain
from ridgeline.engine.scheduling.scheduler import MAX_STEPS_OUT
from ridgeline.engine.scheduling.step_plan import StepPlan
from ridgeline.engine.steps.batch import (
    SeatTable,
    StepInputs,
    StepShape,
    num_words,
    shape_of,
    table_changes,
    views,
    write,
)
from ridgeline.engine.steps.flat_plan import (
    Guesses,
    first_rows,
    flattened,
    of_fresh_prompts,
    of_own_sequences,
    without_drafts,
)
from ridgeline.engine.steps.notes import END, Note
from ridgeline.engine.steps.rope_tables import RopeTables
from ridgeline.engine.steps.starting import serves, start
from ridgeline.engine.steps.transfer import to_device, to_host
from ridgeline.formats.dtypes import parse_dtype
from ridgeline.kernels.keep_tokens import keep_tokens
from ridgeline.kernels.move_rows import move_rows
from ridgeline.models import Transformer
from ridgeline.recipe import Recipe

log = logging.getLogger(__name__)

MAX_VIEWS = 1024  # shapes whose views are kept: decode steps come in few, mixed ones in any


@dataclass
class InFlight:
    """A step that was launched."""

    plan: StepPlan  # as it was run: without its drafts, if it failed with them
    # [2, R], one for each row of logits: tokens, and whether their logits held NaN; where tokens
    # are guessed [5, R], the verdicts on samples behind them. On the host, once `event` is.
    results: Tensor
    event: torch.cuda.Event | None
    pending: Pending
    failed: dict[Hashable, str]  # requests that could not be run, and why
    out_of_memory: bool  # whether it had to be run in parts


class Verdicts(NamedTuple):
    """On what was guessed, for each sample: see guessing.py."""

    counts: list[int]
    first_right: list[int]
    matches: list[int]


@dataclass(frozen=True)
class StepOutput:
    tokens: list[int]  # one for each row of logits: with drafts several for a sample
    is_nan: list[bool]
    extras: Extras = field(default_factory=Extras)
    verdicts: Verdicts | None = None  # where tokens are guessed and somebody wants them


class Runner:
    """`recipe` has nothing left to "auto"."""

    graphs_type = Graphs

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
        speculation = recipe.speculation
        num_guesses = 0 if speculation.method == "none" else speculation.max_draft_tokens
        self.max_rows = limits.max_batch + min(limits.max_batch * num_guesses, limits.token_budget)
        if num_guesses:
            self.max_rows = max(self.max_rows, min(FEWEST_DRAFTED, limits.max_graph_batch))
        # The last step's samples, and behind them what is guessed for each seat.
        self.guesses = Guesses(self.max_rows, num_guesses)
        size = self.max_rows + (limits.max_batch + 1) * num_guesses
        self.last_tokens = torch.zeros(size, dtype=torch.int32, device=self.device)
        self.guesser: Guesser | None = None
        num_results = 5 if num_guesses else 2
        self.results = torch.zeros(
            num_results, self.max_rows, dtype=torch.int32, device=self.device
        )
        largest = StepShape(
            max(limits.token_budget, limits.max_graph_batch),
            self.max_rows,
            limits.max_batch,
            self.max_rows,
        )
        size = num_words(largest) + 2 * limits.token_budget
        self.words = torch.zeros(size, dtype=torch.int32, device=self.device)
        self._hosts = _host_buffers(len(self.words), self.device)
        self._views: dict[StepShape, StepInputs] = {}  # of `words`, by shape
        self._num_launched = 0
        self._whole: StepPlan | None = None  # the step that is run, whole or in parts
        self._flat: StepPlan | None = None  # the same with its drafts as rows
        self._kept = False  # whether its samples are in `last_tokens` already, and judged
        self.watch: StepWatch | None = None  # told of each step, where somebody measures
        self.notes: list[Note] | None = None  # of steps without a graph, where somebody traces
        wants_graphs = bool(recipe.graphs) and self.device.type == "cuda"
        self.graphs: Graphs | None = None
        if wants_graphs:
            self.graphs = self.graphs_type(self, limits.max_graph_batch, graph_bytes)
        self.starts_at_once = self.device.type == "cuda" and serves(model)
        self.deterministic, self.switches = recipe.deterministic, switches(recipe)
        self.sequences: type[PagedSequences] = PagedSequences
        if recipe.deterministic:
            self.model = deterministic(model)
            self.sequences = FixedCpuSequences if self.device.type == "cpu" else FixedSequences
        elif self.device.type == "cpu":
            self._use_host(fused=recipe.kernels == "fused")

    def _use_host(self, fused: bool) -> None:
        """On a CPU: its kernels, where they were built and the recipe does not forbid them."""
        self.sequences = CpuSequences
        if fused:
            self.model = on_host(self.model)
            if HostSequences.serves(self.kv, self.model.embed.weight.dtype):
                self.sequences = HostSequences

    @torch.inference_mode()
    def launch(self, plan: StepPlan, jobs: Jobs, known_tokens: KnownTokens) -> InFlight:
        """Enqueue a step. A request that cannot be run is named in `failed`; the others run."""
        self.kv.copy_pages(plan.copies)
        if self.guesser is not None:
            self.guesser.follow(plan)
        failed = self._seat(plan, jobs, known_tokens)
        self._whole, self._flat, self._kept = plan, None, False
        pending: Pending = []

        def run(part: StepPlan, samples: list[int]) -> None:
            pending.extend(self._run(part, jobs, samples))

        with self.switches():
            plan, out_of_memory = self._run_whole(plan, run, failed, known_tokens)
        num_rows = len(plan.logit_tokens)
        self.share_results(num_rows)
        if self.guesser is not None and num_rows and not (self._kept and self.judges):
            verdicts_3N = self.guesser.judge(plan, self.results[0], self.results[2])
            self.results[2:, : verdicts_3N.shape[1]] = verdicts_3N
        if not self._kept:
            self._keep_samples(plan)
        results = to_host(self.results)[:, :num_rows]  # all of it: a part would be packed first
        event = None
        if self.device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
        self._num_launched += 1
        if self.watch is not None:
            self.watch.end(plan)
        return InFlight(plan, results, event, pending, failed, out_of_memory)

    def run(self, plan: StepPlan, jobs: Jobs) -> None:
        """Enqueue a plain step whose tokens nobody waits for; the next one may take them."""
        self._whole, self._flat, self._kept = plan, None, False
        with self.switches():
            self._run(plan, jobs, list(range(len(plan.sample_keys))))
        if not self._kept:
            self._keep_samples(plan)
        self._num_launched += 1

    def collect(self, in_flight: InFlight, judged: bool = True) -> StepOutput:
        """Wait for a step's tokens; and, where tokens are guessed, the verdicts unless nobody wants
        them: without `judged` there are none.
        """
        if in_flight.event is not None:
            try:
                in_flight.event.synchronize()
            except RuntimeError as error:  # of a kernel: most are only heard of here
                raise_if_lost(error)
                raise
        results = in_flight.results if judged else in_flight.results[:2]
        tokens, is_nan, *verdicts = results.tolist()
        found = Extras()
        for note in in_flight.pending:
            note(found)
        num_samples = len(in_flight.plan.sample_keys)
        about = Verdicts(*(row[:num_samples] for row in verdicts)) if verdicts else None
        return StepOutput(tokens, [bool(flag) for flag in is_nan], found, about)

    def _run_whole(
        self, plan: StepPlan, run: Run, failed: dict[Hashable, str], known_tokens: KnownTokens
    ) -> tuple[StepPlan, bool]:
        """Run a step; what of it was run, and whether memory was short. One that fails is run
        again without its drafts, which nobody asked for, before somebody is blamed.
        """
        short = False
        if plan.num_draft_rows:
            assert self.guesser is not None, "drafts are planned where somebody guesses"
            try:
                self.guesser.guess(plan, known_tokens)
                self._flat = flat = self.flat(plan)
                if not failed:
                    run(flat, list(range(len(flat.sample_keys))))
                    return plan, False
            except Exception as error:
                raise_if_lost(error)
                log.warning("step %d is run without drafts: %s", plan.step_id, reason_of(error))
                short = is_out_of_memory(error)
            plan = without_drafts(plan)
        return plan, run_in_parts(plan, run, failed) or short

    @property
    def guesses_SK(self) -> Tensor:
        """What is guessed to come next in each seat."""
        return self.last_tokens[self.guesses.first :].view(self.max_batch + 1, -1)

    def flat(self, plan: StepPlan) -> StepPlan:
        """A CPU attends to a row with drafts at once, a GPU to each token as a decode row."""
        return flattened(plan, self.guesses, one_token_rows=not self.sequences.whole_rows)

    def _keep_samples(self, plan: StepPlan) -> None:
        """The next step may take the samples' tokens from here: of those with drafts the last that
        came.
        """
        num_samples, chosen_R = len(plan.sample_keys), self.results[0]
        if plan.num_draft_rows:
            rows_N = to_device(first_rows(plan), self.device) + self.results[2, :num_samples] - 1
            chosen_R = chosen_R.index_select(0, rows_N)
        self.last_tokens[:num_samples] = chosen_R[:num_samples]

    def keeps(self, plan: StepPlan, jobs: Jobs) -> bool:
        """Whether the plain choice ends a step: then its graph leaves the tokens in `last_tokens`
        too. Elsewhere that waits until all of the step is through, because parts of it that are run
        again take the last step's tokens from there.
        """
        if not self._is_whole(plan) or self.special.samples(plan):
            return False
        return not any(jobs[key[0]].sampling.wants_logprobs for key in plan.sample_keys)

    def _is_whole(self, plan: StepPlan) -> bool:
        """Whether this is all of the step; one with drafts only where a graph can judge them."""
        return plan is self._whole or (plan is self._flat and self.judges)

    @property
    def judges(self) -> bool:
        """Whether a graph that keeps a step's tokens judges what was guessed of them, too."""
        return self.guesser is not None and self.guesser.in_graph

    @property
    def moves(self) -> bool:
        """Whether a step may go on behind drafts that have not come back: where guesses are judged
        on the device, and drafts are decode rows.
        """
        return self.judges and not self.sequences.whole_rows

    def keep(
        self, logits_RV: Tensor, inputs: StepInputs, tokens_R: Tensor, last_tokens: Tensor
    ) -> None:
        """The tokens of a plain whole step, where the host and the next step look for them; and the
        verdicts on what was guessed. A sample that brings several tokens leaves its last.
        """
        if not self.judges:
            keep_tokens(logits_RV, tokens_R, self.results[:2], last_tokens)
            return
        assert isinstance(self.guesser, PromptLookup), "nobody else judges in a graph"
        keep_tokens(logits_RV, tokens_R, self.results[:2])
        count = min(len(tokens_R), self.max_rows)
        about = (inputs.judged[:, :count], self.results[0], self.results[2:, :count])
        self.guesser.judge_rows(*about, last_tokens)

    def nobody(self, judged_4R: Tensor) -> Tensor:
        """Samples that belong to nobody, as many as these."""
        nobody_4R = torch.zeros_like(judged_4R)
        nobody_4R[0] = self.seats.padding
        return nobody_4R

    def share_results(self, num_samples: int) -> None:
        """Where several ranks run a step, they now have the same tokens."""

    def close(self) -> None:
        """No step follows."""

    def _seat(self, plan: StepPlan, jobs: Jobs, known_tokens: KnownTokens) -> dict[Hashable, str]:
        """Who has joined takes a seat; who could not, and why."""
        failed: dict[Hashable, str] = {}
        for seat, key in plan.joined:
            job, tokens = jobs[key[0]], known_tokens(key)
            sampling, length = job.sampling, len(job.prompt)
            try:
                seed = sampling.sample_seed(key[1])
                self.seats.sit(seat, length, sampling, seed)
                if self.guesser is not None:
                    self.guesser.sit(seat, length, sampling, seed, tokens)
                matcher = job.matchers[key[1]] if job.matchers else None
                self.special.sit(seat, sampling, job.prompt, tokens[length:], job.stop_ids, matcher)
            except Exception as error:
                failed[key[0]] = reason_of(error)
        return failed

    def _run(self, plan: StepPlan, jobs: Jobs, samples: list[int]) -> Pending:
        """One forward pass, and the tokens of its samples into their places in `results`; `samples`
        are their numbers in the whole step.
        """
        max_length = 1 + max(plan.first_positions[: plan.num_decode_rows], default=0)
        if plan.moved_tokens:
            max_length = min(max_length + self.guesses.per_seat, self.max_context)
        if self.graphs is not None and self.graphs.serves(plan, jobs, samples):
            pending = self.graphs.run(plan, jobs, max_length)
            if pending is not None:
                return pending
        shape = shape_of(plan)
        inputs = self.send(plan, shape)
        own, fresh = of_own_sequences(plan), of_fresh_prompts(plan)
        hidden_TD = self.forward(inputs, shape, max_length, self.notes, own, fresh)
        pending = extras.of_rows(plan, jobs, hidden_TD, self.model.logits)
        if samples:
            logits_RV = self.logits(hidden_TD.index_select(0, inputs.logit_tokens))
            self.note("sampling", logits_RV)
            tokens_R = plain(logits_RV, inputs, self.is_filtered(plan))
            pending += self.finish(plan, jobs, logits_RV, inputs, tokens_R, samples)
        return pending

    def note(self, op: str, x: Tensor) -> None:
        """An op follows, for whoever traces steps that run without a graph."""
        if self.notes is not None:
            self.notes.append(Note(op, tuple(x.shape)))

    def finish(
        self,
        plan: StepPlan,
        jobs: Jobs,
        logits_RV: Tensor,
        inputs: StepInputs,
        tokens_R: Tensor,
        samples: list[int],
        kept: bool = False,
    ) -> Pending:
        """What follows the plain choice: samples with tables, NaN, log-probabilities, results. With
        `kept`, nothing: the choice's graph has left its tokens where they belong.
        """
        if kept:
            self._kept = True
            return []
        self.special.choose(logits_RV, inputs, plan, tokens_R)
        self.note("keep_tokens", logits_RV)
        if samples == list(range(len(samples))):
            keep_tokens(logits_RV, tokens_R, self.results[:2])
        else:
            found_2R = self.results.new_empty(2, len(samples))
            keep_tokens(logits_RV, tokens_R, found_2R)
            self.results[:2, to_device(samples, self.device)] = found_2R
        if self.notes is not None:
            self.notes.append(END)
        return extras.output_logprobs(plan, jobs, logits_RV, tokens_R, samples)

    def send(self, plan: StepPlan, shape: StepShape) -> StepInputs:
        """A step's numbers on the device and its changes of the page table made, in one copy."""
        host, array, event = self._hosts[self._num_launched % len(self._hosts)]
        if event is not None:
            event.synchronize()  # of the copy that read this buffer some steps ago
        count, changes = num_words(shape), table_changes(plan, self.page_table.shape[1])
        end = count + changes.size
        judged = self._whole if self.judges and self._is_whole(plan) else None
        write(array[:count], plan, shape, self.seats, judged)
        if count < end <= len(array):
            array[count:end] = changes.ravel()
        num_sent = min(end, len(array))
        self.words[:num_sent].copy_(host[:num_sent], non_blocking=True)
        if event is not None:
            event.record()
        if changes.size:
            sent = self.words[count:end] if end <= len(array) else to_device(changes, self.device)
            where, pages = sent.view(2, -1)
            self.page_table.view(-1).index_copy_(0, where.long(), pages)
        if self.watch is not None:
            self.watch.begin()
        if shape not in self._views:
            if len(self._views) >= MAX_VIEWS:
                self._views.clear()
            self._views[shape] = views(self.words[:count], shape)
        inputs = self._views[shape]
        if plan.moved_tokens:
            self._move(inputs, shape)
        return inputs

    def _move(self, inputs: StepInputs, shape: StepShape) -> None:
        """Rows behind drafts of the step before, to where they belong. Drafts are decode rows where
        that is done, so that a token, its row and its logits have the same number.
        """
        count = shape.num_decode_rows
        places = (inputs.positions, inputs.lengths, inputs.totals, inputs.draw_positions)
        move_rows(
            inputs.moved[:count],
            self.results[2],
            (places[0][:count], places[1][:count], places[2][:count], places[3][:count]),
            inputs.slots[:count],
            inputs.judged,
            inputs.seats[:count],
            self.page_table,
            self.kv.page_size,
        )

    def forward(
        self,
        inputs: StepInputs,
        shape: StepShape,
        max_length: int,
        notes: list[Note] | None = None,
        own_sequences: bool = False,
        fresh_prompts: bool = False,
    ) -> Tensor:
        """Hidden states of all tokens [T, D]. `own_sequences`: no two decode rows are of one;
        `fresh_prompts`: all rows are the beginnings of prompts, of one length.
        """
        sequences = self._sequences_for(shape, own_sequences, fresh_prompts)
        if self.starts_at_once:
            return self._forward_started(sequences, inputs, shape, max_length, notes)
        sampled_T = self.last_tokens.index_select(0, inputs.sources.clamp(min=0))
        ids_T = torch.where(inputs.sources >= 0, sampled_T, inputs.ids)
        about = (self.kv, self.ropes, inputs, shape, self.page_table, max_length, notes)
        hidden_TD = self.model(ids_T, sequences(*about))
        if issubclass(self.sequences, CpuSequences) and not hidden_TD.isfinite().all():
            self.kv.holds_nan = True  # those hide scores, which does not stop NaN
        return hidden_TD

    def _sequences_for(
        self, shape: StepShape, own_sequences: bool, fresh_prompts: bool = False
    ) -> type[PagedSequences]:
        """Decode rows alone may read pages while others are written, if none of them shares one."""
        if self.sequences is not PagedSequences:
            return self.sequences
        if own_sequences and shape.num_tokens == shape.num_decode_rows:
            return DecodeRows
        return FreshPrompts if fresh_prompts else PagedSequences

    def _forward_started(
        self,
        kind: type[PagedSequences],
        inputs: StepInputs,
        shape: StepShape,
        max_length: int,
        notes: list[Note] | None,
    ) -> Tensor:
        """The same, with all that comes before the first layer in one launch."""
        if notes is not None:
            notes.append(Note("step_start", tuple(inputs.ids.shape)))
        num_pages = num_table_pages(shape, max_length, self.kv.page_size)
        table = self.page_table[:, :num_pages]
        about = (self.kv, self.ropes, inputs, shape, self.page_table, max_length, notes)
        sequences = kind(*about, start(self.model, inputs, self.ropes, table, self.last_tokens))
        hidden_TD: Tensor = self.model(None, sequences)
        return hidden_TD

    def logits(self, rows_RD: Tensor) -> Tensor:
        """As the head makes them on a GPU, where sampling reads them as they are; else in fp32."""
        dtype, shape = self.model.logits_dtype, (len(rows_RD), self.model.config.vocab_size)
        if self.device.type == "cpu" or dtype == torch.float32:
            return self.model.logits(rows_RD)
        return self.model.logits(rows_RD, out=rows_RD.new_empty(shape, dtype=dtype))

    def is_filtered(self, plan: StepPlan) -> bool:
        """Whether a sample asks for top-k, top-p or min-p. Deterministic: whether one is drawn at
        all, so that a draw goes the same way whether or not others in its batch ask.
        """
        table = self.seats.drawn if self.deterministic else self.seats.filtered
        return bool(table[plan.sample_seats].any())


class HostBuffer(NamedTuple):
    words: Tensor
    array: np.ndarray  # the same memory
    event: torch.cuda.Event | None  # of the last copy that read it


def _host_buffers(count: int, device: torch.device) -> list[HostBuffer]:
    """One for each step that may be out and one to write: pinned where there is a device."""
    on_gpu = device.type == "cuda"
    words = [
        torch.zeros(count, dtype=torch.int32, pin_memory=on_gpu) for _ in range(MAX_STEPS_OUT + 1)
    ]
    return [
        HostBuffer(each, each.numpy(), torch.cuda.Event() if on_gpu else None) for each in words
    ]
