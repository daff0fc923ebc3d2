"""Where the time of a step went: ops, copies, gaps between kernels, and the host. The parts add up
to the step, whose time was taken without a trace; a trace only says how it divides.

    division = Division.of(step_s, ops, copies_s=…, gaps_s=…, host_s=…)
    division.parts["matrices"], division.total_s == step_s
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import nn

from ridgeline.models.transformer import ExpertMLP, Linear
from ridgeline.profiling.tracing.scopes import ScopeCall
from ridgeline.quantization.linear import QuantizedLinear

TimePart = Literal[
    "matrices", "attention", "other kernels", "communication",
    "products", "loss", "element-wise", "optimizer",  # of training steps
]  # fmt: skip
ATTENTION_OPS = ("decode_attention", "prefill_attention", "projected_attention", "attention")
COMMUNICATION_OPS = ("all_reduce", "all_gather", "broadcast")  # between ranks
UNKNOWN = "(not attributed)"  # kernels of which nobody knows where they came from


@dataclass(frozen=True)
class KernelTime:
    name: str
    seconds: float  # a step
    count: float  # a step
    occupancy: float | None = None  # share of a unit's warps, as the tracer estimates it


@dataclass(frozen=True)
class OpTime:
    """All calls of one op in a step; of a module in every layer."""

    name: str  # "layers.*.attn.qkv", "decode_attention"
    part: TimePart
    seconds: float  # a step
    num_calls: float
    kernels: tuple[KernelTime, ...] = ()  # longest first; none on a CPU

    @property
    def num_kernels(self) -> float:
        return sum(kernel.count for kernel in self.kernels)


@dataclass(frozen=True)
class Division:
    step_s: float
    ops: tuple[OpTime, ...]  # longest first
    copies_s: float
    gaps_s: float  # the device waits for the next launch; on a CPU what is between ops
    host_s: float  # it waits for the host's other work
    num_kernels: float
    notes: tuple[str, ...] = ()

    @property
    def parts(self) -> dict[str, float]:
        """By the names that predictions use (see profiling/predicting/prediction.py)."""
        result = {"matrices": 0.0, "attention": 0.0, "other kernels": 0.0, "communication": 0.0}
        for op in self.ops:
            result[op.part] = result.get(op.part, 0.0) + op.seconds
        return result | {"gaps": self.gaps_s, "host": self.host_s, "copies": self.copies_s}

    @property
    def busy_s(self) -> float:
        """The device was at work."""
        return sum(op.seconds for op in self.ops) + self.copies_s

    @property
    def total_s(self) -> float:
        return sum(self.parts.values())

    def scaled(self, step_s: float, *notes: str) -> Division:
        """All parts by one factor, so that they make up `step_s`."""
        factor = step_s / self.total_s if self.total_s > 0 else 0.0
        return replace(
            self,
            step_s=step_s,
            ops=tuple(_scaled(op, factor) for op in self.ops),
            copies_s=self.copies_s * factor,
            gaps_s=self.gaps_s * factor,
            host_s=self.host_s * factor,
            notes=(*self.notes, *notes),
        )


def _scaled(op: OpTime, factor: float) -> OpTime:
    kernels = tuple(replace(each, seconds=each.seconds * factor) for each in op.kernels)
    return replace(op, seconds=op.seconds * factor, kernels=kernels)


def group_of(call: ScopeCall) -> str:
    """A module's name for all layers at once, or the op's."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", call.name) or "model"


def part_of(call: ScopeCall) -> TimePart:
    if call.part is not None:
        return call.part
    if is_matrix(call.module):
        return "matrices"
    if call.name in COMMUNICATION_OPS:
        return "communication"
    return "attention" if call.name in ATTENTION_OPS else "other kernels"


def is_matrix(module: nn.Module | None) -> bool:
    return isinstance(module, Linear | QuantizedLinear | ExpertMLP)


def sorted_ops(ops: Iterable[OpTime]) -> tuple[OpTime, ...]:
    return tuple(sorted(ops, key=lambda op: -op.seconds))


def by_group(
    seconds: Mapping[int, float], calls: Sequence[ScopeCall], num_steps: int
) -> tuple[OpTime, ...]:
    """Ops from the time of each call, over some steps."""
    groups: dict[str, list[int]] = {}
    for index in seconds:
        groups.setdefault(group_of(calls[index]), []).append(index)
    return sorted_ops(
        OpTime(
            name,
            part_of(calls[result[0]]),
            sum(seconds[index] for index in result) / num_steps,
            len(result) / num_steps,
        )
        for name, result in groups.items()
    )
