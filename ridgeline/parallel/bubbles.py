"""The order of a pipeline's passes on each of its devices, and the share of the time in which they
wait for each other (the bubble). Integers and floats, no torch: the orders are those of
torch.distributed.pipelining, which runs them.

    check_micro_batches(layout, 6)              # UsageError with the nearest number that works
    pass_order(layout, 8, 0)                         # F0.0 F0.1 B0.0 …: of the first device
    bubble_share(layout, 8)                     # of all devices' time
    bubble_share(layout, 8, [PassTimes(forward=2.0), PassTimes(forward=1.0)])
    in_flight(layout, 8, 0)                     # micro-batches whose activations it keeps at most
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import Literal, NamedTuple

from ridgeline.errors import UsageError
from ridgeline.parallel.layout import Layout

# Forward, backward, and with zero-bubble its two parts: for the inputs and for the weights.
PassKind = Literal["F", "B", "I", "W"]


class StagePass(NamedTuple):
    """What a device does next."""

    kind: PassKind
    stage: int  # of all stages
    micro: int  # which micro-batch


@dataclass(frozen=True)
class PassTimes:
    """Of one micro-batch through one stage, in any unit."""

    forward: float = 1.0
    inputs: float = 1.0  # the backward pass, as far as gradients flow back through the stage
    weights: float = 1.0  # what is left of it: the weights' gradients

    def of(self, kind: PassKind) -> float:
        if kind == "B":
            return self.inputs + self.weights
        return {"F": self.forward, "I": self.inputs, "W": self.weights}[kind]


def check_micro_batches(layout: Layout, num_micro: int) -> None:
    """That the layout's schedule can run so many in a step."""
    if layout.pipeline == 1 or fits_pipeline(layout, num_micro):
        return
    near = next(
        number
        for distance in count(1)
        for number in (num_micro - distance, num_micro + distance)
        if number > 0 and fits_pipeline(layout, number)
    )
    name = f"pipeline={layout.pipeline} with the schedule {layout.schedule}"
    if layout.schedule == "1f1b":
        needed = f"needs at least {layout.pipeline} micro-batches a step"
    else:
        rounds = num_micro // layout.pipeline
        needed = f"runs micro-batches in {rounds} rounds of equal size"
    raise UsageError(
        f"{name} {needed}, and a step has {num_micro}; try {near} (the sequences of a step by "
        "those of a micro-batch)"
    )


def fits_pipeline(layout: Layout, num_micro: int) -> bool:
    """Whether its schedule can run so many micro-batches in a step."""
    if layout.schedule == "gpipe":
        return num_micro >= 1
    if layout.schedule == "1f1b":
        return num_micro >= layout.pipeline
    return num_micro >= 1 and num_micro % _rounds(layout, num_micro) == 0


