"""The parts of a climb's result: each rung with what was predicted and what was achieved, and the
figures of the model before and after. `Climb` (result.py) holds them all.

    for rung in climb.rungs: print(rung.title, rung.status, rung.achieved)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin

from ridgeline.bench.serve.bound import LatencyBound
from ridgeline.formats.fields import hints
from ridgeline.formats.files import reject_unknown_keys
from ridgeline.profiling.predicting.prediction import Area, LoopName, Prediction

RungStatus = Literal[
    "kept",
    "dropped",  # measured, and not faster beyond noise, or outside the quality bound
    "failed",  # its process ended or it raised; recorded, and the climb goes on
    "not applicable",  # with the reason; nothing was run
    "not reached",  # the budget was spent, or the climb was stopped
]
Goal = Literal["latency", "throughput"]
FORMER_FIELDS = {"pace"}  # of files that an earlier version wrote: of rungs, under a latency bound


@dataclass(frozen=True)
class Speedup:
    """Of one recipe over another, from interleaved rounds, with its 95% interval."""

    value: float
    low: float
    high: float
    before: tuple[float, ...]  # the goal's figure of each round: output tokens/s
    after: tuple[float, ...]

    @property
    def is_beyond_noise(self) -> bool:
        return self.low > 1.0


@dataclass(frozen=True)
class Quality:
    """Against the unmodified model, with 95% intervals (None where one window gave none)."""

    mean_kl: float
    mean_kl_low: float | None
    mean_kl_high: float | None
    ppl_increase: float  # share: 0.02 is 2%
    ppl_increase_low: float | None
    ppl_increase_high: float | None
    num_tokens: int
    problem: str | None  # what is outside the bound; None: inside
    task: str | None = None  # where task data was given
    task_score: float | None = None
    task_score_before: float | None = None


@dataclass(frozen=True)
class RateProof:
    """A run at one rate of requests, held against a latency bound."""

    rate: float  # requests a second that arrived
    seconds: float  # of arrivals
    num_requests: int
    num_kept: int  # of them, that kept the bound
    first_token_p50_s: float | None
    first_token_p99_s: float | None
    per_token_p50_s: float | None
    per_token_p99_s: float | None

    @property
    def share(self) -> float:
        return self.num_kept / self.num_requests


@dataclass(frozen=True)
class HeldRate:
    """The highest rate that one recipe holds within a latency bound."""

    name: str  # "the defaults", "the answer", …
    edit: Mapping[str, Any]  # of the answer: dotted recipe fields
    rate: float | None  # requests a second, by the search; None: none was held
    failed_rate: float | None  # the lowest that was tried and not held
    is_sure: bool  # both with 95% confidence
    words: str
    proof: RateProof | None = None  # the last: at a lower rate, where the first did not hold


@dataclass(frozen=True)
class ServiceLevels:
    """What was asked for, and what holds it."""

    bound: LatencyBound
    target: float  # share of requests that must keep it
    arrivals: str  # how requests came
    tried: tuple[HeldRate, ...]
    chosen: str | None  # whose recipe was left; None: nothing holds the bound

    def of(self, name: str | None) -> HeldRate | None:
        return next((each for each in self.tried if each.name == name), None)

    def is_proved(self, held: HeldRate) -> bool:
        return held.proof is not None and held.proof.share >= self.target

    def rate_of(self, held: HeldRate) -> float | None:
        """What was proved, else what was searched for."""
        if held.proof is None:
            return held.rate
        return held.proof.rate if self.is_proved(held) else None


@dataclass(frozen=True)
class PeerFigures:
    """What another server does under the same load."""

    url: str
    model: str
    output_tokens_per_s: float | None = None
    first_token_s: float | None = None  # medians
    per_output_token_s: float | None = None
    rate: float | None = None  # requests a second within the latency bound, where one was given
    rounds: int = 0  # that the figures are of
    workload: str = ""  # what was run, in words
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Difference:
    """Of a module's outputs from those of the original, on the same inputs; the worst tensor."""

    relative_error: float  # size of the difference over the size of the original
    cosine: float
    changed_share: float  # of outputs that are no fractions: tokens, classes, flags
    mean_kl: float | None  # of outputs that are logits, in nats; None where there are none
    num_tensors: int
    problem: str | None  # what is outside the bound; None: inside


