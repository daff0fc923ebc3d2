"""What the scheduler does with pages, one promise a test: whose turn it is when they are few, what
prompts and samples share, what is freed behind a window. Run as in test_scheduler.py.
"""

from __future__ import annotations

import pytest
from scheduler_driver import Driver, config, prompt, run, tokens_computed

from ridgeline.engine.scheduling.admission import MAX_LOOKUP_PAGES
from ridgeline.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from ridgeline.engine.scheduling.state import Ask
from ridgeline.engine.scheduling.step_plan import StepPlan
from ridgeline.engine.scheduling.waiting import MAX_PASSED, Deadlines

pytestmark = pytest.mark.smoke


# Order, and too few pages.


def test_first_come_first_served() -> None:
    driver = Driver(config(max_batch=2))
    for number in range(6):
        driver.submit(Ask(number, prompt(4, number), 5))
    driver.run()
    assert list(driver.ends) == list(range(6))


def test_an_earlier_arrival_goes_first() -> None:
    driver = Driver(config(max_batch=1))
    driver.submit(Ask("late", prompt(4), 3, arrival=2.0))
    driver.submit(Ask("early", prompt(4, 1), 3, arrival=1.0))
    driver.run()
    assert list(driver.ends) == ["early", "late"]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_higher_priority_goes_first_and_takes_the_place_of_lower_ones(depth: int) -> None:
    driver = Driver(config(max_batch=2))
    driver.submit(Ask("low", prompt(4), 40, priority=0))
    driver.submit(Ask("middle", prompt(4, 1), 40, priority=1))
    driver.submit(Ask("waits", prompt(4, 2), 40, priority=0))
    for _ in range(4):
        driver.step(depth=depth)
    driver.submit(Ask("high", prompt(4, 3), 5, priority=2))
    driver.run(depth)
    driver.check_end()
    assert next(iter(driver.ends)) == "high"
    assert driver.scheduler.stats().num_preemptions == 1, "only the lowest one makes way"


@pytest.mark.parametrize("depth", [1, 2])
def test_nobody_starves_behind_higher_priorities(depth: int) -> None:
    """There is always one of a higher priority waiting: two more come whenever one has ended."""
    driver = Driver(config(max_batch=1, num_pages=200))
    for number in range(3):
        driver.submit(Ask(f"low {number}", prompt(4, number), 6))
    driver.step(depth=depth)
    num_high = 0
    while not all(f"low {number}" in driver.ends for number in range(3)):
        if num_high < 2 * len(driver.ends) + 2:
            num_high += 1
            driver.submit(Ask(num_high, prompt(5, num_high), 3, priority=1))
        driver.step(depth=depth)
    order = list(driver.ends)
    turns = [order.index(f"low {number}") for number in range(3)]
    assert turns == [MAX_PASSED, 2 * MAX_PASSED + 1, 3 * MAX_PASSED + 2]
    driver.run(depth)
    driver.check_end()


def test_whose_turn_has_come_is_not_preempted_and_preempts_nobody() -> None:
    driver = Driver(config(max_batch=1))
    driver.submit(Ask("low", prompt(4), 12))
    for number in range(MAX_PASSED + 1):
        driver.submit(Ask(number, prompt(5, number), 2, priority=1))
    while MAX_PASSED - 1 not in driver.ends:  # the last that may pass it
        driver.step()
    preemptions = driver.scheduler.stats().num_preemptions
    driver.submit(Ask("highest", prompt(6, 50), 2, priority=9))
    driver.run()
    driver.check_end()
    assert list(driver.ends)[MAX_PASSED:] == ["low", "highest", MAX_PASSED]
    assert driver.scheduler.stats().num_preemptions == preemptions


def test_deadlines_of_requests_that_have_ended_are_forgotten() -> None:
    deadlines = Deadlines()
    for number in range(1000):
        deadlines.add(number, 1e6 + number)
        if number % 100:
            deadlines.discard(number)
    assert len(deadlines._heap) < 100
    deadlines.add("again", 5.0)
    deadlines.discard("again")
    deadlines.add("again", 7.0)
    assert deadlines.passed(6.0) == []
    assert deadlines.passed(7.0) == ["again"]
    assert deadlines.passed(1e7) == list(range(0, 1000, 100))


def test_the_latest_of_the_lowest_priority_is_preempted() -> None:
    """Two pages each at first; the third page of the more important ones must come from "c"."""
    driver = Driver(config(num_pages=6, token_budget=64))
    for name, priority in (("a", 1), ("b", 0), ("c", 0)):
        driver.submit(Ask(name, prompt(6, ord(name)), 12, priority=priority))
        driver.step(depth=1)
    started = set(driver.decoding())
    while driver.scheduler.stats().num_preemptions == 0:
        driver.step(depth=1)
    assert started - set(driver.decoding()) == {max(started, key=lambda key: key[0])}
    driver.run()
    driver.check_end()


