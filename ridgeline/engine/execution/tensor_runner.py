"""Runs steps on several ranks, each with its part of the model (parallel/inference/).

Rank 0 has the scheduler and the requests. Its `launch` tells the others of the step in one message
of plain numbers, and then does what they do: its part of every pass. To whoever calls it, it is a
`Runner`. The others run `serve` until they are told to stop.

- Tokens are rank 0's: it samples from the logits that all ranks have put together, and sends what
  it chose from device to device. Each rank could sample by itself, and would come to the same
  tokens on equal devices; sent, they are the same whatever the devices are. So are drafts and the
  verdicts on them (rank_drafts.py).
- A pass that fails, fails on all ranks or on one. So that nobody waits for a rank that has given
  up, this one still takes part in the sums that are left of the pass, with zeros; then all ranks
  tell each other how it went. If it went wrong on one, it did on all, and they run it again in
  the same parts (faults.py).
- Which steps become graphs, and whether they are run launch by launch for somebody who traces, is
  for rank 0 to say: the memory that a capture took may differ, and neither padding nor the calls
  between ranks may.
- A step that is left in its middle, by Ctrl-C or a lost rank, leaves the ranks at different
  places: from then on every step is refused, in words.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from ridgeline.capture import capture
from ridgeline.engine.execution.faults import is_out_of_memory, raise_if_lost, reason_of
from ridgeline.engine.execution.graphs import Graphs
from ridgeline.engine.execution.rank_drafts import ReceivedDrafts
from ridgeline.engine.execution.runner import InFlight, Runner, StepOutput
from ridgeline.engine.execution.step_pass import PassResult, StepPass
from ridgeline.engine.execution.step_words import JOB_WORDS, job_of, job_words, plan_of, step_words
from ridgeline.engine.requests.request import Sampling
from ridgeline.engine.sampling.drafter import KnownTokens
from ridgeline.engine.sampling.extras import ROWS_AT_ONCE, DeviceJob, Jobs
from ridgeline.engine.scheduling.step_plan import StepPlan
from ridgeline.engine.steps.batch import StepInputs, StepShape
from ridgeline.errors import HardwareError, RidgelineError, UsageError
from ridgeline.models import Transformer
from ridgeline.parallel.inference.group import Group
from ridgeline.recipe import Recipe

STOP, STEP = 0, 1  # what a message begins with
WENT_WELL, WENT_SHORT, WENT_WRONG = 0, 1, 2  # how a pass ended: memory was short, or an error
CHECK_S = 0.2  # how often rank 0, while it waits for a device, asks whether all ranks are there
RankCall = tuple[Callable[[Tensor], object], tuple[int, int]]  # a sum or a gather, and its shape
GREEDY = Sampling(seed=0)  # for ranks that do not choose


class AgreedGraphs(Graphs):
    """Captures where rank 0 has room for it."""

    has_ranks = True
    room = False  # what rank 0 said

    def _has_room(self) -> bool:
        return self.room

    def has_own_room(self) -> bool:
        return super()._has_room()

    def _capture(self, work: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """NCCL looks after its events in a thread of its own, which a capture of the whole process
        would forbid.
        """
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        return capture(work, self._pool, own_thread=True)


class TensorRunner(Runner):
    graphs_type = AgreedGraphs

    def __init__(
        self,
        model: Transformer,
        recipe: Recipe,
        num_pages: int,
        graph_bytes: int,
        group: Group,
        end_ranks: Callable[[], None] = lambda: None,
    ) -> None:
        """`end_ranks` is called when no step follows."""
        self.group = group
        group.in_order = recipe.deterministic
        if group.leads:
            group.send([num_pages, graph_bytes])
        try:
            group.together(
                lambda: super(TensorRunner, self).__init__(model, recipe, num_pages, graph_bytes)
            )
        except BaseException:
            end_ranks()
            raise
        self._over: RidgelineError | None = None  # why no step can be run any more
        self._numbers: dict[Hashable, int] = {}  # of requests that the others know
        self._known: dict[Hashable, DeviceJob] = {}
        self._num_known = 0
        self._told_jobs: dict[Hashable, DeviceJob] = {}  # what other ranks know, by number
        self._told_failed: dict[Hashable, str] = {}  # requests that rank 0 could not seat
        self._shape: StepShape | None = None  # of the pass under way, once it has one
        self._finalizer = weakref.finalize(self, _stop, group, end_ranks)

    def launch(self, plan: StepPlan, jobs: Jobs, known_tokens: KnownTokens) -> InFlight:
        if self._over is not None:
            raise self._over
        try:
            return super().launch(plan, jobs, known_tokens)
        except BaseException as error:
            self._give_up(f"a step was left in its middle ({reason_of(error)}); make a new engine")
            raise

    def collect(self, in_flight: InFlight, judged: bool = True) -> StepOutput:
        """A device that waits for a rank that has gone would wait forever."""
        checked = time.monotonic()
        while in_flight.event is not None and not in_flight.event.query():
            if time.monotonic() - checked > CHECK_S:
                checked = time.monotonic()
                self._check_ranks()
            time.sleep(0)
        return super().collect(in_flight, judged)

    def _check_ranks(self) -> None:
        try:
            self.group.check()
        except HardwareError as error:
            self._give_up(f"{error}; make a new engine")
            raise

    def close(self) -> None:
        self._over = self._over or UsageError("the engine is closed; make a new one")
        self._finalizer()

    def _give_up(self, reason: str) -> None:
        """The ranks stand at different places: they are ended without another word."""
        if self._over is None:
            self._over = HardwareError(reason)
            finalizer = self._finalizer.detach()
            if finalizer is not None:
                _, _, (group, end_ranks), _ = finalizer
                group.close()
                end_ranks()

    # --- one step -----------------------------------------------------------------------------

    def _seat(self, plan: StepPlan, jobs: Jobs, known_tokens: KnownTokens) -> dict[Hashable, str]:
        """Rank 0 seats who has joined, and tells of the step and of those it could not seat."""
        if self.group.leads:
            failed = super()._seat(plan, jobs, known_tokens)
            self._tell(plan, jobs, failed)
            return failed
        for seat, key in plan.joined:
            self.sampler.seats.sit(seat, len(jobs[key[0]].prompt), GREEDY, 0)
        return dict(self._told_failed)

    def _tell(self, plan: StepPlan, jobs: Jobs, failed: dict[Hashable, str]) -> None:
        room = by_hand = False
        if isinstance(self.graphs, AgreedGraphs):
            room, by_hand = self.graphs.has_own_room(), self.graphs.by_hand
        gone = self._forget(jobs)
        new = self._get_to_know(plan, jobs, gone)
        words = [STEP, int(room), int(by_hand), len(gone), *gone, len(new) // JOB_WORDS, *new]
        unseated = [self._numbers[request_id] for request_id in failed]
        self.group.send([*words, len(unseated), *unseated, *step_words(plan, self._numbers)])
        self._set_graphs(room, by_hand)

    def _set_graphs(self, room: bool, by_hand: bool) -> None:
        if isinstance(self.graphs, AgreedGraphs):
            self.graphs.room, self.graphs.by_hand = room, by_hand

    def _get_to_know(self, plan: StepPlan, jobs: Jobs, gone: list[int]) -> list[int]:
        """Numbers for requests that the others have not heard of. An id that comes again is another
        request, and the one before it is gone. Steps of nobody (rehearsal.py) are joined by nobody.
        """
        words: list[int] = []
        joined = [request_id for _, (request_id, _) in plan.joined]
        if plan.keys and plan.keys[0][0] not in self._known:
            joined.append(plan.keys[0][0])
        for request_id in joined:
            job = jobs[request_id]
            if self._known.get(request_id) is not job:
                gone += [self._numbers[request_id]] if request_id in self._known else []
                self._known[request_id], self._numbers[request_id] = job, self._num_known
                words += job_words(self._num_known, job)
                self._num_known += 1
        return words

    def _forget(self, jobs: Jobs) -> list[int]:
        """Requests that have ended, once there are many of them."""
        if len(self._known) <= 2 * len(jobs) + 16:
            return []
        gone = [request_id for request_id in self._known if request_id not in jobs]
        for request_id in gone:
            del self._known[request_id]
        return [self._numbers.pop(request_id) for request_id in gone]

    def keeps(self, step: StepPass) -> bool:
        """What the next step takes is what rank 0 sends."""
        return False

    def end_step(self, plan: StepPlan, kept: bool) -> None:
        """Where tokens are drafted rank 0 alone judges: then its drafts are shared, too."""
        num_samples = len(plan.logit_tokens)
        if self.drafter is None:
            self.share_results(num_samples)
            super().end_step(plan, kept)
            return
        if self.group.leads:
            super().end_step(plan, kept)
        self.share_results(num_samples)
        if num_samples:
            self.group.broadcast(self.buffers.last_tokens)

    def share_results(self, num_samples: int) -> None:
        """Every rank goes on with the tokens that rank 0 chose: every one of the first stage, which
        are those that look tokens up.
        """
        if num_samples:
            self.group.broadcast(self.buffers.results)

    # --- one pass -----------------------------------------------------------------------------

    def _run(self, step: StepPass) -> PassResult:
        """As one rank does it; how it went is the same on all ranks."""
        self._shape, self.group.num_calls = None, 0
        captured = set() if self.graphs is None else set(self.graphs.captured)
        result = PassResult([])
        error: Exception | None = None
        try:
            result = super()._run(step)
        except Exception as raised:
            raise_if_lost(raised)
            error = raised.with_traceback(None)  # which would hold the tensors of the pass
        if error is not None:
            self._take_part_in_the_rest(step.plan, step.jobs)
        agreed = self._agree(error)
        if agreed is None:
            return result
        if self.graphs is not None:  # what one rank has captured, all must have
            for kind in set(self.graphs.captured) - captured:
                del self.graphs.captured[kind]
        raise agreed

    @property
    def moves(self) -> bool:
        """Verdicts stay in the first stage."""
        return self.group.num_stages == 1 and super().moves

    def _run_eagerly(self, step: StepPass, max_length: int) -> PassResult:
        """Logits are the first stage's."""
        if self.group.stage == 0:
            return super()._run_eagerly(step, max_length)
        self.forward_eagerly(step, max_length)
        return PassResult([])

    def send(self, step: StepPass, shape: StepShape) -> StepInputs:
        self._shape = shape
        return super().send(step, shape)

    def finish(
        self, step: StepPass, logits_RV: Tensor, inputs: StepInputs, tokens_R: Tensor, kept: bool
    ) -> PassResult:
        self._shape = None  # no sum follows
        if not self.group.leads:
            return PassResult([])
        return super().finish(step, logits_RV, inputs, tokens_R, kept)

    def _take_part_in_the_rest(self, plan: StepPlan, jobs: Jobs) -> None:
        """The sums of a pass that this rank could not finish: the others wait for its part."""
        try:
            for call, shape in self._calls(plan, jobs)[self.group.num_calls :]:
                call(self.model.embed.weight.new_zeros(shape))
        except Exception as error:  # then there is no way to go on together
            raise HardwareError(f"a rank cannot take part in a pass: {reason_of(error)}") from error

    def _calls(self, plan: StepPlan, jobs: Jobs) -> list[RankCall]:
        """All that the ranks do together in the pass under way; nothing, if it has none left."""
        if self._shape is None:
            return []
        config, group = self.model.config, self.group
        states = (self._shape.num_tokens, config.hidden_size)
        layers: list[RankCall] = [(group.all_reduce, states)] * (2 * config.num_layers)
        handed_on, taken_over = (group.hand_on, states), (group.take_over, states)
        if group.stage:
            return [taken_over, *layers, handed_on]
        around = [handed_on, taken_over] if group.num_stages > 1 else []
        rows = [*prompt_logit_rows(plan, jobs), self._shape.num_samples]
        num_columns = len(self.model.head.weight)
        gathers = [(group.all_gather, (count, num_columns)) for count in rows if count]
        return [(group.all_reduce, states), *layers, *around, *gathers]

    def _agree(self, error: Exception | None) -> Exception | None:
        """What every rank raises: of the same kind on all, with the words of one that failed."""
        own = WENT_WELL
        if error is not None:
            own = WENT_SHORT if is_out_of_memory(error) else WENT_WRONG
        worst = self.group.largest(own)
        if worst == WENT_WELL:
            return None
        reasons = self.group.texts(reason_of(error) if error is not None and own == worst else "")
        if own == worst:
            return error
        rank, reason = next((rank, text) for rank, text in enumerate(reasons) if text)
        kind = torch.OutOfMemoryError if worst == WENT_SHORT else RuntimeError
        return kind(f"on rank {rank}: {reason}")


