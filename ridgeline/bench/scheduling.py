"""What the engine's decisions cost on the host: planning a step, and the prefix cache as it grows.

    python -m ridgeline.bench.scheduling

Nothing is computed: a step's tokens come back as soon as it is planned (`overlap=False`), or when
the one after it has been planned, as the engine runs them.
"""

from __future__ import annotations

import random
import time
from array import array
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from ridgeline.engine.scheduling.prefix_cache import TOKEN_BYTES, PrefixCache
from ridgeline.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from ridgeline.engine.scheduling.state import Ask, StreamKey
from ridgeline.engine.scheduling.step_plan import StepPlan
from ridgeline.timing import Timing

PAGE_SIZE = 64
PROMPT_PAGES = 32  # of the prompts that fill the prefix cache


class StepTimes(NamedTuple):
    """Of steps in which every stream decodes."""

    plan: Timing
    receive: Timing


class CacheTimes(NamedTuple):
    """Per page, in a cache without a free page."""

    match: Timing  # a prompt is found, and its pages are held and let go
    store: Timing  # a page is taken from the oldest prompt, written into the tree and let go


def time_steps(
    num_running: int, *, overlap: bool = True, num_drafts: int = 0, num_steps: int = 300
) -> StepTimes:
    """Steps with this many streams, at contexts that cross a page's end at different times."""
    scheduler = _decoding_scheduler(num_running, num_steps * (1 + num_drafts) + 16)
    drafts: dict[StreamKey, int] = {(number, 0): num_drafts for number in range(num_running)}
    out: deque[StepPlan] = deque()
    plan_s, receive_s = [], []
    for _ in range(num_steps):
        start = time.perf_counter()
        plan = scheduler.plan(0.0, drafts)
        plan_s.append(time.perf_counter() - start)
        assert plan is not None, "streams are left to decode"
        assert len(plan.seats) == num_running, f"{len(plan.seats)} of {num_running} rows"
        out.append(plan)
        if len(out) > (1 if overlap and not num_drafts else 0):
            receive_s.append(_receive(scheduler, out.popleft()))
    return StepTimes(Timing.from_samples(plan_s), Timing.from_samples(receive_s))


def _decoding_scheduler(num_running: int, num_tokens: int) -> Scheduler:
    """All prompts are computed, and each stream has `num_tokens` to make."""
    pages = num_running * (num_tokens + 4 * PAGE_SIZE) // PAGE_SIZE
    config = SchedulerConfig(num_pages=pages, page_size=PAGE_SIZE, max_batch=num_running)
    scheduler = Scheduler(config)
    for number in range(num_running):
        prompt = [number] * (PAGE_SIZE + number % PAGE_SIZE)
        scheduler.submit(Ask(number, prompt, num_tokens, stop_ids=frozenset({0})))
    while scheduler.stats().num_decoding < num_running:
        plan = scheduler.plan()
        assert plan is not None, "prompts are left to compute"
        _receive(scheduler, plan)
    return scheduler


def _receive(scheduler: Scheduler, plan: StepPlan) -> float:
    """Seconds. Every draft is accepted."""
    counts = [1 + drafts for drafts in plan.sample_drafts] if plan.num_draft_rows else None
    tokens = [1] * (sum(counts) if counts else len(plan.sample_seats))
    start = time.perf_counter()
    scheduler.receive(plan.step_id, tokens, counts)
    return time.perf_counter() - start


def time_cache(num_pages: int, *, num_prompts: int = 300) -> CacheTimes:
    """Operations on a cache in which all pages hold prompts that share nothing."""
    cache, draw = PrefixCache(num_pages, PAGE_SIZE), random.Random(0)
    prompts = deque(_prompt(draw) for _ in range(num_pages // PROMPT_PAGES))
    for prompt in prompts:
        _store(cache, prompt)
    match_s, store_s = [], []
    for _ in range(num_prompts):
        known = prompts[draw.randrange(len(prompts) // 2, len(prompts))]
        match_s.append(_seconds_a_page(_match, cache, known))
        prompts.append(_prompt(draw))
        store_s.append(_seconds_a_page(_store, cache, prompts[-1]))
        prompts.popleft()
    return CacheTimes(Timing.from_samples(match_s), Timing.from_samples(store_s))


def _prompt(draw: random.Random) -> array[int]:
    """Any 32 bits are a token here."""
    return array("i", draw.randbytes(PROMPT_PAGES * PAGE_SIZE * TOKEN_BYTES))


def _seconds_a_page(
    work: Callable[[PrefixCache, array[int]], None], cache: PrefixCache, prompt: array[int]
) -> float:
    start = time.perf_counter()
    work(cache, prompt)
    return (time.perf_counter() - start) / PROMPT_PAGES


def _match(cache: PrefixCache, prompt: array[int]) -> None:
    pages = cache.match("", prompt).pages
    assert len(pages) == PROMPT_PAGES, f"{len(pages)} of {PROMPT_PAGES} pages are still there"
    for page in pages:
        cache.hold(page)
    for page in reversed(pages):
        cache.release(page)


def _store(cache: PrefixCache, prompt: array[int]) -> None:
    position, pages = cache.root(""), []
    for start in range(0, len(prompt), PAGE_SIZE):
        page = cache.take()
        assert page is not None, "nobody holds a page"
        position = cache.insert(position, prompt[start : start + PAGE_SIZE].tobytes(), page)
        pages.append(page)
    for page in reversed(pages):
        cache.release(page)


def main() -> None:
    for overlap, drafts in ((True, 0), (False, 0), (False, 4)):
        plan, receive = time_steps(1000, overlap=overlap, num_drafts=drafts)
        print(
            f"1,000 streams, overlap {overlap}, {drafts} drafts: plan {plan.median_s * 1e3:.2f} ms "
            f"(p90 {plan.p90_s * 1e3:.2f}), receive {receive.median_s * 1e3:.2f} ms"
        )
    for num_pages in (10**4, 10**5, 10**6):
        match, store = time_cache(num_pages)
        print(
            f"{num_pages:,} pages: match {match.median_s * 1e6:.2f} µs a page, "
            f"store and evict {store.median_s * 1e6:.2f} µs a page"
        )


if __name__ == "__main__":
    main()
