"""The scheduler's steps and ends, one promise a test; what it does with pages is in
test_scheduler_pages.py. Whatever a plan says is run on the fake device, which checks
that each row reads its own prefix; outputs are compared with the naive loop.
"""

from __future__ import annotations

import pytest
from scheduler_driver import Driver, config, prompt, run, tokens_computed

from ridgeline.engine.scheduling.scheduler import Scheduler
from ridgeline.engine.scheduling.state import Ask
from ridgeline.engine.scheduling.step_plan import StepPlan
from ridgeline.errors import UsageError

pytestmark = pytest.mark.smoke


# Steps.


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
    with pytest.raises(UsageError, match="is in use"):
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
