"""The steps of a whole run, by kind: decode steps by how many rows they had, steps with pieces of
prompts beside decode rows, and steps of prompts alone. Each kind with how long the device was at
work in it, how long it stood idle before its steps, and the least time its steps can take.

    kinds = kinds_of(watch, engine.local.costs, hardware)
    kinds[0].label, kinds[0].device_s, kinds[0].limit_s     # "decode, 257-512 rows", 8.1, 5.2
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from ridgeline.engine.execution.step_watch import StepWatch, between_s
from ridgeline.engine.execution.work import CostBase
from ridgeline.engine.scheduling.step_plan import StepPlan
from ridgeline.hardware import Hardware
from ridgeline.models.cost import MeanStep, step_cost
from ridgeline.profiling.predicting.situation import chunks_of, mean_plan
from ridgeline.profiling.roofline import step_limit

KindName = Literal["decode", "mixed", "prompts"]


@dataclass(frozen=True)
class StepKind:
    name: KindName
    most_rows: int  # that decode, of this kind and of no smaller one; 0 where prompts are with them
    plans: tuple[StepPlan, ...]
    device_s: float  # at work, from the first launch of each step to its tokens
    idle_s: float  # before its steps, with requests there
    limit_s: float | None  # None where a ceiling is unknown

    @property
    def seconds(self) -> float:
        return self.device_s + self.idle_s

    @property
    def label(self) -> str:
        if self.name == "prompts":
            return "prompts alone"
        if self.name == "mixed":
            return "prompts and decode"
        if self.most_rows <= 2:
            return f"decode, {self.most_rows} row{'s' * (self.most_rows > 1)}"
        return f"decode, {self.most_rows // 2 + 1}-{self.most_rows} rows"

    @cached_property
    def work(self) -> MeanStep:
        return mean_plan(self.plans)

    @property
    def mean_decode_rows(self) -> float:
        return sum(map(decode_rows, self.plans)) / len(self.plans)

    @property
    def mean_prompt_pieces(self) -> float:
        return self.work.rows - self.mean_decode_rows

    @property
    def mean_prompt_tokens(self) -> float:
        """Of a piece."""
        new = sum(sum(plan.num_tokens[decode_rows(plan) :]) for plan in self.plans)
        pieces = sum(len(plan.num_tokens) - decode_rows(plan) for plan in self.plans)
        return new / pieces if pieces else 0.0

    @property
    def mean_context(self) -> float:
        """Tokens that a decode row can see, itself included."""
        rows = sum(map(decode_rows, self.plans))
        keys = sum(sum(plan.first_positions[: decode_rows(plan)]) for plan in self.plans) + rows
        return keys / rows if rows else 0.0

    @property
    def past_share(self) -> float:
        """Of the tokens that pieces of prompts read, those of earlier pieces or of a prefix."""
        chunks = [each for plan in self.plans for each in chunks_of(plan)[decode_rows(plan) :]]
        total = sum(chunk.total for chunk in chunks)
        return sum(chunk.past for chunk in chunks) / total if total else 0.0


def decode_rows(plan: StepPlan) -> int:
    return plan.num_decode_rows + plan.num_draft_rows


def kinds_of(
    watch: StepWatch,
    costs: CostBase,
    hardware: Hardware,
    empty_s: Mapping[int, float] | None = None,
) -> list[StepKind]:
    """The longest first. `empty_s`: how long no request was there before the step of an index."""
    gaps_s = [0.0, *watch.gaps_s()]  # also waits for the device
    steps: dict[tuple[KindName, int], list[int]] = {}
    for index, step in enumerate(watch.steps):
        steps.setdefault(_kind(step.plan), []).append(index)
    kinds = []
    for (name, most_rows), indexes in steps.items():
        plans = tuple(watch.steps[index].plan for index in indexes)
        idle_s = sum(max(0.0, gaps_s[i] - (empty_s or {}).get(i, 0.0)) for i in indexes)
        device_s = sum(between_s(watch.steps[i].began, watch.steps[i].ended) for i in indexes)
        limit_s = limit_of(plans, costs, hardware)
        kinds.append(StepKind(name, most_rows, plans, device_s, idle_s, limit_s))
    return sorted(kinds, key=lambda kind: -kind.seconds)


def _kind(plan: StepPlan) -> tuple[KindName, int]:
    rows = decode_rows(plan)
    if rows == len(plan.num_tokens):
        return "decode", 1 << max(0, rows - 1).bit_length()
    return ("mixed" if rows else "prompts"), 0


def limit_of(plans: Sequence[StepPlan], costs: CostBase, hardware: Hardware) -> float | None:
    """The least time these steps can take on this machine; None where a ceiling is unknown."""
    total = 0.0
    sizes = {"weight_bytes": costs.bytes_per_weight, "kv_bytes": costs.bytes_per_kv}
    for plan in plans:
        rows = len(plan.logit_tokens)
        cost = step_cost(costs.config, chunks_of(plan), logit_rows=rows, **sizes)
        limit = step_limit(cost, hardware, costs.dtype)
        if limit is None:
            return None
        total += limit.seconds
    return total * costs.ranks_a_device
