"""The engine's main loop: plan, launch, receive what is due, tell who has ended.

The scheduler decides, the runner computes, and `LiveRequest`s hear of it. A step may be launched
before the last one's tokens are here. A request that goes wrong, wherever that is, ends alone.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Hashable
from operator import methodcaller

from ridgeline.engine.backend import EngineProgress
from ridgeline.engine.execution.faults import reason_of
from ridgeline.engine.execution.runner import Runner, StepOutput
from ridgeline.engine.requests.request import FinishReason
from ridgeline.engine.sampling.choosing import TokenLogprob, nan_message
from ridgeline.engine.sampling.extras import DeviceJob, Extras
from ridgeline.engine.sampling.live import LiveRequest
from ridgeline.engine.sampling.matching import Grammars, stuck_message
from ridgeline.engine.sampling.preparing import Prepared, Preparing
from ridgeline.engine.scheduling.scheduler import MAX_STEPS_OUT, Received, Scheduler
from ridgeline.engine.scheduling.state import Ask, StreamKey, duplicate_id
from ridgeline.engine.scheduling.step_plan import StepPlan
from ridgeline.engine.speculation.draft_policy import DraftPolicy
from ridgeline.engine.speculation.drafting import (
    PLAIN,
    Drafting,
    Out,
    accepted_tokens,
    ordered_logprobs,
)
from ridgeline.engine.steps.flat_plan import first_rows

log = logging.getLogger(__name__)

SMALLEST_BUDGET = 16  # tokens a step, however short memory is
IDLE_S = 0.02  # waited at most for a grammar, when there is nothing else to do


class Loop:
    """`policy` says how many tokens are drafted, where any are."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        overlap: bool,
        grammars: Grammars | None = None,
        policy: DraftPolicy | None = None,
    ) -> None:
        self.scheduler, self.runner = scheduler, runner
        self._preparing = Preparing(grammars)
        on_host = runner.device.type == "cpu"
        self.drafting = None if policy is None else Drafting(policy, on_host, overlap)
        self.depth = MAX_STEPS_OUT if overlap else 1  # steps out before the oldest is waited for
        self._jobs: dict[Hashable, DeviceJob] = {}
        self._live: dict[Hashable, LiveRequest] = {}
        self._out: deque[Out] = deque()
        self._num_steps, self._last_step_s, self._last_time = 0, 0.0, time.monotonic()

    @property
    def has_work(self) -> bool:
        return bool(self._live or self._out or self._preparing)

    @property
    def progress(self) -> EngineProgress:
        idle_s = time.monotonic() - self._last_time
        return EngineProgress(self._num_steps, self._last_step_s, idle_s)

    def submit(self, ask: Ask, live: LiveRequest) -> None:
        """Take a request; one with a grammar is run when that has been compiled."""
        if ask.request_id in self._preparing or ask.request_id in self._live:
            raise duplicate_id(ask.request_id)
        sampling = live.job.sampling
        if sampling.grammar is not None and not live.job.matchers:
            self._preparing.add(ask, live)
            return
        if sampling.is_matched and not live.job.matchers:
            self._preparing.follow_thinking(live)
        self._enter(ask, live)

    def _enter(self, ask: Ask, live: LiveRequest) -> None:
        self.scheduler.submit(ask)
        self._jobs[ask.request_id], self._live[ask.request_id] = live.job, live
        self._tell_ended()  # it may have been refused

    def cancel(self, request_id: Hashable) -> bool:
        """End a request now; False if it has ended already."""
        waiting = self._preparing.cancel(request_id)
        if waiting is not None:
            self._take_prepared(waiting)
            return True
        cancelled = self.scheduler.cancel(request_id)
        self._tell_ended()
        return cancelled

    def finish(self, request_id: Hashable, sample: int) -> None:
        """End one of a request's outputs: whoever reads it has all that was wanted."""
        self.scheduler.finish(request_id, sample)
        self._tell_ended()

    def advance(self) -> None:
        """One step: plan and launch it, receive the one that is due, tell who has ended."""
        begun = time.monotonic()
        for prepared in self._preparing.take(begun):
            self._take_prepared(prepared)
        plan = self._plan(begun)
        if plan is None and not self._out and self._preparing:
            self._preparing.wait(IDLE_S)
            if not self._live:  # no step is due: whoever watches for one is not kept waiting
                self._last_time = time.monotonic()
        if plan is not None:
            self._launch(plan, begun)
        if self._out and (plan is None or len(self._out) >= self.depth):
            self._receive()
        self._tell_ended()

    def _take_prepared(self, prepared: Prepared) -> None:
        if prepared.end is None:
            self._enter(prepared.ask, prepared.live)
        else:
            prepared.live.end(prepared.end)

    def _plan(self, now: float) -> StepPlan | None:
        if len(self._out) >= MAX_STEPS_OUT:
            return None
        if self.drafting is None:
            return self.scheduler.plan(now)
        if self._out and self.drafting.waits(self._out[-1].plan):
            return None
        return self.scheduler.plan(now, self.drafting.wanted(self.scheduler.num_decoding))

    def _launch(self, plan: StepPlan, begun: float) -> None:
        in_flight = self.runner.launch(plan, self._jobs, self.scheduler.known_tokens)
        planned = PLAIN if self.drafting is None else self.drafting.planned
        self._out.append(Out(in_flight, plan, begun, time.monotonic(), planned))
        if self.drafting is not None and planned.allowed:
            self.drafting.launched(self._out[-1], self._jobs)
        for request_id, reason in in_flight.failed.items():
            self.scheduler.fail(request_id, reason)
        if in_flight.out_of_memory:
            self._shrink()

    def _receive(self) -> None:
        out = self._out.popleft()
        plan = out.in_flight.plan
        judged = self.drafting is None or out.planned.allowed
        output = self.runner.collect(out.in_flight, judged)
        last_time, self._last_time = self._last_time, time.monotonic()
        self._last_step_s = self._last_time - out.begun
        self._num_steps += 1
        if self.drafting is not None:
            self.drafting.received(out, output, last_time, self._last_time)
        tokens, counts = accepted_tokens(out.plan, plan, output)
        self._fail_nan(plan, output, counts)
        self._fail_stuck(plan)
        received = self.scheduler.receive(plan.step_id, tokens, counts)
        self._deliver(plan, received, output.extras)

    def _fail_nan(self, plan: StepPlan, output: StepOutput, counts: list[int] | None) -> None:
        """Rows behind a wrong draft mean nothing, NaN or not."""
        if not any(output.is_nan):
            return
        for index, row in enumerate(first_rows(plan)):
            key = plan.sample_keys[index]
            known = self.scheduler.num_known(key)
            for number in range(counts[index] if counts else 1):
                if output.is_nan[row + number] and known is not None:
                    self.scheduler.fail(key[0], nan_message(known + number))

    def _fail_stuck(self, plan: StepPlan) -> None:
        """Requests whose grammars allowed no token: what was chosen for them means nothing."""
        for request_id, sample in (plan.sample_keys[index] for index in plan.host_samples):
            job = self._jobs.get(request_id)
            if job is not None and job.matchers and job.matchers[sample].is_stuck:
                self.scheduler.fail(request_id, stuck_message(job.matchers[sample].count))

    def _deliver(self, plan: StepPlan, received: Received, extras: Extras) -> None:
        """Hand each request what the step brought it."""
        for part in extras.prompts:
            self._guarded(part.request_id, methodcaller("take_prompt", part))
        for states in extras.embeddings:
            self._guarded(states.request_id, methodcaller("take_embedding", states))
        logprobs = ordered_logprobs(plan, received.keys, extras)
        last = {key: index for index, key in enumerate(received.keys)}
        reasons = {last[key]: reason for key, reason in received.finished}
        stopped: set[StreamKey] = (
            set()
        )  # by a stop string: what drafts brought behind it is not wanted
        for index, (key, token) in enumerate(zip(received.keys, received.tokens, strict=True)):
            if key not in stopped and self._push(key, token, logprobs[index], reasons.get(index)):
                stopped.add(key)

    def _push(
        self, key: StreamKey, token: int, logprob: TokenLogprob | None, reason: FinishReason | None
    ) -> bool:
        """Whether a stop string, or the end of its grammar, ends the output here."""
        request_id, sample = key
        stops = False

        def push(live: LiveRequest) -> None:
            nonlocal stops
            completes = live.job.completes(sample, token) and reason is None
            stops = live.push(sample, token, logprob, "stop" if completes else reason) or completes
            if stops:
                self.scheduler.finish(request_id, sample)

        self._guarded(request_id, push)
        return stops

    def _guarded(self, request_id: Hashable, work: Callable[[LiveRequest], None]) -> None:
        """Do something for one request; if that goes wrong, it goes wrong for that one alone."""
        live = self._live.get(request_id)
        if live is None:
            return
        try:
            work(live)
        except Exception as error:
            log.warning("request %r failed: %s", request_id, reason_of(error))
            self.scheduler.fail(request_id, reason_of(error))

    def _tell_ended(self) -> None:
        for end in self.scheduler.take_ended():
            live = self._live.pop(end.request_id)
            del self._jobs[end.request_id]
            if self.drafting is not None:
                self.drafting.policy.forget(end.request_id, live.job.sampling.num_samples)
            live.end(end)

    def _shrink(self) -> None:
        """Memory was short: smaller steps from now on."""
        budget = max(SMALLEST_BUDGET, self.scheduler.token_budget // 2)
        if budget < self.scheduler.token_budget:
            log.warning("memory ran out; steps have at most %d tokens from now on", budget)
            self.scheduler.token_budget = budget