def _rounds(layout: Layout, num_micro: int) -> int:
    """With several stages on a device: how often it goes through all of them."""
    return max(1, num_micro // layout.pipeline)


def pass_order(layout: Layout, num_micro: int, index: int) -> list[StagePass]:
    """Of one device along the pipeline, in order."""
    per_round = num_micro // _rounds(layout, num_micro)
    stages = range(index, layout.num_stages, layout.pipeline)
    total = num_micro * len(stages)
    splits = layout.schedule == "zero-bubble"
    forward = _passes("F", stages, per_round, total)
    backward = list(_passes("I" if splits else "B", stages[::-1], per_round, total))
    weights = iter([own._replace(kind="W") for own in backward] if splits else [])
    order = [next(forward) for _ in range(_num_first(layout, num_micro, per_round, index))]
    for number, own in enumerate(backward):
        order += [each for each in (next(forward, None), own) if each is not None]
        if splits and number >= index:
            order.append(next(weights))
    return order + list(weights)


def _passes(
    kind: PassKind, stages: Sequence[int], per_round: int, total: int
) -> Iterator[StagePass]:
    """A round's micro-batches through the first stage, then through the next."""
    done: Counter[int] = Counter()
    for number in range(total):
        stage = stages[number // per_round % len(stages)]
        yield StagePass(kind, stage, done[stage])
        done[stage] += 1


def _num_first(layout: Layout, num_micro: int, per_round: int, index: int) -> int:
    """Forward passes before the first pair of both."""
    behind = layout.pipeline - 1 - index
    number = {
        "gpipe": num_micro,
        "1f1b": behind,
        "interleaved": (layout.stages - 1) * per_round + 2 * behind,
        "zero-bubble": (layout.stages - 1) * per_round + behind,
    }[layout.schedule]
    return min(number, num_micro * layout.stages)


def bubble_share(
    layout: Layout,
    num_micro: int,
    times: Sequence[PassTimes] | None = None,
    transfer: float = 0.0,
) -> float:
    """Of the time of all devices along the pipeline, the part in which they have nothing to do.
    `times` are those of each stage, by default alike; `transfer` passes between two stages.
    """
    times = times or [PassTimes()] * layout.num_stages
    orders = _orders(layout, num_micro, times)
    span = max(_ends(orders, times, transfer).values())
    work = sum(times[own.stage].of(own.kind) for order in orders for own in order)
    return 1.0 - work / (span * layout.pipeline)


class TimedPass(NamedTuple):
    """When a device begins and ends a pass."""

    device: int  # along the pipeline
    work: StagePass
    begin: float
    end: float


def pass_times(
    layout: Layout, num_micro: int, times: Sequence[PassTimes], transfer: float = 0.0
) -> list[TimedPass]:
    """Of all devices, in the order in which they do them."""
    orders = _orders(layout, num_micro, times)
    ends = _ends(orders, times, transfer)
    return [
        TimedPass(device, own, ends[own] - times[own.stage].of(own.kind), ends[own])
        for device, order in enumerate(orders)
        for own in order
    ]


def step_span(
    layout: Layout, num_micro: int, times: Sequence[PassTimes], transfer: float = 0.0
) -> float:
    """From the first pass's beginning to the last one's end."""
    return max(_ends(_orders(layout, num_micro, times), times, transfer).values())


def _orders(layout: Layout, num_micro: int, times: Sequence[PassTimes]) -> list[list[StagePass]]:
    check_micro_batches(layout, num_micro)
    assert len(times) == layout.num_stages, (len(times), layout.num_stages)
    return _all_orders(layout, num_micro)


@lru_cache(maxsize=256)
def _all_orders(layout: Layout, num_micro: int) -> list[list[StagePass]]:
    return [pass_order(layout, num_micro, index) for index in range(layout.pipeline)]


def _ends(
    orders: Sequence[Sequence[StagePass]], times: Sequence[PassTimes], transfer: float
) -> dict[StagePass, float]:
    """Of each pass, every device doing its own in order as soon as it can."""
    ends: dict[StagePass, float] = {}
    clocks = [0.0] * len(orders)
    places = [0] * len(orders)
    last = len(times) - 1
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        before = sum(places)
        for index, order in enumerate(orders):
            while places[index] < len(order):
                own = order[places[index]]
                source = _source(own, last)
                if source is not None and source not in ends:
                    break
                ready = 0.0 if source is None else ends[source] + transfer
                clocks[index] = max(clocks[index], ready) + times[own.stage].of(own.kind)
                ends[own] = clocks[index]
                places[index] += 1
        assert sum(places) > before, "these orders wait for each other"
    return ends


def _source(own: StagePass, last: int) -> StagePass | None:
    """What another device has to have sent; what is the device's own stands before it in order."""
    if own.kind == "F" and own.stage > 0:
        return StagePass(own.kind, own.stage - 1, own.micro)
    if own.kind in ("B", "I") and own.stage < last:
        return StagePass(own.kind, own.stage + 1, own.micro)
    return None


def in_flight(layout: Layout, num_micro: int, index: int) -> int:
    """Passes through a stage whose activations a device keeps at once, at most. With zero-bubble
    some of a pass's stay until its weights' gradients are computed; they count until then.
    """
    return round(most_held(layout, num_micro, index, [1.0] * layout.stages))


def most_held(layout: Layout, num_micro: int, index: int, sizes: Sequence[float]) -> float:
    """What a device keeps at once of passes through its stages, at most, where one through each of
    them keeps `sizes`. Its first stages keep more passes than its last.
    """
    assert len(sizes) == layout.stages, (len(sizes), layout.stages)
    ends = "W" if layout.schedule == "zero-bubble" else "B"
    now = most = 0.0
    for own in pass_order(layout, num_micro, index):
        size = sizes[own.stage // layout.pipeline]
        now += ((own.kind == "F") - (own.kind == ends)) * size
        most = max(most, now)
    return most


def stream_bytes(layout: Layout, num_tokens: int, hidden_size: int, element_bytes: int) -> int:
    """What a device along the pipeline sends in a step at most: the stream of all tokens behind
    each of its stages, and the gradient of the one before it. `num_tokens` are those of the step's
    sequences that the pipeline has; context, and tensor with sequence, share them out.
    """
    if layout.pipeline == 1:
        return 0
    share = layout.context * (layout.tensor if layout.sequence else 1)
    return 2 * layout.stages * num_tokens * hidden_size * element_bytes // share