def prompt_logit_rows(plan: StepPlan, jobs: Jobs) -> list[int]:
    """Rows of each call for logits that extras.py makes for the prompts of a step."""
    counts = []
    for row in range(plan.num_decode_rows, len(plan.keys)):
        job, first = jobs[plan.keys[row][0]], plan.first_positions[row]
        count = len(job.predicting(first, plan.num_tokens[row]))
        counts += [min(ROWS_AT_ONCE, count - start) for start in range(0, count, ROWS_AT_ONCE)]
    return counts


def serve(model: Transformer, recipe: Recipe, group: Group) -> None:
    """A rank other than 0: runs each step it is told of, until it is told to stop."""
    num_pages, graph_bytes = group.receive()
    runner = TensorRunner(model, recipe, num_pages, graph_bytes, group)
    if recipe.speculation.method != "none":
        in_graph = recipe.speculation.method == "prompt-lookup"
        runner.drafter = ReceivedDrafts(in_graph, group, runner.buffers.last_tokens)
    while (words := group.receive())[0] != STOP:
        plan = _read_step(words, runner)
        runner.launch(plan, runner._told_jobs, lambda key: ())
    runner._finalizer.detach()
    group.close()


def _read_step(words: list[int], runner: TensorRunner) -> StepPlan:
    """What `_tell` said."""
    rest = iter(words[1:])

    def take(count: int) -> list[int]:
        return [next(rest) for _ in range(count)]

    runner._set_graphs(*map(bool, take(2)))
    for number in take(next(rest)):
        del runner._told_jobs[number]
    for _ in range(next(rest)):
        number, job = job_of(take(JOB_WORDS))
        runner._told_jobs[number] = job
    runner._told_failed = dict.fromkeys(take(next(rest)), "rank 0 could not seat it")
    return plan_of(list(rest))


def _stop(group: Group, end_ranks: Callable[[], None]) -> None:
    """Rank 0 lets the others go."""
    try:
        if group.leads:
            group.send([STOP])
    except HardwareError:
        pass  # they have gone already
    end_ranks()
    group.close()
