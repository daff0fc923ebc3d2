"""What an engine's steps were made of, counted as they run."""

from __future__ import annotations

import time
from dataclasses import replace
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines import tiny
from test_engine_api import writer

from ridgeline.engine import Engine, Sampling
from ridgeline.engine.backend import EngineProgress
from ridgeline.engine.execution.step_watch import StepWatch
from ridgeline.engine.execution.work import NEWS_S, StepMeter, StepTotals, Work, matrix_dtype
from ridgeline.engine.process.heartbeat import Heartbeat, WatchedRunner
from ridgeline.engine.scheduling.histogram import BOUNDS_S, Histogram, percentile
from ridgeline.engine.scheduling.state import Stats
from ridgeline.engine.scheduling.step_plan import StepPlan
from ridgeline.models.copies import with_kinds
from ridgeline.profiling.roofline import matrix_units
from ridgeline.quantization.nearest import quantize_nearest
from ridgeline.quantization.scheme import parse_scheme
from ridgeline.recipe import KV, Limits, Recipe

RECIPE = Recipe(
    dtype="fp32",
    kv=KV(page_size=16),
    limits=Limits(max_batch=4, token_budget=16, memory_share=0.02),
)


def test_totals_are_sums_over_the_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the plans themselves, with a prompt in pieces beside rows that decode."""
    model, tokenizer = writer()
    engine = Engine(model, RECIPE, tokenizer=tokenizer, num_pages=64)
    loop, meter = engine.local.loop, StepMeter(engine.runner.device)
    plans: list[StepPlan] = []
    end = StepWatch.end
    monkeypatch.setattr(
        StepWatch, "end", lambda self, plan: (plans.append(plan), end(self, plan))[1]
    )
    watched = WatchedRunner(engine.runner, Heartbeat(get_context("spawn")), meter)
    loop.runner = watched  # type: ignore[assignment]
    settings = Sampling(max_tokens=9, ignore_eos=True)
    for number, prompt in enumerate([list(range(1, 40)), [5, 6, 7], [9, 8]]):
        engine.add(prompt, settings, request_id=number)
    while engine.has_work:
        engine.step()

    work, prefills = meter.work, [plan for plan in plans if max(plan.num_tokens) > 1]
    decodes = [plan for plan in plans if plan not in prefills]
    assert prefills
    assert decodes
    for kind, of_kind in ((work.prefill, prefills), (work.decode, decodes)):
        assert kind.num_steps == len(of_kind)
        assert kind.num_tokens == sum(len(plan.token_ids) for plan in of_kind)
        assert kind.num_rows == sum(len(plan.keys) for plan in of_kind)
        assert kind.num_logits == sum(len(plan.logit_tokens) for plan in of_kind)
        assert kind.num_pairs == sum(p + 1 for plan in of_kind for p in plan.positions)
        spans = [zip(p.first_positions, p.num_tokens, strict=True) for p in of_kind]
        assert kind.num_keys == sum(first + new for span in spans for first, new in span)
        assert kind.busy_s > 0


def test_gaps_count_only_while_there_is_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step from 1 to 3, one from 4 to 6, a rest, one from 100 to 101."""
    marks = iter([1.0, 3.0, 4.0, 6.0, 100.0, 101.0])
    monkeypatch.setattr(
        "ridgeline.engine.execution.step_watch.time.perf_counter", lambda: next(marks)
    )
    meter = StepMeter(torch.device("cpu"))
    plan = StepPlan(1, num_decode_rows=1, num_tokens=[1], positions=[7], first_positions=[7])
    for rests in (False, True, False):
        meter.begin()
        meter.end(plan)
        meter.count_finished()
        if rests:
            meter.rest()
    assert meter.work.gap_s == 1.0
    assert meter.work.decode == StepTotals(3, 5.0, 3, 3, 0, 24, 24)


