"""What the scheduler costs on the host, and how much a trace's prefixes save."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from yardstick import slowness

from ridgeline.bench.prefix_replay import replay_prefixes
from ridgeline.bench.scheduling import time_cache, time_steps
from ridgeline.data.traces import load_workload


@pytest.mark.slow
def test_a_step_of_a_thousand_streams_is_planned_in_a_millisecond() -> None:
    plan_s, receive_s = [], []
    for _ in range(10):
        slow = slowness()
        plan, receive = time_steps(1000, num_steps=10)
        plan_s.append(plan.min_s / slow)
        receive_s.append(receive.min_s / slow)
    assert min(plan_s) < 1e-3
    assert min(receive_s) < 1e-3


def test_steps_with_drafts_and_without_overlap_are_timed_too() -> None:
    plan, _ = time_steps(20, overlap=False, num_steps=10)
    assert plan.num_samples == 10
    plan, _ = time_steps(20, num_drafts=3, num_steps=10)
    assert plan.num_samples == 10


@pytest.mark.slow
def test_a_larger_cache_is_no_slower() -> None:
    """Up to what the processor's caches make of it: 100 times the pages, less than 4 times."""
    match_s, store_s = [], []
    for num_pages in (1_000, 100_000):
        slow, found = slowness(), time_cache(num_pages, num_prompts=100)
        match_s.append(found.match.min_s / slow)
        store_s.append(found.store.min_s / slow)
    assert match_s[1] < 4 * match_s[0]
    assert store_s[1] < 4 * store_s[0]


def write_trace(path: Path) -> None:
    """Conversations of a few turns under two system prompts, in blocks of 512 tokens."""
    rows, next_hash = [], 100
    histories = [[turn % 2] for turn in range(10)]
    for turn in range(40):
        history = histories[turn * 7 % 10]
        history += range(next_hash, next_hash + 1 + turn % 3)
        next_hash += 3
        row = {"timestamp": turn * 40, "input_length": 512 * len(history) - turn % 500}
        rows.append(row | {"output_length": 3 + turn % 5, "hash_ids": list(history)})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_trace_reaches_its_ideal_hit_rate_when_its_pages_fit(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.jsonl")
    workload = load_workload(tmp_path / "trace.jsonl")
    assert 0.3 < workload.ideal_hit_rate() < 0.9
    replay = replay_prefixes(workload, num_pages=2000)
    assert replay.share_of_ideal is not None
    assert replay.share_of_ideal >= 0.9
    assert replay.num_refused == 0
    assert replay.stats.prompt_tokens == workload.num_prompt_tokens
    small = replay_prefixes(workload, num_pages=150)
    assert small.hit_rate < replay.hit_rate, "what does not fit cannot be found again"
    assert small.stats.num_pages_used == 0