def test_what_a_preempted_stream_computed_is_found_again() -> None:
    driver = Driver(config(num_pages=14, token_budget=64), vocab=50)
    run(driver, *(Ask(number, prompt(12, number), 20) for number in range(4)))
    stats = driver.scheduler.stats()
    assert stats.num_preemptions > 0
    needed = 4 * (12 + 20 - 1)
    assert needed < stats.computed_tokens < needed + 12 * stats.num_preemptions


def test_pages_run_out_and_nobody_is_lost() -> None:
    driver = Driver(config(num_pages=8, max_batch=16), vocab=50)
    run(driver, *(Ask(number, prompt(5, number), 20) for number in range(12)))
    assert {end.status for end in driver.ends.values()} == {"finished"}


def test_a_page_is_left_for_each_that_is_running() -> None:
    driver = Driver(config(num_pages=6), vocab=50)
    driver.submit(Ask("a", prompt(7), 12))
    driver.step()
    driver.submit(Ask("b", prompt(15, 1), 2))  # 4 pages are free, and it needs 4
    driver.step()
    assert driver.scheduler.stats().num_waiting == 1
    driver.run()
    driver.check_end()
    assert driver.scheduler.stats().num_preemptions == 0


def test_pages_of_a_prompt_under_way_are_not_given_away() -> None:
    driver = Driver(config(num_pages=12, token_budget=10), vocab=50)
    driver.submit(Ask("a", prompt(32), 2))  # 9 pages, 8 tokens a step
    driver.submit(Ask("b", prompt(20, 1), 2))  # 6 pages
    while driver.scheduler.stats().num_prefilling:
        driver.step()
        assert driver.scheduler.stats().num_prefilling <= 1
    driver.run()
    driver.check_end()
    assert driver.scheduler.stats().num_preemptions == 0


def test_many_lookups_are_spread_over_steps() -> None:
    length = MAX_LOOKUP_PAGES // 4 * 4  # a quarter of a step's lookups
    driver = Driver(config(num_pages=20_000, token_budget=100_000, max_batch=64), vocab=50)
    for number in range(12):
        driver.scheduler.submit(Ask(number, [number] * length, 1))
    plan = driver.scheduler.plan()
    assert plan is not None
    assert len(plan.keys) == 4


# Prefixes.


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("own_tokens", [0, 1, 10, 100])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_prefix_is_computed_once(page_size: int, own_tokens: int, depth: int) -> None:
    """64 requests over one prefix of 6,000 tokens, all submitted at once."""
    shared = prompt(6000)
    scheduler = Scheduler(SchedulerConfig(2000, page_size, token_budget=2048))
    for number in range(64):
        scheduler.submit(Ask(number, shared + [1000 + number] * own_tokens, 8))
    plans: list[StepPlan] = []
    out: list[StepPlan] = []
    while (plan := scheduler.plan()) is not None or out:
        if plan is not None:
            plans.append(plan)
            out.append(plan)
        if plan is None or len(out) == depth:
            scheduler.receive(out[0].step_id, [2000 + out[0].step_id] * len(out[0].sample_keys))
            del out[0]
    assert len(scheduler.take_ended()) == 64
    assert 6000 <= tokens_computed(plans, 6000) <= 1.15 * 6000


@pytest.mark.parametrize("how", ["cancel", "fail", "finish"])
@pytest.mark.parametrize("steps", [1, 3, 8])
def test_followers_go_on_when_the_one_ahead_ends(how: str, steps: int) -> None:
    driver = Driver(config(token_budget=10, num_pages=200))
    for number in range(4):
        driver.submit(Ask(number, [*prompt(50), 60 + number, 1], 6))
    for _ in range(steps):
        driver.step()
    assert driver.scheduler.stats().num_following == (3 if steps < 8 else 0)
    driver.end(0, how)
    driver.run()
    driver.check_end()
    assert tokens_computed(driver.plans, 50) <= 50 + 8 * 8


def test_nobody_follows_one_that_ranks_behind() -> None:
    driver = Driver(config(token_budget=8))
    driver.submit(Ask("low", prompt(40), 4))
    driver.step()
    driver.submit(Ask("high", prompt(40), 4, priority=1))
    driver.step()
    assert driver.scheduler.stats().num_following == 0
    driver.run()
    assert next(iter(driver.ends)) == "high"


def test_a_repeated_prompt_costs_one_token() -> None:
    """Even where its last page is full: the token is computed, and not written a second time."""
    driver = Driver(config(), vocab=50)
    driver.submit(Ask("first", prompt(12), 1))
    driver.run()
    driver.submit(Ask("second", prompt(12), 1))
    plan = driver.plan()
    assert plan is not None
    assert (plan.positions, plan.slots, plan.copies) == ([11], [-1], [])
    driver.run()
    driver.check_end()
    stats = driver.scheduler.stats()
    assert (stats.prompt_tokens, stats.hit_tokens, stats.computed_tokens) == (24, 11, 13)


