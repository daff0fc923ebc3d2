"""The main loop's side of drafting: ask the policy before a step, and tell it afterwards which
drafts were right and how long the step took.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import NamedTuple

from ridgeline.engine.execution.runner import InFlight, StepOutput, Verdicts
from ridgeline.engine.sampling.choosing import TokenLogprob
from ridgeline.engine.sampling.extras import Extras, Jobs
from ridgeline.engine.scheduling.state import StreamKey
from ridgeline.engine.scheduling.step_plan import StepPlan
from ridgeline.engine.speculation.draft_policy import DraftOutcome, DraftPolicy
from ridgeline.engine.speculation.pace import DraftPace
from ridgeline.engine.steps.flat_plan import first_rows

HOST_DECAY = 0.9


class PlannedDrafts(NamedTuple):
    """How a step was planned."""

    num_streams: int  # past their prompt
    allowed: bool  # whether it could have drafts


PLAIN = PlannedDrafts(0, allowed=False)


class Out(NamedTuple):
    """A step that was launched and has not come back."""

    in_flight: InFlight
    plan: StepPlan  # as it was made; the runner may have dropped its drafts
    begun: float  # when its planning began
    launched: float  # when the host was done with it
    planned: PlannedDrafts = PLAIN


class Verified(NamedTuple):
    """A step with drafts that has come back, before it is known what the one after it waited."""

    keys: frozenset[StreamKey]
    num_tokens: int
    most_drafts: int
    seconds: float


class Drafting:
    """`on_host`: a step is computed while it is launched, so nothing is won by launching early;
    `overlap`: elsewhere plain steps are launched before the last one's tokens are here. After one
    with drafts the next cannot be, unless the policy goes `ahead`, and what the device then waits
    for the host is part of what the drafts have cost, whatever that next step is.

    Where the pace does not allow drafts, the policy is not called for a step, which is then as
    cheap as decoding without it.
    """

    def __init__(self, policy: DraftPolicy, on_host: bool, overlap: bool) -> None:
        self.policy, self.on_host, self.overlap = policy, on_host, overlap
        self._host_s = 0.0  # what the host takes to plan and launch a step
        self._verified: Verified | None = None
        self.pace = DraftPace()
        self.planned = PLAIN  # of the step that is planned now
        self._num_streams = 0  # of the step that came back last

    def wanted(self, num_streams: int) -> dict[StreamKey, int]:
        """Drafts for a step that is planned now."""
        allowed = self.pace.allows(num_streams)
        self.planned = PlannedDrafts(num_streams, allowed)
        if allowed:
            return self.policy.wanted(num_streams)
        if self.policy.with_drafts:
            self.policy.rest()
        return {}

    def waits(self, plan: StepPlan) -> bool:
        """Whether the next step waits for this one, which is the last that was launched."""
        if self.policy.ahead or not plan.num_draft_rows:
            return False
        num_rows = plan.num_decode_rows + plan.num_draft_rows
        return self.policy.waits(num_rows, plan.num_draft_rows, self._host_s)

    def launched(self, out: Out, jobs: Jobs) -> None:
        """A step that could have drafts is out."""
        if not self.on_host:
            self._host_s += (1 - HOST_DECAY) * (out.launched - out.begun - self._host_s)
        keys, drafts = out.plan.sample_keys, out.plan.sample_drafts
        if not all(map(self.policy.streams.__contains__, keys)):
            may_draft = [not jobs[key[0]].sampling.needs_tables for key in keys]
            keys, drafts = list(compress(keys, may_draft)), list(compress(drafts, may_draft))
        self.policy.launched(keys, drafts)

    def received(self, out: Out, output: StepOutput, last: float, now: float) -> None:
        """A step has come back `now`, the one before it at `last`."""
        plan, planned, verdicts = out.plan, out.planned, output.verdicts
        has_prompts = plan.num_decode_rows + plan.num_draft_rows < len(plan.seats)
        # All of the time between two steps for the same streams is theirs, also of those that are
        # not in one because their drafts are out. Others come with a prompt: without one, and as
        # many as before, they are the same.
        if planned.num_streams == self._num_streams and not has_prompts:
            num_tokens = sum(verdicts.counts) if verdicts is not None else len(plan.sample_keys)
            self.pace.note(planned.num_streams, planned.allowed, num_tokens, now - last)
        self._num_streams = planned.num_streams
        if planned.allowed:
            assert verdicts is not None, "where tokens are drafted there are verdicts"
            self._tell(plan, verdicts)
        if planned.allowed or self._verified is not None:
            self._note_costs(out, last, now, has_prompts)

    def _note_costs(self, out: Out, last: float, now: float, has_prompts: bool) -> None:
        plan = out.plan
        waited = self.overlap and not self.on_host and out.begun >= last
        if self._verified is not None:
            self._close(plan, max(out.launched - last, 0.0) if waited else 0.0)
        if has_prompts or out.in_flight.plan is not plan:
            return  # a step with prompts, or not run as planned: of no use to the table
        seconds = now - max(out.launched if waited else out.begun, last)
        if self.on_host:
            seconds = out.launched - out.begun
        most_drafts = max(plan.sample_drafts) if plan.num_draft_rows else 0
        if most_drafts and self.overlap and not self.on_host:
            self._verified = Verified(
                frozenset(plan.sample_keys), len(plan.token_ids), most_drafts, seconds
            )
        elif not waited:  # plain decoding does not wait for the host
            self.policy.costs.note(len(plan.token_ids), seconds, most_drafts)

    def _tell(self, plan: StepPlan, verdicts: Verdicts) -> None:
        """Report to the policy the samples that had drafts or have some now."""
        with_drafts, outcomes, all_drafts = self.policy.with_drafts, [], []
        if plan.num_draft_rows or with_drafts or any(verdicts.matches):
            samples = zip(plan.sample_keys, plan.sample_drafts, *verdicts, strict=True)
            for key, drafts, count, right, match in samples:
                if match or drafts or key in with_drafts:
                    outcomes.append(DraftOutcome(key, count - 1, bool(right), match))
                    all_drafts.append(drafts)
        self.policy.received(outcomes, all_drafts)

    def _close(self, plan: StepPlan, idle_s: float) -> None:
        """The step after one with drafts has come back: the time between them is a cost of the
        drafts, unless none of their streams goes on.
        """
        before, self._verified = self._verified, None
        if before is not None and not before.keys.isdisjoint(plan.sample_keys):
            seconds = before.seconds + idle_s
            self.policy.costs.note(before.num_tokens, seconds, before.most_drafts)


def accepted_tokens(
    planned: StepPlan, run: StepPlan, output: StepOutput
) -> tuple[list[int], list[int] | None]:
    """The tokens of a step that count, and how many each sample has of them; None: one each."""
    if not planned.num_draft_rows:
        return output.tokens, None
    assert output.verdicts is not None, "where tokens are drafted there are verdicts"
    tokens, counts, row = [], output.verdicts.counts, 0
    for drafts, count in zip(run.sample_drafts, counts, strict=True):
        tokens += output.tokens[row : row + count]
        row += 1 + drafts
    return tokens, counts


def ordered_logprobs(
    plan: StepPlan, keys: Sequence[StreamKey], extras: Extras
) -> Sequence[TokenLogprob | None]:
    """Of the tokens that came, which are each stream's in turn."""
    if not extras.logprobs:
        return [None] * len(keys)
    rows = dict(zip(plan.sample_keys, first_rows(plan), strict=True))
    logprobs = []
    for key in keys:
        logprobs.append(extras.logprobs.get(rows[key]))
        rows[key] += 1
    return logprobs
