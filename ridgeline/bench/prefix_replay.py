"""A workload's prompts through the scheduler without a model: how much of them the prefix cache
saves.

    workload = load_workload("mooncake_conversation_first3000.jsonl")
    print(replay_prefixes(workload, num_pages=500_000).share_of_ideal)

Time is simulated: a step takes what its tokens take at `tokens_per_s`, and requests arrive by their
own clock. Output tokens differ from request to request, so that only prompts can be shared.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from ridgeline.data.workload import Workload
from ridgeline.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from ridgeline.engine.scheduling.state import Ask, Stats
from ridgeline.engine.scheduling.step_plan import StepPlan

VOCAB = 100_000  # of the prompts
STEP_S = 0.004  # what a step takes at least


@dataclass(frozen=True)
class PrefixReplay:
    hit_rate: float  # prompt tokens found in the cache, of all
    ideal_hit_rate: float  # Workload.ideal_hit_rate
    duration_s: float  # simulated
    num_refused: int
    stats: Stats

    @property
    def share_of_ideal(self) -> float | None:
        """None where no prompts begin alike."""
        return self.hit_rate / self.ideal_hit_rate if self.ideal_hit_rate else None


def replay_prefixes(
    workload: Workload,
    *,
    num_pages: int,
    page_size: int = 64,
    token_budget: int = 8192,
    max_batch: int = 512,
    tokens_per_s: float = 45_000.0,
) -> PrefixReplay:
    """Run every request to its end, one step planned ahead."""
    config = SchedulerConfig(num_pages, page_size, token_budget, max_batch)
    scheduler = Scheduler(config)
    arrivals = _asks(workload)
    coming = next(arrivals, None)
    tokens = count(VOCAB)  # each is new: no prompt has it
    out: deque[StepPlan] = deque()
    now, num_refused = 0.0, 0
    while True:
        while coming is not None and coming.arrival <= now:
            scheduler.submit(coming)
            coming = next(arrivals, None)
        plan = scheduler.plan(now)
        if plan is not None:
            out.append(plan)
            now += max(STEP_S, len(plan.token_ids) / tokens_per_s)
        if out and (plan is None or len(out) == 2):
            done = out.popleft()
            made = [next(tokens) % 2**31 for _ in done.sample_seats]
            scheduler.receive(done.step_id, made)
        elif plan is None:
            if coming is None:
                break
            now = max(now, coming.arrival)
        num_refused += sum(end.status == "refused" for end in scheduler.take_ended())
    stats = scheduler.stats()
    rate = stats.hit_tokens / max(stats.prompt_tokens, 1)
    return PrefixReplay(rate, workload.ideal_hit_rate(), now, num_refused, stats)


def _asks(workload: Workload) -> Iterator[Ask]:
    """The requests as they arrive; prompts are made one by one, since together they are long."""
    for index, request in enumerate(workload.requests):
        prompt = workload.prompt_ids(index, VOCAB)
        yield Ask(index, prompt, request.num_output_tokens, arrival=request.arrival_s)