@dataclass(frozen=True)
class PairedLosses:
    """Of short training runs with a change and without it, over the same data in the same order.
    Shares of the loss without it, with the 95% interval over the seeds.
    """

    num_seeds: int
    num_steps: int
    increase: float  # 0.002: the loss is 0.2% higher
    low: float
    high: float
    bound: float  # that `high` must not be above
    problem: str | None  # what is outside the bound; None: inside
    equal_loss_gain: float | None  # times as fast to the same loss; None: it did not fall
    before: tuple[float, ...] = ()  # the mean loss of each step
    after: tuple[float, ...] = ()


@dataclass(frozen=True)
class RungOutcome:
    name: str  # "int8", as in rungs/
    area: Area
    title: str  # a few words: "weights in int8"
    edit: Mapping[str, Any]  # dotted recipe fields and their values; "loop" for the loop
    status: RungStatus
    reason: str  # one line: why it applies, was kept, dropped, failed
    predicted: Prediction | None = None
    achieved: Speedup | None = None
    quality: Quality | None = None  # None: not measured (and `reason` says why)
    seconds: float = 0.0  # it took
    difference: Difference | None = None  # for a module outside our families, instead of quality
    losses: PairedLosses | None = None  # for training, of a change that alters what is learned


@dataclass(frozen=True)
class Figures:
    """What was measured of one recipe on the workload."""

    output_tokens_per_s: float
    first_token_s: float | None  # medians
    per_output_token_s: float | None
    request_s: float | None
    share_of_limit: float | None
    weight_bytes: int


@dataclass(frozen=True)
class CurvePoint:
    batch: int
    output_tokens_per_s: float
    per_output_token_s: float


@dataclass(frozen=True)
class RoofPoint:
    """Where a phase of the model lies under the roofline."""

    label: str  # "decode, before"
    flops_per_byte: float
    flops_per_s: float
    share: float  # of the ceiling above it
    bound: Literal["memory", "compute"]


@dataclass(frozen=True)
class ReportedMemory:
    name: str
    num_bytes: int
    meaning: str


@dataclass(frozen=True)
class Side:
    """The model before or after the climb."""

    recipe: Mapping[str, Any]
    loop: LoopName
    figures: Figures
    curve: tuple[CurvePoint, ...] = ()
    roof: tuple[RoofPoint, ...] = ()
    memory: tuple[ReportedMemory, ...] = ()


@dataclass(frozen=True)
class NextStep:
    """What is predicted to make the answer faster still."""

    title: str
    flags: str  # of a command line; "" where it is not a matter of flags
    predicted: Prediction


def outcome_from(document: Mapping[str, Any]) -> RungOutcome:
    """One rung, as `asdict` wrote it."""
    outcome: RungOutcome = from_document(RungOutcome, document, "a rung")
    return outcome


def from_document(kind: Any, value: Any, name: str) -> Any:
    """The dataclass, tuple or plain value that `asdict` wrote."""
    if isinstance(kind, UnionType):
        if value is None:
            return None
        kind = next(each for each in get_args(kind) if each is not NoneType)
    if is_dataclass(kind):
        known = hints(kind)  # type: ignore[arg-type]
        given = {key: each for key, each in value.items() if key not in FORMER_FIELDS}
        reject_unknown_keys(given, {each.name for each in fields(kind)}, name)
        return kind(**{key: from_document(known[key], each, key) for key, each in given.items()})  # type: ignore[operator]
    if get_origin(kind) is tuple:
        return tuple(from_document(get_args(kind)[0], each, name) for each in value)
    return value