def test_a_conversation_goes_on_where_it_ended() -> None:
    """The next prompt begins with the last prompt and answer, which end in the middle of a page."""
    driver = Driver(config(page_size=8), vocab=50)
    driver.submit(Ask("one", prompt(11), 10))
    driver.run()
    so_far = prompt(11) + driver.outputs["one", 0]
    driver.submit(Ask("two", [*so_far, 7, 7, 7], 5))
    plan = driver.plan()
    assert plan is not None
    assert plan.first_positions == [20], "all that was computed is used: the last token was not"
    assert len(plan.copies) == 1
    driver.run()
    driver.check_end()


def test_a_copied_page_is_kept_until_the_copy_is_made() -> None:
    """The page copied from is the only one that could be evicted for the next page."""
    driver = Driver(config(num_pages=4), vocab=50)
    driver.submit(Ask("one", prompt(6), 1))
    driver.run()
    driver.submit(Ask("two", [*prompt(6), 9, 9, 9], 4))
    driver.run()
    driver.check_end()


def test_tenants_share_no_pages() -> None:
    driver = Driver(config())
    run(driver, *(Ask(salt, prompt(20), 2, salt=salt) for salt in ("a", "b", "c")))
    assert driver.scheduler.stats().hit_tokens == 0


def test_a_prompt_may_be_computed_whole() -> None:
    driver = Driver(config())
    run(driver, Ask("a", prompt(20), 2))
    run(driver, *(Ask(name, prompt(20), 2, reuse_prefix=False) for name in "bc"))
    assert driver.scheduler.stats().hit_tokens == 0
    assert tokens_computed(driver.plans, 20) == 60


def test_what_loses_its_place_in_the_tree_gets_a_new_one() -> None:
    """The tree knows "second"'s prompt by the pages of "first", which are then evicted."""
    driver = Driver(config(num_pages=12), vocab=50)
    driver.submit(Ask("first", prompt(8), 1))
    driver.run()
    driver.submit(Ask("second", prompt(8), 18, reuse_prefix=False))
    for _ in range(6):
        driver.step()
    driver.submit(Ask("third", prompt(20, 1), 1))
    driver.run()
    again = prompt(8) + driver.outputs["second", 0]
    driver.submit(Ask("fourth", again, 1))
    driver.run()
    driver.check_end()
    assert driver.scheduler.stats().hit_tokens == len(again) - 1


def test_what_a_failed_request_computed_is_not_kept() -> None:
    driver = Driver(config(token_budget=8))
    driver.submit(Ask("bad", prompt(40), 4))
    for _ in range(4):
        driver.step()
    assert driver.scheduler.cache.match("", driver.scheduler.known_tokens(("bad", 0))).pages
    driver.end("bad", "fail")
    driver.run()
    assert driver.scheduler.stats().num_pages_free == driver.scheduler.config.num_pages


# Several samples, and windows.


@pytest.mark.parametrize("length", [1, 4, 6, 8])
@pytest.mark.parametrize("depth", [1, 2])
def test_samples_share_their_prompt(length: int, depth: int) -> None:
    driver = Driver(config(), vocab=50)
    run(driver, Ask("a", prompt(length), 6, num_samples=4), depth=depth)
    assert tokens_computed(driver.plans, length) == length
    copies = [copy for plan in driver.plans for copy in plan.copies]
    assert len(copies) == (3 if length % 4 else 0), "one sample writes on in the page itself"
    assert len({tuple(driver.outputs["a", sample]) for sample in range(4)}) > 1


def test_samples_with_too_few_pages_run_one_after_the_other() -> None:
    driver = Driver(config(num_pages=3), vocab=50)
    run(driver, Ask("a", prompt(6), 6, num_samples=4))
    assert driver.ends["a"].status == "finished"
    assert driver.scheduler.stats().num_preemptions > 0


def test_one_sample_may_finish_before_the_others() -> None:
    driver = Driver(config(), vocab=50)
    driver.submit(Ask("a", prompt(6), 9, num_samples=2))
    assert not driver.scheduler.finish("a", 0), "nothing is sampled yet"
    for _ in range(4):
        driver.step()
    driver.end("a", "finish")
    assert not driver.ends
    driver.run()
    driver.check_end()
    assert len(driver.outputs["a", 0]) < len(driver.outputs["a", 1]) == 9


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_pages_behind_the_window_are_free(prefix_cache: bool) -> None:
    """A prompt and an output many times the cache, which holds little more than the window."""
    driver = Driver(config(num_pages=6, window=12, prefix_cache=prefix_cache), vocab=50)
    run(driver, Ask("a", prompt(100), 50))
    assert driver.ends["a"].status == "finished"
    assert driver.scheduler.stats().num_preemptions == 0
    driver = Driver(config(num_pages=200, window=12, token_budget=8), vocab=50)
    driver.submit(Ask("a", prompt(100), 50))
    used = []
    while driver.step():
        used.append(driver.scheduler.stats().num_pages_used)
    assert max(used) <= 12 // 4 + 2 + 2 * (8 // 4)
