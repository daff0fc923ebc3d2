"""Drives a scheduler against the fake device, as an engine would, and audits its books after every
operation.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Hashable

from fake_device import FakeDevice, naive_tokens

from ridgeline.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from ridgeline.engine.scheduling.state import Ask, End, Stream, StreamKey
from ridgeline.engine.scheduling.step_plan import StepPlan


def config(num_pages: int = 100, **changes: object) -> SchedulerConfig:
    given = {"page_size": 4, "token_budget": 32, "max_batch": 8} | changes
    return SchedulerConfig(num_pages, **given)  # type: ignore[arg-type]


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(seed * 7 + index * index) % 50 for index in range(length)]


def run(driver: Driver, *asks: Ask, depth: int = 2) -> None:
    for ask in asks:
        driver.submit(ask)
    driver.run(depth)
    driver.check_end()


def tokens_computed(plans: list[StepPlan], before: int) -> int:
    """How many tokens at positions before this one went through the model."""
    return sum(position < before for plan in plans for position in plan.positions)


class Driver:
    def __init__(self, config: SchedulerConfig, *, seed: int = 0, vocab: int = 4) -> None:
        self.draw = random.Random(seed)
        self.scheduler = Scheduler(config)
        self.device = FakeDevice(self.scheduler, vocab, self.draw)
        self.vocab = vocab
        self.asks: dict[Hashable, Ask] = {}
        self.outputs: dict[StreamKey, list[int]] = {}
        self.finished: dict[StreamKey, str] = {}
        self.ends: dict[Hashable, End] = {}
        self.out: deque[tuple[StepPlan, list[list[int]]]] = deque()
        self.plans: list[StepPlan] = []
        self.going: list[tuple[Stream, int]] = []  # ended, and gone within so many steps
        self.now = 0.0

    def submit(self, ask: Ask) -> None:
        self.asks[ask.request_id] = ask
        self.device.submitted(ask)
        for sample in range(ask.num_samples):
            self.outputs[ask.request_id, sample] = list(ask.output)
        self.scheduler.submit(ask)
        self.collect()

    def plan(self, drafts: dict[StreamKey, int] | None = None) -> StepPlan | None:
        self.watch_overdue()
        plan = self.scheduler.plan(self.now, drafts)
        self.collect()
        if plan is not None:
            budget = max(self.scheduler.token_budget, 1)
            assert 0 < len(plan.token_ids) <= budget
            self._check_host_tokens(plan)
            self.plans.append(plan)
            self.out.append((plan, self.device.run(plan)))
        return plan

    def _check_host_tokens(self, plan: StepPlan) -> None:
        """Who needs the host is named, and gets its tokens from there."""
        rows = [row for row, count in enumerate(plan.num_tokens) for _ in range(count)]
        for token in plan.device_tokens:
            assert not self.asks[plan.keys[rows[token]][0]].needs_host
        for sample, key in enumerate(plan.sample_keys):
            held = plan.sample_drafts[sample] > 0 and not self.scheduler.config.ahead_of_drafts
            waits = self.asks[key[0]].needs_host or held
            assert (sample in plan.host_samples) == waits

    def receive(self) -> None:
        plan, outputs = self.out.popleft()
        del self.device.out[plan.step_id]
        tokens = [token for output in outputs for token in output]
        counted = plan.num_draft_rows > 0 or self.draw.random() < 0.2
        counts = [len(output) for output in outputs] if counted else None
        received = self.scheduler.receive(plan.step_id, tokens, counts)
        for key, token in zip(received.keys, received.tokens, strict=True):
            assert key[0] not in self.ends, "a token for a request that has ended"
            assert key not in self.finished, "a token for a sample that has finished"
            self.outputs[key].append(token)
        for key, reason in received.finished:
            self.finished[key] = reason
        self.collect()
        self.going = [(stream, left - 1) for stream, left in self.going if stream.state != "gone"]
        assert all(left > 0 for _, left in self.going), "pages are held two steps after the end"

    def step(self, drafts: dict[StreamKey, int] | None = None, depth: int = 2) -> bool:
        """Plan, and receive what is due; whether anything happened."""
        planned = self.plan(drafts) if len(self.out) < 2 else None
        if self.out and (planned is None or len(self.out) >= depth):
            self.receive()
            return True
        return planned is not None

    def run(self, depth: int = 2, max_steps: int = 20_000) -> None:
        """Until everything has ended."""
        for _ in range(max_steps):
            if not self.step(depth=depth):
                break
        assert not self.out
        assert self.ends.keys() == self.asks.keys(), "a request is lost"

    def end(self, request_id: Hashable, how: str) -> None:
        """Cancel or fail a request, or finish its first sample."""
        self.watch(request_id)
        if how == "cancel":
            self.scheduler.cancel(request_id)
        elif how == "fail":
            self.scheduler.fail(request_id, "made to fail")
        elif self.scheduler.finish(request_id, 0):
            self.finished[request_id, 0] = "stop"
        self.going = [entry for entry in self.going if entry[0].ended]
        self.collect()

    def watch(self, request_id: Hashable) -> None:
        streams = [s for s in self.scheduler._running.streams.values() if s.key[0] == request_id]
        self.going += [(stream, 2) for stream in streams]

    def watch_overdue(self) -> None:
        for request_id, ask in self.asks.items():
            overdue = ask.deadline is not None and ask.deadline <= self.now
            if overdue and request_id not in self.ends:
                self.watch(request_id)

    def reset(self) -> None:
        self.scheduler.reset()
        self.out.clear()
        self.device.out.clear()
        self.device.memory = [None] * len(self.device.memory)
        for key, stream in self.scheduler._running.streams.items():
            self.device.history[key] = list(stream.tokens)
        self.going = []
        self.collect()

    def collect(self) -> None:
        for end in self.scheduler.take_ended():
            assert end.request_id not in self.ends, "a request ended twice"
            self.ends[end.request_id] = end
        self.audit()

    def live(self) -> list[Hashable]:
        return [request_id for request_id in self.asks if request_id not in self.ends]

    def decoding(self) -> list[StreamKey]:
        return [stream.key for stream in self.scheduler._running.decoding]

    def audit(self) -> None:
        """The books agree with each other."""
        scheduler, running = self.scheduler, self.scheduler._running
        cache, config = scheduler.cache, scheduler.config
        leaving = [stream for step in running.steps.values() for stream in step.leaving]
        streams = [*running.prefilling, *running.decoding, *leaving]
        assert len(set(map(id, streams))) == len(streams)
        holders: Counter[int] = Counter()
        for stream in streams:
            holders.update(stream.pages[stream.num_dropped :])
            if stream.copy_source is not None:
                holders[stream.copy_source] += 1
        for step in running.steps.values():
            holders.update(step.pins)
        stats = scheduler.stats()
        free = set(cache.pool._free)
        for page in range(config.num_pages):
            assert cache.pool.holders(page) == holders[page]
            in_tree = cache._node[page] is not None
            assert (page in free) == (holders[page] == 0 and not in_tree)
            assert cache.is_idle(page) == (holders[page] == 0 and in_tree)
        assert stats.num_pages_used == len(+holders)
        parts = (stats.num_pages_free, stats.num_pages_used, stats.num_pages_cached)
        assert sum(parts) == config.num_pages
        assert sorted(cache._page.values()) == [
            page for page in range(config.num_pages) if cache._node[page] is not None
        ]
        seats = [s for stream in streams for s in (stream.seat, *stream.spare_seats)]
        assert sorted(seats + running.seats) == list(range(config.max_batch))
        assert running.coming == sum(stream.coming for stream in leaving)
        assert running.coming_seats == sum(1 + len(stream.spare_seats) for stream in leaving)
        assert running.tables.promised == sum(stream.promised for stream in streams)
        states = Counter(stream.state for stream in running.streams.values())
        assert stats.num_waiting == states["waiting"]
        assert stats.num_following == states["following"]
        running_now = [*running.prefilling, *running.decoding]
        followed = [f for s in running_now for _, f in s.followers if f.state == "following"]
        assert len(followed) == states["following"], "somebody follows nobody"

    def check_end(self) -> None:
        """Everything ended as it should, and nothing is held."""
        assert self.ends.keys() == self.asks.keys()
        stats = self.scheduler.stats()
        assert stats.num_pages_used == 0
        assert stats.num_pages_free + stats.num_pages_cached == self.scheduler.config.num_pages
        assert not self.scheduler._running.streams
        assert not self.scheduler._running.following._announced
        for request_id, ask in self.asks.items():
            for sample in range(ask.num_samples):
                self._check_output(ask, sample, self.ends[request_id].status)

    def _check_output(self, ask: Ask, sample: int, status: str) -> None:
        key = (ask.request_id, sample)
        right, output = naive_tokens(ask, sample, self.vocab), self.outputs[key]
        assert output == right[: len(output)], "the output is not the naive loop's"
        if status == "finished" and self.finished.get(key) != "stop":
            assert output == right
