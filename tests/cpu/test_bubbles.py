"""The order of a pipeline's passes is torch's, and bubbles are those of the known formulas."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from ridgeline.errors import UsageError
from ridgeline.parallel.bubbles import (
    PassTimes,
    bubble_share,
    check_micro_batches,
    in_flight,
    most_held,
    pass_order,
    stream_bytes,
)
from ridgeline.parallel.layout import Layout, Schedule

TORCH: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
}
LETTERS = {
    "FORWARD": "F",
    "FULL_BACKWARD": "B",
    "BACKWARD_INPUT": "I",
    "BACKWARD_WEIGHT": "W",
}
SHAPES: list[tuple[Schedule, int]] = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved", 2),
    ("interleaved", 3),
    ("zero-bubble", 2),
    ("zero-bubble", 3),
]


class RecordingStage:
    """What a schedule calls of a stage; no work, and nobody to talk to."""

    is_last, has_backward, submod = False, True, None

    def __init__(self, layout: Layout, stage: int) -> None:
        self.num_stages, self.stage_index = layout.num_stages, stage
        self.group_size, self.group_rank = layout.pipeline, stage % layout.pipeline
        self.done: list[tuple[str, int, int]] = []

    def forward_one_chunk(self, micro: int, *_: Any, **__: Any) -> None:
        self.done.append(("F", self.stage_index, micro))

    def backward_one_chunk(self, micro: int, **_: Any) -> None:
        self.done.append(("B", self.stage_index, micro))

    def __getattr__(self, name: str) -> Any:
        return lambda *_: []  # to send and to receive


def torch_order(layout: Layout, num_micro: int) -> list[list[tuple[str, int, int]]]:
    """What torch's schedule of this name does on each device."""
    kind, devices = TORCH[layout.schedule], range(layout.pipeline)
    if layout.stages > 1:
        stages = [RecordingStage(layout, index) for index in layout.stages_of(0)]
        orders = kind(stages, num_micro, loss_fn=sum).pipeline_order
        return [
            [
                (LETTERS[action.computation_type.name], action.stage_index, action.microbatch_index)
                for action in orders[index]
                if action is not None
            ]
            for index in devices
        ]
    alone = [RecordingStage(layout, index) for index in devices]
    for stage in alone:
        schedule = kind(stage, num_micro, loss_fn=sum)
        schedule._initialize_stage = lambda *_, **__: None
        schedule._step_microbatches()
    return [stage.done for stage in alone]


@pytest.mark.parametrize(("schedule", "stages"), SHAPES)
@pytest.mark.parametrize("pipeline", [2, 4])
def test_orders_are_those_that_torch_runs(schedule: Schedule, stages: int, pipeline: int) -> None:
    layout = Layout(pipeline=pipeline, schedule=schedule, stages=stages)
    for num_micro in (1, 3, 4, 8, 10, 12):
        try:
            check_micro_batches(layout, num_micro)
        except UsageError:
            with pytest.raises(ValueError, match="icrobatches"):
                torch_order(layout, num_micro)
            continue
        expected = torch_order(layout, num_micro)
        assert [pass_order(layout, num_micro, index) for index in range(pipeline)] == expected


@pytest.mark.parametrize(("schedule", "stages"), SHAPES)
def test_bubbles_are_those_of_the_formulas(schedule: Schedule, stages: int) -> None:
    for pipeline in (2, 3, 8):
        layout = Layout(pipeline=pipeline, schedule=schedule, stages=stages)
        for rounds in (1, 2, 5):
            num_micro = rounds * pipeline
            passes = num_micro * stages * (3 if schedule == "zero-bubble" else 1)
            expected = (pipeline - 1) / (passes + pipeline - 1)
            assert bubble_share(layout, num_micro) == pytest.approx(expected)


def test_a_dear_stage_and_slow_transfers_make_others_wait() -> None:
    layout = Layout(pipeline=2)
    even = bubble_share(layout, 8)
    assert bubble_share(layout, 8, [PassTimes(), PassTimes(2.0, 2.0, 2.0)]) > even + 0.15
    assert bubble_share(layout, 8, transfer=0.5) > even
    # Nothing but the dear stage's own work, and what stands before and behind it: 3 + 8 × 6.
    wait = 1 - (8 * 3 + 8 * 6) / (2 * (3 + 8 * 6))
    assert bubble_share(layout, 8, [PassTimes(), PassTimes(2.0, 2.0, 2.0)]) == pytest.approx(wait)


def test_what_is_kept_does_not_grow_with_micro_batches() -> None:
    assert [in_flight(Layout(pipeline=4), 64, index) for index in range(4)] == [4, 3, 2, 1]
    assert in_flight(Layout(pipeline=4, schedule="gpipe"), 64, 0) == 64
    for schedule in ("interleaved", "zero-bubble"):
        layout = Layout.parse(f"pipeline=4,schedule={schedule},stages=2")
        assert in_flight(layout, 8, 0) == in_flight(layout, 64, 0)


def test_a_devices_first_stages_keep_more_passes_than_its_last() -> None:
    layout = Layout.parse("pipeline=4,schedule=interleaved,stages=2")
    last = [most_held(layout, 8, 3, sizes) for sizes in ([1.0, 1.0], [1.0, 0.0], [0.0, 1.0])]
    assert last == [5.0, 5.0, 1.0]


@pytest.mark.parametrize(
    ("layout", "num_micro", "near"),
    [
        ("pipeline=4", 2, "try 4"),
        ("pipeline=4,schedule=interleaved,stages=2", 9, "try 8"),
        ("pipeline=4,schedule=interleaved,stages=2", 13, "try 12"),
        ("pipeline=2,schedule=zero-bubble,stages=2", 5, "try 4"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(layout: str, num_micro: int, near: str) -> None:
    with pytest.raises(UsageError, match=near):
        check_micro_batches(Layout.parse(layout), num_micro)


def test_bytes_of_the_stream() -> None:
    assert stream_bytes(Layout(), 8, 16, 2) == 0
    assert stream_bytes(Layout(pipeline=2), 8, 16, 2) == 2 * 8 * 16 * 2
    assert stream_bytes(Layout(pipeline=2, tensor=4), 8, 16, 2) == 2 * 2 * 16 * 2
    assert stream_bytes(Layout(pipeline=2, tensor=4, sequence=False), 8, 16, 2) == 2 * 8 * 16 * 2
