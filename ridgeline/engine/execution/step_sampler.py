"""From a step's logits to its tokens: the plain choice that a graph can hold, what follows it for
samples that ask for more, and where tokens are left for the host and for the next step.

    tokens_R = sampler.choose(logits_RV, inputs, kind)
    result = sampler.finish(step, logits_RV, inputs, tokens_R)
    sampler.end_step(plan, result.kept)
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from ridgeline.engine.execution.buffers import StepBuffers
from ridgeline.engine.execution.faults import reason_of
from ridgeline.engine.execution.step_pass import PassResult, SamplingKind, StepPass
from ridgeline.engine.sampling import extras
from ridgeline.engine.sampling.drafter import Drafter, KnownTokens, PromptLookup
from ridgeline.engine.sampling.extras import Jobs
from ridgeline.engine.sampling.sampling import Special, plain
from ridgeline.engine.scheduling.step_plan import StepPlan
from ridgeline.engine.steps.batch import SeatTable, StepInputs
from ridgeline.engine.steps.flat_plan import first_rows
from ridgeline.engine.steps.notes import END, Note
from ridgeline.engine.steps.transfer import to_device
from ridgeline.kernels.keep_tokens import keep_tokens


class StepSampler:
    def __init__(self, buffers: StepBuffers, vocab_size: int, deterministic: bool) -> None:
        self.buffers, self.device = buffers, buffers.results.device
        max_batch = len(buffers.page_table) - 1
        self.seats = SeatTable(max_batch)
        self.special = Special(max_batch, vocab_size, self.device)
        self.deterministic = deterministic
        self.drafter: Drafter | None = None
        self.notes: list[Note] | None = None  # of steps without a graph, where somebody traces

    @property
    def judges(self) -> bool:
        """Whether a graph that keeps a step's tokens judges its drafts, too."""
        return self.drafter is not None and self.drafter.in_graph

    def seat(self, plan: StepPlan, jobs: Jobs, known_tokens: KnownTokens) -> dict[Hashable, str]:
        """Streams that have joined take their seats; who could not, and why."""
        failed: dict[Hashable, str] = {}
        for seat, key in plan.joined:
            job, tokens = jobs[key[0]], known_tokens(key)
            sampling, length = job.sampling, len(job.prompt)
            try:
                seed = sampling.sample_seed(key[1])
                self.seats.sit(seat, length, sampling, seed)
                if self.drafter is not None:
                    self.drafter.sit(seat, length, sampling, seed, tokens)
                matcher = job.matchers[key[1]] if job.matchers else None
                self.special.sit(seat, sampling, job.prompt, tokens[length:], job.stop_ids, matcher)
            except Exception as error:
                failed[key[0]] = reason_of(error)
        return failed

    def is_filtered(self, plan: StepPlan) -> bool:
        """Whether a sample asks for top-k, top-p or min-p. Deterministic: whether one is drawn at
        all, so that a draw goes the same way whether or not others in its batch ask.
        """
        table = self.seats.drawn if self.deterministic else self.seats.filtered
        return bool(table[plan.sample_seats].any())

    def is_whole(self, step: StepPass) -> bool:
        """Whether this is all of the step; one with drafts only where a graph can judge them."""
        return step.step is step.plan or (step.step is not None and self.judges)

    def keeps(self, step: StepPass) -> bool:
        """Whether the plain choice ends a step: then its graph leaves the tokens in `last_tokens`
        too. Elsewhere that waits until all of the step is through, because parts of it that are run
        again take the last step's tokens from there.
        """
        if not self.is_whole(step) or self.special.samples(step.plan):
            return False
        return not any(step.jobs[key[0]].sampling.wants_logprobs for key in step.plan.sample_keys)

    def choose(
        self, logits_RV: Tensor, inputs: StepInputs, kind: SamplingKind, trial: bool = False
    ) -> Tensor:
        """Tokens of all rows, kept where that is asked for. A `trial` leaves no trace that the next
        step would see.
        """
        self.note("sampling", logits_RV)
        tokens_R = plain(logits_RV, inputs, kind.filtered)
        if kind.keeps:
            self.note("keep_tokens", logits_RV)
            if trial:
                inputs = inputs._replace(judged=self._nobody(inputs.judged))
                scratch = torch.empty_like(self.buffers.last_tokens)
                self._keep(logits_RV, inputs, tokens_R, scratch)
            else:
                self.keep(logits_RV, inputs, tokens_R)
        return tokens_R

    def keep(self, logits_RV: Tensor, inputs: StepInputs, tokens_R: Tensor) -> None:
        """The tokens of a plain whole step, where the host and the next step look for them; and the
        verdicts on its drafts. A sample that brings several tokens leaves its last.
        """
        self._keep(logits_RV, inputs, tokens_R, self.buffers.last_tokens)

    def _keep(
        self, logits_RV: Tensor, inputs: StepInputs, tokens_R: Tensor, last_tokens: Tensor
    ) -> None:
        results = self.buffers.results
        if not self.judges:
            keep_tokens(logits_RV, tokens_R, results[:2], last_tokens)
            return
        assert isinstance(self.drafter, PromptLookup), "nobody else judges in a graph"
        keep_tokens(logits_RV, tokens_R, results[:2])
        count = min(len(tokens_R), self.buffers.max_rows)
        self.drafter.judge_rows(
            inputs.judged[:, :count], results[0], results[2:, :count], last_tokens
        )

    def _nobody(self, judged_4R: Tensor) -> Tensor:
        """Samples that belong to nobody, as many as these."""
        nobody_4R = torch.zeros_like(judged_4R)
        nobody_4R[0] = self.seats.padding
        return nobody_4R

    def finish(
        self, step: StepPass, logits_RV: Tensor, inputs: StepInputs, tokens_R: Tensor
    ) -> PassResult:
        """What follows the plain choice: samples with tables, NaN, log-probabilities, results."""
        self.special.choose(logits_RV, inputs, step.plan, tokens_R)
        self.note("keep_tokens", logits_RV)
        results, samples = self.buffers.results, step.samples
        if step.in_order:
            keep_tokens(logits_RV, tokens_R, results[:2])
        else:
            part_2R = results.new_empty(2, len(samples))
            keep_tokens(logits_RV, tokens_R, part_2R)
            results[:2, to_device(samples, self.device)] = part_2R
        if self.notes is not None:
            self.notes.append(END)
        return PassResult(
            extras.output_logprobs(step.plan, step.jobs, logits_RV, tokens_R, samples)
        )

    def end_step(self, plan: StepPlan, kept: bool) -> None:
        """All of a step has run: judge its drafts and keep its tokens, unless a graph has."""
        results, num_rows = self.buffers.results, len(plan.logit_tokens)
        if self.drafter is not None and num_rows and not (kept and self.judges):
            verdicts_3N = self.drafter.judge(plan, results[0], results[2])
            results[2:, : verdicts_3N.shape[1]] = verdicts_3N
        if not kept:
            self.keep_samples(plan)

    def keep_samples(self, plan: StepPlan) -> None:
        """The next step may take the samples' tokens from here: of those with drafts the last that
        came.
        """
        results = self.buffers.results
        num_samples, chosen_R = len(plan.sample_keys), results[0]
        if plan.num_draft_rows:
            rows_N = to_device(first_rows(plan), self.device) + results[2, :num_samples] - 1
            chosen_R = chosen_R.index_select(0, rows_N)
        self.buffers.last_tokens[:num_samples] = chosen_R[:num_samples]

    def note(self, op: str, x: Tensor) -> None:
        """An op follows, for whoever traces steps that run without a graph."""
        if self.notes is not None:
            self.notes.append(Note(op, tuple(x.shape)))
