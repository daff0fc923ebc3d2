"""A server's day without an engine: meters that are told of made-up requests and steps, as an 8B
model on one GPU would cause them.
"""

from __future__ import annotations

import math
import random

from ridgeline.engine.backend import EngineProgress
from ridgeline.engine.execution.work import CostBase, StepTotals, Work
from ridgeline.engine.scheduling.state import Stats
from ridgeline.hardware import Ceiling, Hardware
from ridgeline.models.shapes import describe_shape
from ridgeline.recipe import Limits, Recipe
from ridgeline.server.metrics.metrics import Meters
from ridgeline.server.metrics.served import Served

NUM_PAGES, MAX_BATCH = 4096, 64


def machine(source: str = "measured") -> Hardware:
    """An H200's ceilings."""
    ceilings = {
        "read_bandwidth": Ceiling(4.4e12, "B/s", source),  # type: ignore[arg-type]
        "matrix_bf16": Ceiling(750e12, "FLOP/s", source),  # type: ignore[arg-type]
    }
    return Hardware(
        "nvidia", "cuda", "cuda:0", "NVIDIA H200", "sm_90", 141 << 30, 132, "580", ceilings=ceilings
    )


def served(hardware: Hardware | None = None, **changes: object) -> Served:
    """`changes` are fields of the recipe."""
    limits = Limits(MAX_BATCH * 128, MAX_BATCH, 8192, 512, 0.9)
    values = {"dtype": "bf16", "kernels": "fused", "graphs": True, "limits": limits} | changes
    recipe = Recipe(**values)  # type: ignore[arg-type]
    config = describe_shape("llama-3.1-8b").config
    costs = CostBase(config, "bf16", 2.0, 2.0, 1, hardware or machine())
    return Served("llama-3.1-8b-instruct", recipe, costs)


def totals(
    num_steps: float, busy_s: float, rows: float, new: float = 1, past: float = 1000
) -> StepTotals:
    """`rows` sequences of `new` tokens behind `past` others, in each step."""
    pairs = rows * new * (past + (new + 1) / 2)
    tokens, keys = rows * new, rows * (past + new)
    each = (1, 0, rows, tokens, rows, pairs, keys)
    return StepTotals(*(num_steps * value for value in each))._replace(busy_s=busy_s)


def stats(used: int = 0, waiting: int = 0, running: int = 0, **more: int) -> Stats:
    values = dict.fromkeys(Stats._fields, 0) | {
        "num_pages_used": used,
        "num_pages_cached": min(900, NUM_PAGES - used),
        "num_pages_free": NUM_PAGES - used - min(900, NUM_PAGES - used),
        "num_waiting": waiting,
        "num_decoding": running,
        **more,
    }
    return Stats(**values)


class Feed:
    """Second after second of a load that comes and goes; `meters` has heard of all of it."""

    def __init__(self, seed: int = 7) -> None:
        self.now = 0.0
        self.meters = Meters(served(), clock=lambda: self.now)
        self._random = random.Random(seed)
        self._work, self._number = Work(), 0
        self._live: dict[str, list[float]] = {}  # tokens that are left, and when it began
        self._totals = dict.fromkeys(("prompt_tokens", "hit_tokens", "num_steps"), 0)

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self.second()

    def second(self) -> None:
        draw = self._random
        wanted = 26 + 20 * math.sin(self.now / 40) + 6 * draw.random()
        while len(self._live) < wanted:
            self._arrive()
        rows = min(MAX_BATCH, len(self._live))
        prompts = max(0, int(wanted / 12))
        step_s = 0.0043 + 0.00004 * rows
        prefill_s = 0.028 * prompts
        num_steps = int((0.96 - prefill_s) / step_s)
        self._step(rows, num_steps, step_s, prompts, prefill_s)
        used = int(rows * 34 + 60 * draw.random())
        running = stats(used, max(0, int(wanted - 44)), rows, **self._totals)
        progress = EngineProgress(int(self._totals["num_steps"]), step_s, 0.0, self._work)
        self.meters.sample(running, progress, 0)

    def cancel(self, request_id: str) -> bool:
        if self._live.pop(request_id, None) is None:
            return False
        self.meters.ended(request_id, "cancelled", "cancelled")
        return True

    def _arrive(self) -> None:
        self._number += 1
        name, size = f"chatcmpl-{self._number:06x}a9", int(self._random.lognormvariate(6, 0.8))
        route = self._random.choice(["/v1/chat/completions"] * 4 + ["/v1/completions"])
        self.meters.arrived(name, route, self._random.choice(["", "search", "batch"]))
        self.meters.admitted(name, size)
        self._totals["prompt_tokens"] += size
        self._totals["hit_tokens"] += size // 3
        self._live[name] = [self._random.lognormvariate(7, 0.6), -1.0]

    def _step(
        self, rows: int, num_steps: int, step_s: float, prompts: int, prefill_s: float
    ) -> None:
        begun = self.now
        for name, left in list(self._live.items()):
            first = 0.05 + 0.12 * self._random.random() if left[1] < 0 else 0.0
            left[1] = 0.0
            made = 0
            while made < min(num_steps, left[0]) and first + made * step_s < 1:
                self.meters.tokens({name: 8}, begun + first + made * step_s)
                made += 8
            left[0] -= made
            if left[0] <= 0:
                self.now = begun + min(1.0, first + made * step_s)
                self.meters.ended(name, "finished", self._random.choice(["stop", "length"]))
                del self._live[name]
        self.now = begun + 1.0
        decode = totals(num_steps, num_steps * step_s, rows)
        prefill = totals(prompts, prefill_s, 2, 500, 0) if prompts else StepTotals()
        added = Work(decode, prefill, 0.02 + 0.015 * self._random.random())
        numbers = zip(self._work.numbers(), added.numbers(), strict=True)
        self._work = Work.of([a + b for a, b in numbers])
        self._totals["num_steps"] += num_steps + prompts
