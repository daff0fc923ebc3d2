"""What an engine's steps were made of and how long the device was at them, in totals that never
fall: enough to say later what share of the machine's limit any stretch of time has reached.

A step that computes any prompt is a prefill step, all others are decode steps (those with drafts
too). A few sums a step, so that keeping them costs microseconds; costs are computed by whoever
reads (models/cost.py).

    meter = StepMeter(runner.device)
    runner.watch = meter
    ...
    meter.count_finished(); meter.work.decode.busy_s
"""

from __future__ import annotations

import time
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ridgeline.engine.execution.step_watch import Mark, StepWatch, between_s
from ridgeline.engine.memory.footprint import bytes_per_page
from ridgeline.engine.scheduling.histogram import BOUNDS_S, Histogram
from ridgeline.engine.scheduling.step_plan import StepPlan
from ridgeline.hardware import Hardware
from ridgeline.models import ModelConfig, Transformer
from ridgeline.models.cost import kv_bytes_per_token
from ridgeline.quantization.linear import QuantizedLinear
from ridgeline.quantization.sizes import held_config, read_bytes_per_weight
from ridgeline.recipe import Recipe


class StepTotals(NamedTuple):
    """Of all steps of one kind."""

    num_steps: float = 0.0
    busy_s: float = 0.0  # the device was at them
    num_rows: float = 0.0  # streams that took part, summed over the steps
    num_tokens: float = 0.0  # that went through the model
    num_logits: float = 0.0  # that went through the head
    num_pairs: float = 0.0  # of a token and a token it may see, itself included
    num_keys: float = 0.0  # tokens whose keys a row reads, summed over the rows


NONE = (0.0,) * (len(BOUNDS_S) + 1)


class Work(NamedTuple):
    """Totals since the engine's process began."""

    decode: StepTotals = StepTotals()
    prefill: StepTotals = StepTotals()
    gap_s: float = 0.0  # the device was idle between steps, though there was work
    waited_s: float = 0.0  # of all requests, from their arrival to their first step
    first_s: float = 0.0  # of all requests, from their first step to their first token
    wait_counts: tuple[float, ...] = NONE  # of those waits, by histogram.py
    first_counts: tuple[float, ...] = NONE  # of those times to the first token

    def numbers(self) -> list[float]:
        """All of it in a row, as shared memory takes it."""
        times = (self.gap_s, self.waited_s, self.first_s)
        return [*self.decode, *self.prefill, *times, *self.wait_counts, *self.first_counts]

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Work:
        size = len(StepTotals._fields)
        decode, prefill = StepTotals(*numbers[:size]), StepTotals(*numbers[size : 2 * size])
        gap_s, waited_s, first_s, *counts = numbers[2 * size :]
        waits, firsts = tuple(counts[: len(NONE)]), tuple(counts[len(NONE) :])
        return cls(decode, prefill, gap_s, waited_s, first_s, waits, firsts)


NUM_NUMBERS, NUM_TOTALS = len(Work().numbers()), len(StepTotals._fields)
NEWS_S = 0.05  # between two times that totals are shown


