"""Brings a step's numbers to the device: all of them, changes of the page table included, in one
copy from pinned memory that nobody waits for.

    inputs = StepSender(buffers, seats, page_size).send(plan, shape_of(plan))
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ridgeline.engine.execution.buffers import StepBuffers
from ridgeline.engine.scheduling.scheduler import MAX_STEPS_OUT
from ridgeline.engine.scheduling.step_plan import StepPlan
from ridgeline.engine.steps.batch import (
    SeatTable,
    StepInputs,
    StepShape,
    num_words,
    table_changes,
    views,
    write,
)
from ridgeline.engine.steps.transfer import to_device
from ridgeline.kernels.move_rows import MovingRows, move_rows

MAX_VIEWS = 1024  # shapes whose views are kept: decode steps come in few, mixed ones in any


class HostBuffer(NamedTuple):
    words: Tensor
    array: np.ndarray  # the same memory
    event: torch.cuda.Event | None  # of the last copy that read it


class StepSender:
    def __init__(self, buffers: StepBuffers, seats: SeatTable, page_size: int) -> None:
        self.buffers, self.seats, self.page_size = buffers, seats, page_size
        self._hosts = _host_buffers(len(buffers.words), buffers.words.device)
        self._views: dict[StepShape, StepInputs] = {}  # of the buffer, by shape
        self._num_launched = 0

    def next_step(self) -> None:
        """What follows belongs to another step, which has a host buffer of its own."""
        self._num_launched += 1

    def send(self, plan: StepPlan, shape: StepShape, judged: StepPlan | None = None) -> StepInputs:
        """A step's numbers on the device and its changes of the page table made. `judged` is the
        plan with drafts that a graph judges.
        """
        words, page_table = self.buffers.words, self.buffers.page_table
        host, array, event = self._hosts[self._num_launched % len(self._hosts)]
        if event is not None:
            event.synchronize()  # of the copy that read this buffer some steps ago
        count, changes = num_words(shape), table_changes(plan, page_table.shape[1])
        end = count + changes.size
        write(array[:count], plan, shape, self.seats, judged)
        if count < end <= len(array):
            array[count:end] = changes.ravel()
        num_sent = min(end, len(array))
        words[:num_sent].copy_(host[:num_sent], non_blocking=True)
        if event is not None:
            event.record()
        if changes.size:
            sent = words[count:end] if end <= len(array) else to_device(changes, words.device)
            where, pages = sent.view(2, -1)
            page_table.view(-1).index_copy_(0, where.long(), pages)
        return self._views_of(shape, count)

    def _views_of(self, shape: StepShape, count: int) -> StepInputs:
        if shape not in self._views:
            if len(self._views) >= MAX_VIEWS:
                self._views.clear()
            self._views[shape] = views(self.buffers.words[:count], shape)
        return self._views[shape]

    def move(self, inputs: StepInputs, shape: StepShape) -> None:
        """Rows behind drafts of the step before, to where they belong. Drafts are decode rows where
        that is done, so that a token, its row and its logits have the same number.
        """
        count = shape.num_decode_rows
        places = (
            inputs.positions[:count],
            inputs.lengths[:count],
            inputs.totals[:count],
            inputs.draw_positions[:count],
        )
        rows = MovingRows(inputs.moved[:count], places, inputs.slots[:count], inputs.seats[:count])
        counts, page_table = self.buffers.results[2], self.buffers.page_table
        move_rows(rows, counts, inputs.judged, page_table, self.page_size)


def _host_buffers(count: int, device: torch.device) -> list[HostBuffer]:
    """One for each step that may be out and one to write: pinned where there is a device."""
    on_gpu = device.type == "cuda"
    words = [
        torch.zeros(count, dtype=torch.int32, pin_memory=on_gpu) for _ in range(MAX_STEPS_OUT + 1)
    ]
    return [
        HostBuffer(each, each.numpy(), torch.cuda.Event() if on_gpu else None) for each in words
    ]
