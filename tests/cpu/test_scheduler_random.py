"""Thousands of random operations on the scheduler. After each one its books are audited; every plan
is run on the fake device, which knows what each page slot holds; outputs must be the naive loop's.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from scheduler_driver import Driver

from ridgeline.engine.scheduling.scheduler import SchedulerConfig
from ridgeline.engine.scheduling.state import Ask

ENDS = ("cancel", "cancel", "fail", "finish")


def random_config(draw: random.Random) -> SchedulerConfig:
    return SchedulerConfig(
        num_pages=draw.choice([6, 10, 14, 20, 60]),
        page_size=draw.choice([2, 4, 8]),
        token_budget=draw.choice([3, 8, 20, 64]),
        max_batch=draw.choice([3, 4, 8, 16]),
        window=draw.choice([None, None, None, 3, 9, 20]),
        prefix_cache=draw.random() < 0.85,
        ahead_of_drafts=draw.random() < 0.5,
    )


def random_ask(draw: random.Random, number: int, now: float, vocab: int) -> Ask:
    """One of three prefixes cut somewhere, and a few tokens behind it."""
    prefix = random.Random(draw.randrange(3))
    length = draw.randrange(draw.choice([4, 12, 40]))
    prompt = [prefix.randrange(vocab) for _ in range(length)]
    prompt += [draw.randrange(vocab) for _ in range(draw.randrange(1, 5))]
    return Ask(
        number,
        prompt,
        max_tokens=draw.choice([0, 1, 2, 5, 12, 30]),
        min_tokens=draw.choice([0, 0, 3]),
        num_samples=draw.choice([1, 1, 1, 2, 3]),
        stop_ids=frozenset(draw.sample(range(vocab), draw.choice([0, 0, 1]))),
        priority=draw.choice([0, 0, 0, 1, 2]),
        deadline=None if draw.random() < 0.8 else now + draw.randrange(1, 30),
        salt=draw.choice(["", "", "b"]),
        needs_host=draw.random() < 0.15,
        reuse_prefix=draw.random() < 0.9,
    )


def episode(seed: int) -> Driver:
    """A random configuration, a few hundred random operations, and then the rest until its end."""
    draw = random.Random(seed)
    driver = Driver(random_config(draw), seed=seed, vocab=draw.choice([2, 4, 50]))
    depth, share_of_drafts = draw.choice([1, 2, 2]), draw.choice([0.0, 0.0, 0.6])
    for _ in range(draw.randrange(20, 250)):
        driver.now += 1
        choice = draw.random()
        if choice < 0.25 and len(driver.asks) < 40:
            for _ in range(draw.choice([1, 1, 4])):
                driver.submit(random_ask(draw, len(driver.asks), driver.now, driver.vocab))
        elif choice < 0.32 and driver.live():
            driver.end(draw.choice(driver.live()), draw.choice(ENDS))
        elif choice < 0.325:
            driver.reset()
        elif choice < 0.33:
            driver.scheduler.token_budget = draw.choice([1, 4, 16])
        else:
            keys = [key for key in driver.decoding() if draw.random() < share_of_drafts]
            driver.step({key: draw.randrange(5) for key in keys}, depth)
    driver.run(depth)
    driver.check_end()
    return driver


@pytest.mark.sweep(keep=2)
@pytest.mark.parametrize("start", range(0, 320, 40))
def test_random_operations(start: int) -> None:
    drivers = [episode(seed) for seed in range(start, start + 40)]
    ends = {end.status for driver in drivers for end in driver.ends.values()}
    assert ends == {"finished", "refused", "cancelled", "failed"}
    stats = [driver.scheduler.stats() for driver in drivers]
    assert sum(entry.num_steps for entry in stats) > 1000
    assert sum(entry.num_preemptions for entry in stats) > 0
    assert sum(entry.hit_tokens for entry in stats) > 0
    plans = [plan for driver in drivers for plan in driver.plans]
    assert any(plan.copies for plan in plans)
    assert any(sum(plan.sample_drafts) for plan in plans)
    assert any(plan.device_tokens for plan in plans)
    moved = [plan for plan in plans if plan.moved_tokens]
    assert any(sum(plan.sample_drafts) for plan in moved)
    assert any(not sum(plan.sample_drafts) for plan in moved)


class SchedulerMachine(RuleBasedStateMachine):
    """The same operations, chosen and shrunk by hypothesis."""

    @initialize(seed=st.integers(0, 10**6))
    def start(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.driver = Driver(random_config(self.draw), seed=seed, vocab=4)

    @rule(seed=st.integers(0, 10**6), count=st.integers(1, 4))
    def submit(self, seed: int, count: int) -> None:
        draw = random.Random(seed)
        for _ in range(count):
            self.driver.submit(random_ask(draw, len(self.driver.asks), self.driver.now, 4))

    @rule(count=st.integers(1, 8), drafts=st.integers(0, 4), depth=st.integers(1, 2))
    def steps(self, count: int, drafts: int, depth: int) -> None:
        for _ in range(count):
            self.driver.step(dict.fromkeys(self.driver.decoding(), drafts), depth)

    @rule()
    def plan(self) -> None:
        if len(self.driver.out) < 2:
            self.driver.plan()

    @rule()
    def receive(self) -> None:
        if self.driver.out:
            self.driver.receive()

    @rule(choice=st.integers(0, 99), how=st.sampled_from(ENDS))
    def end(self, choice: int, how: str) -> None:
        live = self.driver.live()
        if live:
            self.driver.end(live[choice % len(live)], how)

    @rule(seconds=st.integers(1, 10))
    def wait(self, seconds: int) -> None:
        self.driver.now += seconds

    @rule()
    def reset(self) -> None:
        self.driver.reset()

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.driver.run()
            self.driver.check_end()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
