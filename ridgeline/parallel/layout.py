"""Layout: how one model's work is spread over devices. Integers alone, no torch: planner, training
config, checkpoint and record hold the same object.

Ranks are numbered with `tensor` running fastest, then context, shard, replicate, pipeline: what
talks most sits nearest. Experts are spread over ranks that the data axes (replicate, shard,
context) already have, so that `expert` adds no rank: it says over how many neighbours of them.

    layout = Layout.parse("shard=2,tensor=2")       # or a file's JSON: Layout.load(path)
    layout.size                                     # 4
    layout.coordinates(3)                           # shard=1, tensor=1, 0 on the other axes
    layout.group(3, "tensor")                       # (2, 3)
    layout.tokens(0, 4096)                          # which of a sequence's tokens rank 0 has
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise, product
from math import prod
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from ridgeline.errors import UsageError, answers_wrong_options
from ridgeline.formats.fields import check_fields, config_from, field_help

Schedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]
AxisName = Literal["pipeline", "replicate", "shard", "context", "tensor", "expert"]
# Several axes that are summed or shared over at once.
Joined = Literal["data", "gradient", "all"]

AXES: tuple[AxisName, ...] = (
    "pipeline",
    "replicate",
    "shard",
    "context",
    "tensor",
)  # slowest first
JOINED: dict[Joined, tuple[AxisName, ...]] = {
    "data": ("replicate", "shard"),  # ranks that have different sequences
    "gradient": ("replicate", "shard", "context"),  # ranks that have the same weights' gradients
    "all": AXES,
}


class Coordinates(NamedTuple):
    """Where a rank stands on each axis."""

    pipeline: int
    replicate: int
    shard: int
    context: int
    tensor: int


@answers_wrong_options()
@dataclass(frozen=True)
class Layout:
    """How many devices share each part of the work."""

    replicate: int = field(
        default=1,
        metadata=field_help("copies of the model, each with its own sequences", minimum=1),
    )
    shard: int = field(
        default=1,
        metadata=field_help(
            "devices over which weights, gradients and optimizer state are cut, each with its own "
            "sequences",
            minimum=1,
        ),
    )
    context: int = field(
        default=1, metadata=field_help("devices that share the tokens of a sequence", minimum=1)
    )
    tensor: int = field(
        default=1, metadata=field_help("devices that share every matrix", minimum=1)
    )
    expert: int = field(
        default=1,
        metadata=field_help(
            "devices that share the experts of a layer; of those that replicate, shard and "
            "context have",
            minimum=1,
        ),
    )
    capacity: float | None = field(
        default=None,
        metadata=field_help(
            "with expert: tokens that a rank sends to an expert, times an even share; what is more "
            "is dropped (default: nothing is)",
            minimum=1.0,
        ),
    )
    pipeline: int = field(
        default=1, metadata=field_help("devices that have one part of the layers each", minimum=1)
    )
    sequence: bool = field(
        default=True,
        metadata=field_help("with tensor: norms are shared too, by tokens"),
    )
    schedule: Schedule = field(
        default="1f1b", metadata=field_help("with pipeline: the order of its passes")
    )
    stages: int = field(
        default=1,
        metadata=field_help("with pipeline: parts of the layers on each device", minimum=1),
    )

    def __post_init__(self) -> None:
        check_fields(self)
        self._check_experts()
        self._check_schedule()

    def _check_experts(self) -> None:
        ranks = self.size_of("gradient")
        if ranks % self.expert:
            near = divisor_below(ranks, self.expert)
            raise UsageError(
                f"expert is {self.expert}, which does not divide the {ranks} ranks of replicate × "
                f"shard × context; try expert={near}"
            )
        if self.capacity is not None and self.expert == 1:
            raise UsageError(f"capacity is {self.capacity:g} without expert; remove it")

    def _check_schedule(self) -> None:
        several = self.schedule in ("interleaved", "zero-bubble")
        if self.pipeline == 1:
            if self.stages > 1:
                raise UsageError(f"stages is {self.stages} without pipeline; remove it")
        elif several and self.stages == 1:
            raise UsageError(f"the schedule {self.schedule} needs several stages on each device; "
                             "try stages=2")  # fmt: skip
        elif not several and self.stages > 1:
            raise UsageError(
                f"stages is {self.stages}, and the schedule {self.schedule} has one on each "
                "device; try schedule=interleaved"
            )

    @property
    def size(self) -> int:
        """Ranks."""
        return prod(getattr(self, axis) for axis in AXES)

    @property
    def is_single(self) -> bool:
        return self.size == 1

    def size_of(self, axis: AxisName | Joined) -> int:
        return prod(getattr(self, each) for each in axes_of(axis))

    def coordinates(self, rank: int) -> Coordinates:
        self._check_rank(rank)
        numbers = []
        for axis in reversed(AXES):
            rank, number = divmod(rank, getattr(self, axis))
            numbers.append(number)
        return Coordinates(*reversed(numbers))

    def rank_of(self, coordinates: Coordinates) -> int:
        rank = 0
        for axis, number in zip(AXES, coordinates, strict=True):
            size = getattr(self, axis)
            assert 0 <= number < size, (axis, number, size)
            rank = rank * size + number
        return rank

    def group(self, rank: int, axis: AxisName | Joined) -> tuple[int, ...]:
        """The ranks that differ from this one along an axis alone, itself among them."""
        if axis == "expert":
            return self._expert_group(rank)
        own, free = self.coordinates(rank), axes_of(axis)
        numbers = [
            range(getattr(self, name)) if name in free else (number,)
            for name, number in zip(AXES, own, strict=True)
        ]
        return tuple(self.rank_of(Coordinates(*each)) for each in product(*numbers))

    def _expert_group(self, rank: int) -> tuple[int, ...]:
        ranks = self.group(rank, "gradient")
        first = self.index(rank, "gradient") // self.expert * self.expert
        return ranks[first : first + self.expert]

    def expert_copies(self, rank: int) -> tuple[int, ...]:
        """The ranks that have the same experts as this one."""
        ranks = self.group(rank, "gradient")
        return ranks[self.index(rank, "expert") :: self.expert]

    def groups(self, axis: AxisName | Joined) -> list[tuple[int, ...]]:
        """All of an axis, each once."""
        return list(dict.fromkeys(self.group(rank, axis) for rank in range(self.size)))

    def index(self, rank: int, axis: AxisName | Joined) -> int:
        """Which of its group a rank is."""
        if axis == "expert":
            return self.index(rank, "gradient") % self.expert
        number, own = 0, self.coordinates(rank)
        for each in axes_of(axis):
            number = number * getattr(self, each) + getattr(own, each)
        return number

    def sequences(self, rank: int, count: int) -> range:
        """Which of a step's sequences a rank has."""
        ranks = self.size_of("data")
        if count % ranks:
            below = max(ranks, count // ranks * ranks)
            raise UsageError(
                f"a batch of {count} sequences cannot be shared by the {ranks} ranks of "
                f"replicate × shard; try a batch of {below}"
            )
        share = count // ranks
        number = self.index(rank, "data")
        return range(number * share, (number + 1) * share)

    def tokens(self, rank: int, length: int) -> tuple[range, ...]:
        """Which of a sequence's tokens a rank has: one part from its front and the one as far from
        its back, so that all have as much to attend to.
        """
        if self.context == 1:
            return (range(length),)
        parts = 2 * self.context
        if length % parts:
            near = max(parts, length // parts * parts)
            raise UsageError(
                f"a sequence of {length} tokens cannot be cut in 2 × {self.context} parts for "
                f"context={self.context}; try {near} tokens"
            )
        part, number = length // parts, self.coordinates(rank).context
        return tuple(range(each * part, (each + 1) * part) for each in (number, parts - 1 - number))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Which of all stages a rank has, the first first."""
        number = self.coordinates(rank).pipeline
        return tuple(range(number, self.num_stages, self.pipeline))

    @property
    def num_stages(self) -> int:
        return self.pipeline * self.stages

    def words(self) -> str:
        """`shard=2,tensor=2`: what differs from a single device."""
        given = [
            f"{entry.name}={_word(getattr(self, entry.name))}"
            for entry in fields(self)
            if getattr(self, entry.name) != entry.default
        ]
        return ",".join(given) or "replicate=1"

    @staticmethod
    def parse(text: str) -> Layout:
        """From `shard=2,tensor=2`, or from a JSON file."""
        if text.endswith(".json"):
            return Layout.load(Path(text))
        values: dict[str, Any] = {}
        for part in filter(None, (each.strip() for each in text.split(","))):
            name, equals, value = (each.strip() for each in part.partition("="))
            if not equals:
                raise UsageError(f"--layout has {part!r}; expected NAME=NUMBER, e.g. shard=2")
            if name in values:
                raise UsageError(f"--layout has {name} twice")
            values[name] = _parsed(name, value)
        return layout_from(values, "--layout")

    @staticmethod
    def load(path: Path) -> Layout:
        """From a file of its fields, or one that has them as `layout` (a plan, a run's config)."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror}") from error
        except ValueError as error:
            raise UsageError(f"{path} is not JSON: {error}") from error
        if isinstance(values, Mapping) and isinstance(values.get("layout"), Mapping):
            values = values["layout"]
        if not isinstance(values, Mapping):
            raise UsageError(f"{path} is no layout: expected an object with fields")
        return layout_from(values, str(path))

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def _check_rank(self, rank: int) -> None:
        assert 0 <= rank < self.size, f"rank {rank} of {self.size}"


def layout_from(values: Mapping[str, Any], origin: str) -> Layout:
    layout: Layout = config_from(Layout, dict(values), origin)
    return layout


def axes_of(axis: AxisName | Joined) -> tuple[AxisName, ...]:
    """The axes that a name stands for."""
    return JOINED[axis] if axis in get_args(Joined) else (axis,)  # type: ignore[index, return-value]


def cut_by_cost(costs: Sequence[float], num_stages: int) -> list[range]:
    """Neighbouring layers in stages, so that the dearest stage is as cheap as can be; each has at
    least one.
    """
    if num_stages > len(costs):
        raise UsageError(
            f"{len(costs)} layers cannot be cut in {num_stages} stages; try {len(costs)} or fewer "
            "(pipeline × stages)"
        )
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # best[k][n]: the dearest of k stages over the first n layers, and where the last one begins.
    best = [{0: (0.0, 0)}]
    for stage in range(1, num_stages + 1):
        row = {}
        for end in range(stage, len(costs) - (num_stages - stage) + 1):
            row[end] = min(
                (max(best[-1][begin][0], sums[end] - sums[begin]), begin)
                for begin in best[-1]
                if begin < end
            )
        best.append(row)
    cuts = [len(costs)]
    for stage in range(num_stages, 0, -1):
        cuts.append(best[stage][cuts[-1]][1])
    cuts.reverse()
    return [range(begin, end) for begin, end in pairwise(cuts)]


def _parsed(name: str, value: str) -> Any:
    if name in ("schedule", "sequence"):
        return {"true": True, "false": False}.get(value, value)
    try:
        return float(value) if name == "capacity" else int(value)
    except ValueError:
        kind = "number" if name == "capacity" else "whole number"
        raise UsageError(f"--layout {name}={value}; give a {kind}") from None


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def divisor_below(number: int, limit: int) -> int:
    """The largest divisor that is not above a limit."""
    return max(each for each in range(1, min(number, limit) + 1) if number % each == 0)
