"""What predictions start from is what was run."""

from __future__ import annotations

import pytest
from engines import engine_for, tiny

from ridgeline.engine import Sampling
from ridgeline.engine.execution.step_watch import StepWatch
from ridgeline.hardware import detect
from ridgeline.models.cost import Chunk, mean_step_cost, step_cost
from ridgeline.profiling.predicting.gains import predict
from ridgeline.profiling.predicting.situation import (
    mean_work,
    phases_of,
    situation_of,
)


def test_phases_of_a_run() -> None:
    engine = engine_for(tiny("llama-tied"))
    engine.runner.watch = watch = StepWatch(engine.runner.device)
    engine.generate([[5] * 20, [6] * 10], Sampling(max_tokens=4, ignore_eos=True))
    phases = phases_of(watch.steps)
    prefill, decode = phases
    assert (prefill.phase, prefill.num_steps, prefill.work.tokens) == ("prefill", 1, 30)
    assert (decode.phase, decode.num_steps, decode.work.rows) == ("decode", 3, 2.0)
    assert decode.work.keys == pytest.approx((21 + 22 + 23) / 3 + (11 + 12 + 13) / 3)
    assert prefill.work.pairs == 20 * 21 / 2 + 10 * 11 / 2
    assert prefill.step_s > 0 < decode.step_s
    assert decode.device_s is not None
    assert 0 < decode.device_s <= decode.step_s  # the scheduler has its part of a step
    given = situation_of(engine, detect("cpu"), phases, concurrency=2.0)
    assert (given.bytes_per_weight, given.bytes_per_kv, given.loop) == (4.0, 4.0, "engine")
    assert predict(given, {"limits.max_batch": 1}).speedup < 1.0


def test_the_work_of_a_step_costs_what_its_pieces_cost() -> None:
    config = tiny("llama-tied").config
    chunks = [Chunk(7, 0), Chunk(1, 30), Chunk(4, 9)]
    sizes = {"weight_bytes": 2.0, "kv_bytes": 2.0}
    exact = step_cost(config, chunks, logit_rows=3, **sizes)
    mean = mean_step_cost(config, mean_work(chunks), **sizes)
    assert (mean.flops, mean.bytes) == (exact.flops, exact.bytes)
