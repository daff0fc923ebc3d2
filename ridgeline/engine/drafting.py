"""What the main loop does for guessing ahead: ask the policy before a step, tell it afterwards what
came of it and how long it took.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ridgeline.engine.choosing import TokenLogprob
from ridgeline.engine.draft_policy import DraftPolicy, Outcome
from ridgeline.engine.extras import Extras, Jobs
from ridgeline.engine.flat_plan import first_rows
from ridgeline.engine.pace import Pace
from ridgeline.engine.runner import InFlight, StepOutput
from ridgeline.engine.state import Key
from ridgeline.engine.step_plan import StepPlan

HOST_DECAY = 0.9


class Out(NamedTuple):
    """A step that was launched and has not come back."""

    in_flight: InFlight
    plan: StepPlan  # as it was made; the runner may have dropped its drafts
    begun: float  # when its planning began
    launched: float  # when the host was done with it


class Verified(NamedTuple):
    """A step with drafts that has come back, before it is known what the one after it waited."""

    keys: frozenset[Key]
    num_tokens: int
    most_drafts: int
    seconds: float


class Drafting:
    """`on_host`: a step is computed while it is launched, so nothing is won by launching early;
    `overlap`: elsewhere plain steps are launched before the last one's tokens are here. After one
    with drafts the next cannot be, and what the device then waits for the host is part of what the
    drafts have cost, whatever that next step is.
    """

    def __init__(self, policy: DraftPolicy, on_host: bool, overlap: bool) -> None:
        self.policy, self.on_host, self.overlap = policy, on_host, overlap
        self._host_s = 0.0  # what the host takes to plan and launch a step
        self._verified: Verified | None = None
        self.pace = Pace()
        self._last_keys: frozenset[Key] = frozenset()  # of the step that came back last

    def wanted(self, num_rows: int) -> dict[Key, int]:
        return self.policy.wanted(num_rows) if self.pace.allows(num_rows) else {}

    def waits(self, plan: StepPlan) -> bool:
        """Whether the next step waits for this one, which is the last that was launched."""
        if not plan.num_draft_rows:
            return False
        num_rows = plan.num_decode_rows + plan.num_draft_rows
        return self.policy.waits(num_rows, plan.num_draft_rows, self._host_s)

    def launched(self, out: Out, jobs: Jobs) -> None:
        if not self.on_host:
            self._host_s += (1 - HOST_DECAY) * (out.launched - out.begun - self._host_s)
        samples = [
            (key, drafts)
            for key, drafts in zip(out.plan.sample_keys, out.plan.sample_drafts, strict=True)
            if not jobs[key[0]].sampling.needs_tables
        ]
        if samples:
            self.policy.launched(*zip(*samples, strict=True))

    def received(self, out: Out, output: StepOutput, last: float, now: float) -> None:
        """A step has come back `now`, the one before it at `last`."""
        verdicts, plan = output.verdicts, out.plan
        assert verdicts is not None, "where tokens are guessed there are verdicts"
        self.policy.received(
            (
                Outcome(key, count - 1, bool(right), match)
                for key, count, right, match in zip(plan.sample_keys, *verdicts, strict=True)
            ),
            plan.sample_drafts,
        )
        self._keep_pace(plan, sum(verdicts.counts), now - last)
        waited = self.overlap and not self.on_host and out.begun >= last
        self._close(plan, max(out.launched - last, 0.0) if waited else 0.0)
        num_rows = plan.num_decode_rows + plan.num_draft_rows
        if num_rows < len(plan.seats) or out.in_flight.plan is not plan:
            return  # a step with prompts, or not run as planned: of no use to the table
        seconds = now - max(out.launched if waited else out.begun, last)
        if self.on_host:
            seconds = out.launched - out.begun
        self._note(plan, seconds, waited)

    def _note(self, plan: StepPlan, seconds: float, waited: bool) -> None:
        num_tokens, most_drafts = len(plan.token_ids), max(plan.sample_drafts, default=0)
        if most_drafts and self.overlap and not self.on_host:
            keys = frozenset(plan.sample_keys)
            self._verified = Verified(keys, num_tokens, most_drafts, seconds)
        elif not waited:  # plain decoding does not wait for the host
            self.policy.costs.note(num_tokens, seconds, most_drafts)

    def _keep_pace(self, plan: StepPlan, num_tokens: int, seconds: float) -> None:
        """All of the time between two steps of the same streams is theirs. Where others come or go
        there are prompts, or nobody was there to be served.
        """
        num_rows, keys = plan.num_decode_rows + plan.num_draft_rows, frozenset(plan.sample_keys)
        if num_rows == len(plan.seats) and keys == self._last_keys:
            self.pace.note(num_rows, plan.num_draft_rows > 0, num_tokens, seconds)
        self._last_keys = keys

    def _close(self, plan: StepPlan, idle_s: float) -> None:
        """The step after one with drafts has come back. Where none of its streams goes on, the time
        between them was nobody's.
        """
        before, self._verified = self._verified, None
        if before is not None and not before.keys.isdisjoint(plan.sample_keys):
            seconds = before.seconds + idle_s
            self.policy.costs.note(before.num_tokens, seconds, before.most_drafts)


def accepted_tokens(
    asked: StepPlan, run: StepPlan, output: StepOutput
) -> tuple[list[int], list[int] | None]:
    """The tokens of a step that count, and how many each sample has of them; None: one each."""
    if not asked.num_draft_rows:
        return output.tokens, None
    assert output.verdicts is not None, "where tokens are guessed there are verdicts"
    tokens, counts, row = [], output.verdicts.counts, 0
    for drafts, count in zip(run.sample_drafts, counts, strict=True):
        tokens += output.tokens[row : row + count]
        row += 1 + drafts
    return tokens, counts


def ordered_logprobs(
    plan: StepPlan, keys: Sequence[Key], extras: Extras
) -> Sequence[TokenLogprob | None]:
    """Of the tokens that came, which are each stream's in turn."""
    if not extras.logprobs:
        return [None] * len(keys)
    rows = dict(zip(plan.sample_keys, first_rows(plan), strict=True))
    found = []
    for key in keys:
        found.append(extras.logprobs.get(rows[key]))
        rows[key] += 1
    return found
