"""A model under a recipe, as a climb runs it: rounds of a workload through the naive loop or the
engine, and what its steps were made of.

For latency requests run one after the other, for throughput all at once; arrival times are left
out, because they would hide how fast a recipe is.

    runs = EngineRuns(engine, "latency", hardware)
    runs.round(part.of(workload)).output_tokens_per_s
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

from ridgeline.bench.engine import EngineRun, run_workload, setup_s
from ridgeline.data.workload import Workload, WorkloadRequest
from ridgeline.engine import Engine, Sampling
from ridgeline.engine.execution.step_watch import StepWatch
from ridgeline.engine.execution.work import cost_base
from ridgeline.engine.naive import OneSequence, forward, generate_tokens
from ridgeline.errors import RequestError
from ridgeline.formats.dtypes import dtype_bytes
from ridgeline.hardware import Hardware
from ridgeline.ladder.outcome import CurvePoint, Goal
from ridgeline.models import Transformer
from ridgeline.models.cost import Chunk, MeanStep, step_cost
from ridgeline.profiling import step_limit
from ridgeline.profiling.predicting.prediction import PhaseTime
from ridgeline.profiling.predicting.situation import mean_work, phases_of
from ridgeline.profiling.step_kinds import limit_of

CURVE_PROMPT, CURVE_OUTPUT = 64, 24  # tokens, of each request of a point of the curve


@dataclass(frozen=True)
class Round:
    """What one round measured. Seconds are medians over its requests. Where steps of a kind were
    met for the first time, the wall clock is without their compiling and capturing.
    """

    output_tokens_per_s: float
    wall_s: float
    first_token_s: float | None
    per_output_token_s: float | None
    request_s: float | None
    share_of_limit: float | None
    mean_batch: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Timed:
    """One request."""

    num_output_tokens: int
    first_token_s: float
    total_s: float


def round_of(timed: Sequence[Timed], wall_s: float, limit_s: float | None, batch: float) -> Round:
    several = [each for each in timed if each.num_output_tokens > 1]
    gaps = [(e.total_s - e.first_token_s) / (e.num_output_tokens - 1) for e in several]
    return Round(
        sum(each.num_output_tokens for each in timed) / wall_s,
        wall_s,
        median(each.first_token_s for each in timed),
        median(gaps) if gaps else None,
        median(each.total_s for each in timed),
        None if limit_s is None else limit_s / wall_s,
        batch,
    )


class NaiveRuns:
    """The plain loop: one request after the other, whatever the goal."""

    def __init__(self, model: Transformer, hardware: Hardware) -> None:
        self.model, self.hardware = model, hardware
        self.dtype = "bf16" if model.embed.weight.dtype == torch.bfloat16 else "fp32"

    def round(self, workload: Workload) -> Round:
        timed, began = [], time.perf_counter()
        for index in range(len(workload.requests)):
            timed.append(self._one(workload, index))
        wall_s = time.perf_counter() - began
        return round_of(timed, wall_s, self._limit_s(workload), 1.0)

    def _one(self, workload: Workload, index: int) -> Timed:
        ids = workload.prompt_ids(index, self.model.config.vocab_size)
        sampling = _sampling(workload, workload.requests[index], index)
        began, first, count = time.perf_counter(), None, 0
        for _ in generate_tokens(self.model, ids, sampling):
            first, count = first or time.perf_counter() - began, count + 1
        assert first is not None, "a request makes at least one token"
        return Timed(count, first, time.perf_counter() - began)

    def _limit_s(self, workload: Workload) -> float | None:
        size = dtype_bytes(self.model.embed.weight.dtype)
        total = 0.0
        for request in workload.requests:
            prompt = request.num_prompt_tokens
            decode = [Chunk(1, prompt + done) for done in range(request.num_output_tokens - 1)]
            for chunk in (Chunk(prompt, 0), *decode):
                cost = step_cost(self.model.config, [chunk], weight_bytes=size, kv_bytes=size)
                limit = step_limit(cost, self.hardware, self.dtype)
                if limit is None:
                    return None
                total += limit.seconds
        return total

    def phases(self, workload: Workload) -> list[PhaseTime]:
        timed = [self._one(workload, index) for index in range(len(workload.requests))]
        requests = workload.requests
        steps = [each.num_output_tokens - 1 for each in timed]
        decode_s = sum(each.total_s - each.first_token_s for each in timed)
        prompts = [request.num_prompt_tokens for request in requests]
        first_s = sum(each.first_token_s for each in timed) / len(prompts)
        work = _mean([Chunk(prompt, 0) for prompt in prompts])
        result = [PhaseTime("prefill", len(prompts), first_s, work)]
        chunks = [
            Chunk(1, prompt + done)
            for prompt, count in zip(prompts, steps, strict=True)
            for done in range(count)
        ]
        if chunks:
            result.append(PhaseTime("decode", len(chunks), decode_s / len(chunks), _mean(chunks)))
        return result

    def curve(self, batches: Sequence[int]) -> list[CurvePoint]:
        """Of one request: more of them wait for each other."""
        result = self.round(_curve_workload(1))
        assert result.per_output_token_s is not None, "several tokens were made"
        return [CurvePoint(1, result.output_tokens_per_s, result.per_output_token_s)]

    def same_logits(self, prompt: Sequence[int]) -> bool:
        """Whether the model gives the same answer to the same question."""
        first, second = (self._logits(prompt) for _ in range(2))
        return bool(torch.equal(first, second))

    @torch.inference_mode()
    def _logits(self, prompt: Sequence[int]) -> torch.Tensor:
        return forward(self.model, prompt, OneSequence(self.model, len(prompt)), len(prompt))


class EngineRuns:
    def __init__(self, engine: Engine, goal: Goal, hardware: Hardware) -> None:
        self.engine, self.goal, self.hardware = engine, goal, hardware

    def round(self, workload: Workload) -> Round:
        if self.goal == "throughput":
            return _as_round(run_workload(self.engine, workload.at_once(), self.hardware))
        return self._one_by_one(workload)

    def _one_by_one(self, workload: Workload) -> Round:
        engine = self.engine
        engine.forget_prefixes()
        engine.runner.watch = watch = StepWatch(engine.runner.device)
        try:
            began, setup_before = time.perf_counter(), setup_s(engine)
            timed = [self._one(workload, index) for index in range(len(workload.requests))]
            wall_s = time.perf_counter() - began - (setup_s(engine) - setup_before)
        finally:
            engine.runner.watch = None
        plans = [step.plan for step in watch.steps]
        limit_s = limit_of(plans, engine.local.costs, self.hardware)
        return round_of(timed, wall_s, limit_s, 1.0)

    def _one(self, workload: Workload, index: int) -> Timed:
        ids = workload.prompt_ids(index, self.engine.config.vocab_size)
        (output,) = self.engine.generate(
            [ids], _sampling(workload, workload.requests[index], index)
        )
        output.raise_unless_finished()
        assert output.first_token_s is not None, "a finished request has its first token"
        return Timed(len(output.tokens), output.first_token_s, output.total_s)

    def phases(self, workload: Workload) -> list[PhaseTime]:
        """What the steps of a round were made of."""
        engine = self.engine
        engine.forget_prefixes()
        engine.runner.watch = watch = StepWatch(engine.runner.device)
        try:
            if self.goal == "throughput":
                self._all_at_once(workload)
            else:
                for index in _all(workload):
                    self._one(workload, index)
        finally:
            engine.runner.watch = None
        if engine.runner.device.type == "cuda":
            torch.cuda.synchronize(engine.runner.device)
        return list(phases_of(watch.steps))

    def _all_at_once(self, workload: Workload) -> None:
        ids = [workload.prompt_ids(i, self.engine.config.vocab_size) for i in _all(workload)]
        samplings = [_sampling(workload, workload.requests[i], i) for i in _all(workload)]
        for output in self.engine.generate(ids, samplings):
            output.raise_unless_finished()

    def curve(self, batches: Sequence[int]) -> list[CurvePoint]:
        result = []
        for batch in batches:
            run = run_workload(self.engine, _curve_workload(batch), self.hardware)
            rate = run.output_tokens_per_s
            each = run.per_output_token.p50 if run.per_output_token else batch / rate
            result.append(CurvePoint(batch, rate, each))
        return result

    def footprint(self) -> dict[str, Any]:
        engine = self.engine
        base = cost_base(engine.model, engine.recipe, self.hardware, engine.ranks_a_device)
        return {
            "bytes_per_weight": base.bytes_per_weight,
            "bytes_per_kv": base.bytes_per_kv,
            "memory": [list(item) for item in engine.memory_plan.items],
            "num_pages": engine.memory_plan.num_pages,
        }


def _mean(chunks: Sequence[Chunk]) -> MeanStep:
    """Of steps with one of these each."""
    sums, num = mean_work(chunks), len(chunks)
    return MeanStep(1.0, sums.tokens / num, 1.0, sums.pairs / num, sums.keys / num)


def _all(workload: Workload) -> range:
    return range(len(workload.requests))


def _sampling(workload: Workload, request: WorkloadRequest, index: int) -> Sampling:
    return Sampling(
        temperature=workload.temperature,
        max_tokens=request.num_output_tokens,
        ignore_eos=True,
        seed=index,
    )


def _curve_workload(batch: int) -> Workload:
    requests = (WorkloadRequest(CURVE_PROMPT, CURVE_OUTPUT) for _ in range(batch))
    return Workload(f"batch of {batch}", tuple(requests))


def _as_round(run: EngineRun) -> Round:
    if run.not_finished:
        raise RequestError(
            f"{len(run.not_finished)} of {run.num_requests} requests ended without an answer: "
            f"{run.not_finished[0]}"
        )
    wall_s = run.wall_s - run.setup_s
    return Round(
        run.num_output_tokens / wall_s,
        wall_s,
        run.first_token.p50 if run.first_token else None,
        run.per_output_token.p50 if run.per_output_token else None,
        run.request.p50 if run.request else None,
        None if run.limit_s is None else run.limit_s / wall_s,
        run.mean_batch,
    )
