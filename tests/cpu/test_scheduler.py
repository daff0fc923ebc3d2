"""The scheduler, one promise a test. Whatever a plan says is run on the fake device, which checks
that each row reads its own prefix; outputs are compared with the naive loop.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from scheduler_driver import Driver

from ridgeline.engine import pages
from ridgeline.engine.admission import MAX_LOOKUP_PAGES
from ridgeline.engine.scheduler import Scheduler, SchedulerConfig
from ridgeline.engine.state import Ask
from ridgeline.engine.step_plan import StepPlan
from ridgeline.errors import UsageError

pytestmark = pytest.mark.smoke


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


# Steps.


def test_decisions_are_made_without_tensors() -> None:
    folder = Path(pages.__file__).parent
    todo, seen = ["scheduler"], set()
    while todo:
        name = todo.pop()
        seen.add(name)
        source = (folder / f"{name}.py").read_text()
        assert "torch" not in source
        todo += set(re.findall(r"^from ridgeline\.engine\.(\w+)", source, re.M)) - seen
    assert {"pages", "prefix_cache", "rows", "step_plan"} <= seen


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("num_pages", [10, 100])
def test_outputs_are_the_naive_loops(depth: int, prefix_cache: bool, num_pages: int) -> None:
    driver = Driver(config(num_pages, prefix_cache=prefix_cache, token_budget=11), vocab=50)
    asks = [Ask(n, prompt(3 + 2 * n, n % 2), 20, stop_ids=frozenset({1})) for n in range(8)]
    run(driver, *asks, depth=depth)
    assert {end.status for end in driver.ends.values()} == {"finished"}
    assert (driver.scheduler.stats().num_preemptions > 0) == (num_pages == 10)


def test_a_long_prompt_stalls_nobody() -> None:
    driver = Driver(config(num_pages=200, token_budget=16))
    for number in range(4):
        driver.submit(Ask(number, prompt(5, number), 60))
    for _ in range(4):
        driver.step()
    driver.submit(Ask("long", prompt(300, 9), 4))
    first = len(driver.plans)
    while not driver.outputs["long", 0]:
        driver.step()
    during = driver.plans[first:-1]
    assert len(during) > 20
    assert all(plan.num_decode_rows == 4 for plan in during)
    assert all(len(plan.token_ids) in (15, 16) for plan in during[:20]), "the budget is used up"
    assert max(map(len, (plan.token_ids for plan in driver.plans))) <= 16


def test_rows_and_samples_are_where_the_plan_says() -> None:
    driver = Driver(config())
    driver.submit(Ask("a", [1, 2, 3, 4, 5], 9))
    plan = driver.plan()
    assert plan is not None
    assert (plan.num_decode_rows, plan.num_draft_rows, plan.keys) == (0, 0, [("a", 0)])
    assert (plan.first_positions, plan.num_tokens, plan.positions) == ([0], [5], [0, 1, 2, 3, 4])
    assert plan.token_ids == [1, 2, 3, 4, 5]
    assert plan.slots == [0, 1, 2, 3, 4], "pages 0 and 1 of 4 tokens"
    assert (plan.sample_seats, plan.logit_tokens, plan.joined) == ([0], [4], [(0, ("a", 0))])
    assert list(zip(plan.table_indexes, plan.table_pages, strict=True)) == [(0, 0), (1, 1)]
    driver.submit(Ask("b", [9, 9], 9))
    plan = driver.plan()
    assert plan is not None
    assert (plan.keys, plan.num_decode_rows) == ([("a", 0), ("b", 0)], 1)
    assert (plan.positions, plan.slots) == ([5, 0, 1], [5, 8, 9])
    assert (plan.device_tokens, plan.device_samples) == ([0], [0]), "a's token is on the device"
    assert plan.token_ids == [0, 9, 9]
    assert (plan.logit_tokens, plan.sample_keys) == ([0, 2], [("a", 0), ("b", 0)])


def test_a_known_token_comes_from_the_host() -> None:
    driver = Driver(config())
    driver.submit(Ask("a", [1, 2, 3], 9))
    driver.plan()
    driver.receive()
    plan = driver.plan()
    assert plan is not None
    assert (plan.device_tokens, plan.token_ids) == ([], driver.outputs["a", 0])


def test_a_row_planned_in_vain_does_no_harm() -> None:
    """A stop id is seen when the next row is already out. Its pages stay until that is back."""
    driver = Driver(config(), vocab=1)  # every token is 0
    driver.submit(Ask("a", [5, 5, 5], 20, stop_ids=frozenset({0}), min_tokens=2))
    while not driver.ends:
        driver.plan()
        if len(driver.out) == 2:
            driver.receive()
    assert driver.outputs["a", 0] == [0, 0, 0]
    assert driver.finished == {("a", 0): "stop"}
    assert driver.scheduler.stats().num_pages_used > 0
    assert driver.plan() is None
    driver.receive()
    assert driver.scheduler.stats().num_pages_used == 0
    driver.check_end()


def test_the_last_token_is_not_run() -> None:
    driver = Driver(config())
    run(driver, Ask("a", prompt(5), 7))
    assert tokens_computed(driver.plans, 99) == 5 + 7 - 1
    assert driver.finished == {("a", 0): "length"}


def test_nothing_to_sample() -> None:
    driver = Driver(config(token_budget=4))
    run(driver, Ask("a", prompt(10), 0))
    assert driver.ends["a"].status == "finished"
    assert all(not plan.sample_keys for plan in driver.plans)
    assert tokens_computed(driver.plans, 99) == 10


def test_output_so_far_is_continued() -> None:
    alone = Driver(config())
    run(alone, Ask("a", prompt(6), 12))
    done = tuple(alone.outputs["a", 0][:5])
    driver = Driver(config())
    run(driver, Ask("a", prompt(6), 12, output=done))
    assert driver.outputs["a", 0] == alone.outputs["a", 0]


def test_the_budget_may_be_lowered() -> None:
    driver = Driver(config())
    for number in range(6):
        driver.submit(Ask(number, prompt(9, number), 6))
    for _ in range(3):
        driver.step()
    driver.scheduler.token_budget = 3
    driver.run()
    driver.check_end()


def test_two_steps_at_most_are_out() -> None:
    scheduler = Scheduler(config())
    scheduler.submit(Ask("a", [1, 2], 9))
    scheduler.plan()
    scheduler.plan()
    with pytest.raises(AssertionError, match="2 steps are out"):
        scheduler.plan()
    with pytest.raises(AssertionError, match="not the oldest"):
        scheduler.receive(2, [1])


def test_the_same_calls_give_the_same_plans() -> None:
    def plans() -> list[StepPlan]:
        driver = Driver(config(12, token_budget=9), seed=3)
        for number in range(6):
            driver.submit(
                Ask(number, prompt(4 + number, number % 2), 9, num_samples=1 + number % 3)
            )
            driver.step(dict.fromkeys(driver.decoding(), 2))
        driver.run()
        return driver.plans

    assert plans() == plans()


# Tokens that the host must see.


def test_who_needs_the_host_waits_for_it() -> None:
    driver = Driver(config())
    driver.submit(Ask("grammar", [1, 2, 3], 6, needs_host=True))
    driver.submit(Ask("free", [4, 5, 6], 6))
    plan = driver.plan()
    assert plan is not None
    assert plan.host_samples == [plan.sample_keys.index(("grammar", 0))]
    plan = driver.plan()
    assert plan is not None
    assert plan.keys == [("free", 0)], "the other one's token has not come back"
    driver.receive()
    plan = driver.plan()
    assert plan is not None
    assert set(plan.keys) == {("grammar", 0), ("free", 0)}
    row = plan.keys.index(("grammar", 0))
    assert plan.token_ids[row] == driver.outputs["grammar", 0][0]
    driver.run()
    driver.check_end()


def test_drafts_are_verified_in_one_row() -> None:
    driver = Driver(config())
    driver.submit(Ask("a", [1, 2, 3], 20))
    driver.submit(Ask("b", [4, 5, 6], 20))
    driver.step(depth=1)
    plan = driver.plan({("b", 0): 4})
    assert plan is not None
    assert (plan.num_decode_rows, plan.num_draft_rows) == (1, 1)
    assert (plan.keys, plan.num_tokens) == ([("a", 0), ("b", 0)], [1, 5])
    assert plan.positions == [3, 3, 4, 5, 6, 7]
    assert (plan.sample_drafts, plan.logit_tokens) == ([0, 4], [0, 1, 2, 3, 4, 5])
    assert plan.host_samples == [1]
    after = driver.plan({("b", 0): 4})
    assert after is not None
    assert after.keys == [("a", 0)], "how many drafts were accepted is not known yet"
    driver.receive()
    accepted = len(driver.outputs["b", 0]) - 1
    plan = driver.plan({("b", 0): 1})
    assert plan is not None
    assert plan.first_positions[plan.keys.index(("b", 0))] == 3 + accepted
    driver.run()
    driver.check_end()


def test_drafts_keep_to_the_end_the_budget_and_the_pages() -> None:
    driver = Driver(config(token_budget=8))
    driver.submit(Ask("a", [1, 2, 3], 4))
    driver.step(depth=1)
    plan = driver.plan({("a", 0): 9})
    assert plan is not None
    assert plan.sample_drafts == [2], "two drafts and the token after them are all that is left"
    driver.receive()
    driver.run()

    driver = Driver(config(token_budget=8))
    for name in "ab":
        driver.submit(Ask(name, [1, 2, 3, ord(name)], 30))
    driver.step(depth=1)
    driver.submit(Ask("c", [7] * 8, 4))
    plan = driver.plan({("a", 0): 9, ("b", 0): 9})
    assert plan is not None
    assert plan.sample_drafts[:2] == [3, 0], "half of the budget is for the prompt that waits"
    assert plan.num_tokens[2] == 3

    driver = Driver(config(num_pages=2))
    driver.submit(Ask("a", [1, 2, 3, 4, 5], 4))
    driver.step(depth=1)
    plan = driver.plan({("a", 0): 9})
    assert plan is not None
    assert plan.num_tokens == [3]


# Ends.


def test_what_can_never_run_is_refused() -> None:
    driver = Driver(config(num_pages=5))
    driver.submit(Ask("fits", prompt(15), 6))
    driver.submit(Ask("long", prompt(15), 7))
    driver.submit(Ask("wide", prompt(2), 2, num_samples=9))
    driver.submit(Ask("empty", [], 2))
    assert {name: end.status for name, end in driver.ends.items()} == {
        "long": "refused",
        "wide": "refused",
        "empty": "refused",
    }
    assert "15 prompt and 7 new tokens need 6 pages of 4" in driver.ends["long"].reason
    assert "the cache has 5" in driver.ends["long"].reason
    assert "9 samples" in driver.ends["wide"].reason
    driver.run()
    assert driver.ends["fits"].status == "finished"


@pytest.mark.parametrize("steps", range(12))
@pytest.mark.parametrize("how", ["cancel", "fail", "finish"])
def test_a_request_may_end_at_any_moment(steps: int, how: str) -> None:
    """Before it starts, in the middle of its prompt, while it decodes; with a step out or two."""
    driver = Driver(config(token_budget=6))
    driver.submit(Ask("other", prompt(8, 1), 12))
    driver.submit(Ask("a", prompt(20), 12))
    for _ in range(steps):
        driver.step()
    driver.end("a", how)
    driver.run()
    driver.check_end()
    assert driver.ends["a"].status == {"cancel": "cancelled", "fail": "failed"}.get(how, "finished")
    assert driver.ends["other"].status == "finished"
    assert not driver.scheduler.cancel("a"), "it has ended"


def test_a_deadline_ends_a_request_waiting_or_running() -> None:
    driver = Driver(config(max_batch=1))
    driver.submit(Ask("runs", prompt(4), 90, deadline=5.0))
    driver.submit(Ask("waits", prompt(4, 1), 90, deadline=3.0))
    driver.submit(Ask("later", prompt(4, 2), 9, deadline=99.0))
    for _ in range(8):
        driver.now += 1
        driver.step()
    assert {name: end.status for name, end in driver.ends.items()} == {
        "runs": "cancelled",
        "waits": "cancelled",
    }
    assert "deadline of 5.0 passed" in driver.ends["runs"].reason
    driver.run()
    driver.check_end()
    assert driver.ends["later"].status == "finished"


def test_an_id_is_used_once_at_a_time() -> None:
    scheduler = Scheduler(config())
    scheduler.submit(Ask("a", [1], 2, deadline=1.0))
    with pytest.raises(UsageError, match="already there"):
        scheduler.submit(Ask("a", [1], 2))
    scheduler.cancel("a")
    scheduler.submit(Ask("a", [1], 2))
    assert scheduler.plan(2.0) is not None, "the deadline was the first one's"
    assert [end.status for end in scheduler.take_ended()] == ["cancelled"]
    assert scheduler.take_ended() == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": -1}, "max_tokens is -1"),
        ({"num_samples": 0}, "num_samples is 0"),
        ({"output": (1, 2)}, "nothing is left to do"),
        ({"output": (1,), "num_samples": 2}, "continues one sample"),
    ],
)
def test_an_ask_is_checked(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Ask(**({"request_id": 0, "prompt": [1], "max_tokens": 2} | changes))  # type: ignore[arg-type]


def test_a_config_is_checked() -> None:
    with pytest.raises(UsageError, match="token_budget is 0"):
        config(token_budget=0)
    with pytest.raises(UsageError, match="policy is 'lifo'"):
        config(policy="lifo")


def test_a_device_that_forgot_everything_is_no_end() -> None:
    driver = Driver(config(30, token_budget=12))
    for number in range(5):
        driver.submit(Ask(number, prompt(9, number % 2), 14, num_samples=1 + number % 2))
    driver.submit(Ask("cancelled", prompt(9), 14))
    for _ in range(6):
        driver.step()
    driver.plan()
    driver.end("cancelled", "cancel")
    driver.reset()
    stats = driver.scheduler.stats()
    assert (stats.num_pages_free, stats.num_decoding, stats.num_prefilling) == (30, 0, 0)
    driver.run()
    driver.check_end()


# Order, and too few pages.


def test_first_come_first_served() -> None:
    driver = Driver(config(max_batch=2))
    for number in range(6):
        driver.submit(Ask(number, prompt(4, number), 5, priority=number))
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
    driver = Driver(config(max_batch=2, policy="priority"))
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


def test_the_latest_of_the_lowest_priority_is_preempted() -> None:
    """Two pages each at first; the third page of the more important ones must come from "c"."""
    driver = Driver(config(num_pages=6, policy="priority", token_budget=64))
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
    driver = Driver(config(token_budget=8, policy="priority"))
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


def test_stats_count_what_happened() -> None:
    driver = Driver(config(max_batch=1))
    driver.submit(Ask("a", prompt(10), 3))
    driver.submit(Ask("b", prompt(10, 1), 3))
    driver.plan()
    stats = driver.scheduler.stats()
    assert (stats.num_pages_used, stats.num_pages_free, stats.num_waiting) == (3, 97, 1)
    driver.run()
    stats = driver.scheduler.stats()
    assert (stats.num_pages_used, stats.num_pages_cached) == (0, 6)
    assert (stats.num_steps, stats.prompt_tokens, stats.computed_tokens) == (6, 20, 24)
