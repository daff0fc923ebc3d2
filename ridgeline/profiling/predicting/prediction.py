"""What a change is expected to give, and the state it would be made in: the words that predictions
are made of. gains.py makes them; the ladder's rungs, `profile` and the report read them.

    prediction = Prediction(2.1, 1.7, 2.6, "weights of 8.0 instead of 16.1 GB a step")
    prediction.speedup, prediction.holds(1.9)   # 2.1, True
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from ridgeline.hardware import Hardware
from ridgeline.models import ModelConfig
from ridgeline.models.cost import MeanStep
from ridgeline.recipe import Recipe

Area = Literal["fuse", "overhead", "tensor cores", "custom kernels", "quantize", "batch and memory"]
LoopName = Literal["naive", "engine"]  # the plain loop that defines the answer, or the engine
Phase = Literal["prefill", "decode"]


class BlockBytes(NamedTuple):
    """What a weight of a GGUF file takes in the file's own blocks."""

    mean: float  # of all that a step reads
    head: float


@dataclass(frozen=True)
class Prediction:
    """How many times faster the workload is to be, end to end."""

    speedup: float
    low: float  # of an interval that most outcomes fall into
    high: float
    why: str  # one line, with the figures it rests on

    def holds(self, achieved: float) -> bool:
        return self.low <= achieved <= self.high

    def to_json(self) -> dict[str, float | str]:
        return {"speedup": self.speedup, "low": self.low, "high": self.high, "why": self.why}


@dataclass(frozen=True)
class PhaseTime:
    """One kind of step of a workload: how many there were, of what work, and where the time of one
    went. The parts of `division` add up to `step_s`.
    """

    phase: Phase
    num_steps: float
    step_s: float  # wall time of one, untraced
    work: MeanStep
    # "matrices", "attention", "other kernels", "gaps" (the device waits for launches), "host" (it
    # waits for the host's other work), "copies", "communication" (between ranks, waiting for the
    # slowest included); empty where a step was not divided
    division: Mapping[str, float] = field(default_factory=dict)
    num_kernels: float | None = None  # launched in one; None: not counted
    # Of it, from the first launch of a step to its tokens, untraced: the rest the device was idle.
    device_s: float | None = None


@dataclass(frozen=True)
class GapPart:
    """Where steps take longer than the hardware's limit."""

    phase: Phase | Literal["training"]
    name: str  # of the division: "matrices"
    step_s: float  # of one step, that goes into it
    least_s: float  # of that, what the limit allows it; 0 for what the limit does not count
    share: float  # of the workload's time in steps, beyond that


@dataclass(frozen=True)
class Situation:
    """What is known when a change is considered."""

    config: ModelConfig
    recipe: Recipe  # nothing left to "auto"
    loop: LoopName
    hardware: Hardware  # with its ceilings
    bytes_per_weight: float  # read in a step, in the mean
    bytes_per_kv: float  # of one element of keys or values, scales included
    phases: tuple[PhaseTime, ...]  # measured; empty: only the roofline is known
    concurrency: float = 1.0  # requests of the workload that are there at once, in the mean
    prefix_share: float = 0.0  # of prompt tokens, that an earlier prompt begins with
    request_tokens: float = 0.0  # a running request has in its pages, in the mean; 0: not known
    blocks: BlockBytes | None = None  # of the file, where the engine can multiply them