def test_steps_the_device_is_not_through_with_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last step before a rest is often counted only after it: the rest is no gap even so."""
    marks = iter([1.0, 3.0, 100.0, 101.0, 101.5, 102.0])
    monkeypatch.setattr(
        "ridgeline.engine.execution.step_watch.time.perf_counter", lambda: next(marks)
    )
    meter, plan = StepMeter(torch.device("cpu")), StepPlan(1)
    over = {3.0: False, 101.0: True, 102.0: True}
    monkeypatch.setattr("ridgeline.engine.execution.work._is_over", lambda mark: over[mark])
    for rests in (True, False, False):
        meter.begin()
        meter.end(plan)
        meter.count_finished()
        if rests:
            assert meter.work.decode.num_steps == 0
            meter.rest()
            over[3.0] = True
    assert meter.work.decode.num_steps == 3
    assert meter.work.gap_s == 0.5


def test_waiting_ends_with_the_first_step_only() -> None:
    meter = StepMeter(torch.device("cpu"))
    for number in (1, 2, 3):
        meter.arrived(number, time.monotonic() - number)
    meter.left(3)
    meter.joined(StepPlan(1, joined=[(0, (1, 0)), (1, (2, 0)), (2, (3, 0))]))
    meter.joined(StepPlan(2, joined=[(0, (1, 0))]))  # it was put back, and joins again
    for number in (1, 1, 3):
        meter.answered(number)
    work = meter.work
    assert sum(work.first_counts) == 1
    assert sum(work.wait_counts) == 2
    assert work.waited_s == pytest.approx(3.0, abs=0.2)


def test_news_are_told_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    meter, now = StepMeter(torch.device("cpu")), 50.0
    monkeypatch.setattr("ridgeline.engine.execution.work.time.monotonic", lambda: now)
    assert meter.news(at_once=False) is not None
    assert meter.news(at_once=False) is None
    assert meter.news(at_once=True) is not None
    now += NEWS_S + 0.001
    assert meter.news(at_once=False) is not None


def test_totals_travel_in_the_heartbeat() -> None:
    heartbeat = Heartbeat(get_context("spawn"))
    counts = tuple(float(index) for index in range(len(Work().wait_counts)))
    totals = StepTotals(*range(1, 8)), StepTotals(*range(11, 18))
    work = Work(*totals, 0.25, 1.5, 2.5, counts, counts[::-1])
    stats = Stats(*range(len(Stats._fields)))
    heartbeat.note(EngineProgress(3, 0.5, 0.0), stats, work)
    heartbeat.note(EngineProgress(4, 0.5, 0.0), stats)
    assert heartbeat.progress.work == work
    assert heartbeat.stats == stats
    assert heartbeat.in_steps() == set()


def test_percentiles_lie_where_the_values_do() -> None:
    times = Histogram()
    for index in range(1, 1001):
        times.add(index / 1000)
    for share in (0.5, 0.95, 0.99):
        assert percentile(times.counts, share) == pytest.approx(share, rel=0.02)
    assert times.total == pytest.approx(500.5)
    assert percentile([0] * (len(BOUNDS_S) + 1), 0.5) is None
    slow = Histogram()
    slow.add(1e6, 3)
    assert percentile(slow.counts, 0.5) == BOUNDS_S[-1]


SCHEMES = {"int8": "bf16", "w8a8-int8": "int8", "fp8": "fp8"}  # and what a GPU multiplies in


def test_the_fastest_units_of_a_models_products() -> None:
    """What they are told by: a GPU multiplies codes with codes, a CPU decodes them."""
    bf16, tf32 = Recipe(dtype="bf16"), Recipe(dtype="fp32", tf32=True)
    cases = [(bf16, "bf16"), (tf32, "tf32"), (replace(bf16, tf32=True), "bf16")]
    cases += [(replace(bf16, scheme=name), units) for name, units in SCHEMES.items()]
    for recipe, units in cases:
        model: Any = with_kinds(tiny("llama-mqa-bias"), lambda kind: kind)
        if recipe.scheme is not None:
            model = quantize_nearest(model, parse_scheme(recipe.scheme))
        assert matrix_dtype(model, recipe) == matrix_units(recipe, False) == recipe.dtype
        there = SimpleNamespace(weight=SimpleNamespace(is_cuda=True))
        model = SimpleNamespace(embed=there, modules=model.modules)
        assert matrix_dtype(model, recipe) == matrix_units(recipe, True) == units