class StepMeter(StepWatch):
    """Watches steps as they run and adds up those that are done. Never makes anybody wait."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._decode, self._prefill = [0.0] * NUM_TOTALS, [0.0] * NUM_TOTALS
        self._told = 0.0  # when `news` last had any
        self._gap_s = 0.0
        self._last_end: Mark | None = None
        self._has_rested = True
        self._rests: list[bool] = []  # of each of `steps`, whether there was no work before it
        self._arrivals: dict[Hashable, float] = {}  # of requests that wait for their first step
        # Of those that wait for their first token: when they came, and when their step began.
        self._starts: dict[Hashable, tuple[float, float]] = {}
        self._waits, self._firsts = Histogram(), Histogram()

    @property
    def work(self) -> Work:
        waits, firsts = self._waits, self._firsts
        return Work(
            decode=StepTotals(*self._decode),
            prefill=StepTotals(*self._prefill),
            gap_s=self._gap_s,
            waited_s=waits.total,
            first_s=firsts.total,
            wait_counts=tuple(waits.counts),
            first_counts=tuple(firsts.counts),
        )

    def news(self, at_once: bool) -> Work | None:
        """What to show, if it is time: to write all of it takes longer than a step's sums."""
        now = time.monotonic()
        if not at_once and now < self._told + NEWS_S:
            return None
        self._told = now
        return self.work

    def end(self, plan: StepPlan) -> None:
        num_steps = len(self.steps)
        super().end(plan)
        if len(self.steps) > num_steps:
            self._rests.append(self._has_rested)
            self._has_rested = False

    def count_finished(self) -> None:
        """Take in the steps that the device is through with."""
        while self.steps and _is_over(self.steps[0].ended):
            plan, began, ended = self.steps.pop(0)
            if not self._rests.pop(0) and self._last_end is not None:
                self._gap_s += max(0.0, between_s(self._last_end, began))
            busy_s, self._last_end = between_s(began, ended), ended
            is_decode = plan.num_decode_rows + plan.num_draft_rows == len(plan.num_tokens)
            _add(self._decode if is_decode else self._prefill, plan, busy_s)

    def rest(self) -> None:
        """There is no work: that the device is idle until the next step is nobody's fault."""
        self._has_rested = True

    def arrived(self, request_id: Hashable, arrival: float) -> None:
        """A request waits for its first step since `arrival`, by time.monotonic()."""
        self._arrivals[request_id] = arrival

    def joined(self, plan: StepPlan) -> None:
        """Of who is in a step for the first time, the waiting is over."""
        for _, (request_id, _) in plan.joined:
            arrival = self._arrivals.pop(request_id, None)
            if arrival is not None:
                now = time.monotonic()
                self._starts[request_id] = arrival, now
                self._waits.add(max(0.0, now - arrival))

    def answered(self, request_id: Hashable) -> float | None:
        """A token of it is there. Of the first one, the seconds since it came."""
        start = self._starts.pop(request_id, None)
        if start is None:
            return None
        arrival, begun = start
        now = time.monotonic()
        self._firsts.add(now - begun)
        return now - arrival

    def left(self, request_id: Hashable) -> None:
        """It has ended, perhaps without ever having run."""
        self._arrivals.pop(request_id, None)
        self._starts.pop(request_id, None)


def _add(totals: list[float], plan: StepPlan, busy_s: float) -> None:
    """In the order of StepTotals."""
    num_tokens = len(plan.positions)
    totals[0] += 1
    totals[1] += busy_s
    totals[2] += len(plan.num_tokens)
    totals[3] += num_tokens
    totals[4] += len(plan.logit_tokens)
    totals[5] += sum(plan.positions) + num_tokens
    totals[6] += sum(plan.first_positions) + num_tokens


def _is_over(mark: Mark) -> bool:
    return mark.query() if isinstance(mark, torch.cuda.Event) else True


@dataclass(frozen=True)
class CostBase:
    """What turns counted work into bytes, FLOPs and shares of the machine: one rank's part of the
    model and the device it runs on.
    """

    config: ModelConfig  # of one rank
    dtype: str  # of the units that multiply matrices (`matrix_dtype`): "bf16"
    bytes_per_weight: float  # read in a step, in the mean
    bytes_per_kv: float  # of one element of keys or values, scales included
    ranks_a_device: int  # that share its bandwidth and matrix units
    hardware: Hardware  # with the ceilings that are known already


def matrix_dtype(model: Transformer, recipe: Recipe) -> str:
    """Of the fastest units that make a model's products: nothing is faster than all of them would
    be there.
    """
    parts = (part for part in model.modules() if isinstance(part, QuantizedLinear))
    return fastest_units({part.scheme.inputs for part in parts}, recipe, model.embed.weight.is_cuda)


def fastest_units(inputs: Collection[str], recipe: Recipe, on_gpu: bool) -> str:
    """`inputs` are those of the schemes in use. A GPU multiplies codes with codes, a CPU decodes
    them.
    """
    if not on_gpu:
        return recipe.dtype
    coded = (name for name in ("fp8", "int8") if name in inputs)
    plain = "tf32" if recipe.tf32 and recipe.dtype == "fp32" else recipe.dtype
    return next(coded, plain)


def cost_base(
    model: Transformer, recipe: Recipe, hardware: Hardware, ranks_a_device: int = 1
) -> CostBase:
    """`recipe` has nothing left to "auto"."""
    config = held_config(model)
    page_tokens = recipe.kv.page_size * kv_bytes_per_token(config, 1)
    return CostBase(
        config,
        matrix_dtype(model, recipe),
        read_bytes_per_weight(model),
        bytes_per_page(config, recipe) / page_tokens,
        ranks_a_device,
        hardware,
    )
